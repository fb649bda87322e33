"""A full report in pieces (rule 15): ranges of ids that together cover all ids of each volume.

What the master has in a range beside the ids of its piece is gone. So each block of this worker is in one of them: all
volumes are looked at when the first one is made, and changes before have been told by then. A block that moves later
is still told of where it was, until the change is told right after. Blocks that come meanwhile are missing: those of
this worker's own boots lie above the fence that travels with the piece, which the master leaves alone; replicas fetched
meanwhile are told as changes right after.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.core.limits import MAX_BATCH
from kvstore.core.types import BlockId
from kvstore.worker.blocks.store import Store
from kvstore.worker.volumes.volume import Volume

_ID_BYTES = 16


class Piece(NamedTuple):
    """The blocks of `volume` with first <= id <= last; b"" = from the start, to the end."""

    volume: int
    first: bytes
    last: bytes
    ids: list[BlockId]


class FullReport:
    """One run over the volumes that are in service when it begins."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ids: dict[Volume, list[BlockId]] | None = None
        self._at = 0

    @property
    def has_begun(self) -> bool:
        return self._ids is not None

    def next_piece(self) -> Piece | None:
        """The next one; None at the end."""
        if self._ids is None:
            self._ids = {volume: self._store.ids(volume) for volume in self._store.in_service}
        while self._ids:
            volume, ids = next(iter(self._ids.items()))
            if volume.in_service:
                return self._piece_of(volume, ids)
            self._finish_volume(volume)
        return None

    def _piece_of(self, volume: Volume, ids: list[BlockId]) -> Piece:
        part = ids[self._at : self._at + MAX_BATCH]
        first = _after(ids[self._at - 1]) if self._at else b""
        self._at += len(part)
        is_last = self._at >= len(ids)
        if is_last:
            self._finish_volume(volume)
        return Piece(volume.id, first, b"" if is_last else part[-1].pack(), [b for b in part if self._is_here(b)])

    def _finish_volume(self, volume: Volume) -> None:
        assert self._ids is not None
        del self._ids[volume]
        self._at = 0

    def _is_here(self, block: BlockId) -> bool:
        """On this worker, be it in another volume by now."""
        known = self._store.get(block)
        return known is not None and not known.leaving


def _after(block: BlockId) -> bytes:
    return (int.from_bytes(block.pack()) + 1).to_bytes(_ID_BYTES)
