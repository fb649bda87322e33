"""A full report in pieces (rule 15): ranges of ids that together cover all ids of each volume.

What the master has in a range beside the piece's ids is gone. Blocks that come while it runs may be missing in their
piece: those of this worker's own boots lie above the fence that travels with the piece, which the master leaves
alone; replicas fetched meanwhile are told as changes right after.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.core.limits import MAX_BATCH
from kvstore.core.types import BlockId
from kvstore.worker.store import Store
from kvstore.worker.volume import Volume

_ID_BYTES = 16


class Piece(NamedTuple):
    """All blocks of `volume` with first <= id <= last; b"" = from the start, to the end."""

    volume: int
    first: bytes
    last: bytes
    ids: list[BlockId]


class FullReport:
    """One run over the volumes that are in service when their turn comes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._volumes = list(store.volumes)
        self._ids: list[BlockId] | None = None
        self._at = 0

    def next_piece(self) -> Piece | None:
        """The next one, its states as they are now; None at the end."""
        while self._volumes:
            volume = self._volumes[0]
            if volume.in_service:
                return self._piece_of(volume)
            self._finish_volume()
        return None

    def _piece_of(self, volume: Volume) -> Piece:
        ids = self._ids = self._store.ids(volume) if self._ids is None else self._ids
        part = ids[self._at : self._at + MAX_BATCH]
        first = _after(ids[self._at - 1]) if self._at else b""
        self._at += len(part)
        is_last = self._at >= len(ids)
        if is_last:
            self._finish_volume()
        return Piece(
            volume.id, first, b"" if is_last else part[-1].pack(), [b for b in part if self._is_there(b, volume)]
        )

    def _finish_volume(self) -> None:
        del self._volumes[0]
        self._ids, self._at = None, 0

    def _is_there(self, block: BlockId, volume: Volume) -> bool:
        known = self._store.get(block)
        return known is not None and known.volume is volume and not known.leaving


def _after(block: BlockId) -> bytes:
    return (int.from_bytes(block.pack()) + 1).to_bytes(_ID_BYTES)
