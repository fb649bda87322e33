"""Heat that survives a restart: a file ``heat`` in the first disk volume of the worker, at most a minute old.

On disk: a version byte (2), then a msgpack map of the fields of `_File`. Version 1, whose blocks have no idle time, is
read too. Whatever is wrong with it, the worker starts without: the heat is a help, no more.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from kvstore.core.ghosts import Content
from kvstore.core.heat import Heat
from kvstore.core.types import BlockId
from kvstore.worker.blocks.heat import Known, Remembered, aged
from kvstore.worker.blocks.store import Store
from kvstore.worker.volumes.volume import Volume

log = logging.getLogger(__name__)
T = TypeVar("T")

VERSION: Final = 2
NAME: Final = "heat"
INTERVAL_S: Final = 60.0
"""Between two snapshots."""
PIECE: Final = 1000
"""Blocks or ghosts that are added to a snapshot before the loop goes on with others: about 2 ms."""
MAX_BYTES: Final = 1 << 30
_BLOCK: Final = struct.Struct(">QQd?f")
"""Boot, counter, score, proven, idle seconds."""
_BLOCK_1: Final = struct.Struct(">QQd?")
"""The same in version 1."""
_GHOST: Final = struct.Struct(">QQd?")
"""Length in bytes, hash, score, proven."""


class _File(msgspec.Struct):
    blocks: bytes = b""
    ghosts: bytes = b""
    probation: float = 0.0


class Snapshot:
    """The file in the making."""

    def __init__(self, probation: float) -> None:
        self._blocks, self._ghosts, self._probation = bytearray(), bytearray(), probation

    def add_block(self, block: BlockId, known: Known) -> None:
        self._blocks += _BLOCK.pack(*block, *known.heat, known.idle_s)

    def add_ghost(self, content: Content, heat: Heat) -> None:
        self._ghosts += _GHOST.pack(*content, *heat)

    def encode(self) -> bytes:
        file = _File(bytes(self._blocks), bytes(self._ghosts), self._probation)
        return bytes((VERSION,)) + msgspec.msgpack.encode(file)


def encode(remembered: Remembered) -> bytes:
    snapshot = Snapshot(remembered.probation)
    for block, known in remembered.blocks.items():
        snapshot.add_block(block, known)
    for content, heat in remembered.ghosts:
        snapshot.add_ghost(content, heat)
    return snapshot.encode()


def decode(data: bytes) -> Remembered:
    """Raises ValueError for anything else than what `encode` made, or version 1 did."""
    if not data or data[0] not in (1, VERSION):
        raise ValueError("not of this version")
    try:
        file = msgspec.msgpack.decode(data[1:], type=_File)
        blocks = _blocks(file.blocks, _BLOCK_1 if data[0] == 1 else _BLOCK)
        ghosts = [(Content(a, b), Heat(score, proven)) for a, b, score, proven in _GHOST.iter_unpack(file.ghosts)]
    except (msgspec.DecodeError, struct.error) as error:
        raise ValueError(str(error)) from None
    scores = (heat.score for heat in (*(known.heat for known in blocks.values()), *(heat for _, heat in ghosts)))
    if not math.isfinite(file.probation) or not all(map(math.isfinite, scores)):
        raise ValueError("a score is not a number")
    if not all(math.isfinite(known.idle_s) for known in blocks.values()):
        raise ValueError("an idle time is not a number")
    return Remembered(blocks, ghosts, file.probation)


def _blocks(packed: bytes, layout: struct.Struct) -> dict[BlockId, Known]:
    rows = layout.iter_unpack(packed)
    return {BlockId(a, b): Known(Heat(score, proven), *idle) for a, b, score, proven, *idle in rows}


class HeatFile:
    """Written now and then while the worker runs, and when it stops."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def load(self) -> None:
        """The heat that a former process left; before the blocks are found."""
        if (home := self._home()) is None:
            return
        try:
            remembered = await self._store.runtime.in_thread(_load, home)
        except OSError as error:
            self._store.explain(home, error, "reading the heat of its blocks")
            return
        if remembered is not None:
            self._store.heat.recall(remembered)

    async def save(self) -> None:
        if (home := self._home()) is None or not self._store.scanned.is_set():
            return
        snapshot = await self._snapshot()
        try:
            await self._store.runtime.in_thread(_save, home, snapshot)
        except OSError as error:
            self._store.explain(home, error, "saving the heat of its blocks")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._store.runtime.sleep(INTERVAL_S)
            await self.save()

    async def _snapshot(self) -> Snapshot:
        """Piece by piece: a million blocks in one go would hold the loop up for a second. All scores are as of its
        beginning; a block or ghost that comes or goes meanwhile may be missing.
        """
        heat, sleep = self._store.heat, self._store.runtime.sleep
        clock, now_s = heat.clock.now, self._store.runtime.monotonic_s()
        snapshot = Snapshot(heat.ghosts.probation)
        for blocks in _pieces(list(self._store.all())):
            for block in blocks:
                if self._store.get(block.id) is block:
                    snapshot.add_block(block.id, heat.known(block, clock, now_s))
            await sleep(0)
        for contents in _pieces(heat.ghosts.contents()):
            for content in contents:
                if ghost := heat.ghosts.heat_of(content):
                    snapshot.add_ghost(content, aged(ghost, clock))
            await sleep(0)
        return snapshot

    def _home(self) -> Volume | None:
        """The volume that has the file: memory would forget it."""
        return next((volume for volume in self._store.in_service if volume.tier != "mem"), None)


def _pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[at : at + PIECE] for at in range(0, len(items), PIECE))


def _save(volume: Volume, snapshot: Snapshot) -> None:
    volume.disk.replace_durably(f"{volume.path}/{NAME}", snapshot.encode())


def _load(volume: Volume) -> Remembered | None:
    try:
        fd = volume.disk.open_read(f"{volume.path}/{NAME}")
    except FileNotFoundError:
        return None
    try:
        return decode(volume.disk.read(fd, MAX_BYTES, 0))
    except ValueError as error:
        log.warning("%s/%s is of no use (%s); blocks start with equal heat", volume.path, NAME, error)
        return None
    finally:
        volume.disk.close(fd)
