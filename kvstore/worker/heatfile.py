"""Heat that survives a restart: a file ``heat`` in the first disk volume of the worker, at most a minute old.

On disk: a version byte (1), then a msgpack map of the fields of `_File`. Whatever is wrong with it, the worker starts
without: the heat is a help, no more.
"""

from __future__ import annotations

import logging
import math
import struct
from typing import Final

import msgspec

from kvstore.core.ghosts import Content
from kvstore.core.heat import Heat
from kvstore.core.types import BlockId
from kvstore.worker.heat import Remembered
from kvstore.worker.store import Store
from kvstore.worker.volume import Volume

log = logging.getLogger(__name__)

VERSION: Final = 1
NAME: Final = "heat"
INTERVAL_S: Final = 60.0
"""Between two snapshots."""
MAX_BYTES: Final = 1 << 30
_BLOCK: Final = struct.Struct(">QQd?")
"""Boot, counter, score, proven."""
_GHOST: Final = struct.Struct(">QQd?")
"""Length in bytes, hash, score, proven."""


class _File(msgspec.Struct):
    blocks: bytes = b""
    ghosts: bytes = b""
    probation: float = 0.0


def encode(remembered: Remembered) -> bytes:
    blocks = b"".join(_BLOCK.pack(*block, *heat) for block, heat in remembered.blocks.items())
    ghosts = b"".join(_GHOST.pack(*content, *heat) for content, heat in remembered.ghosts)
    return bytes((VERSION,)) + msgspec.msgpack.encode(_File(blocks, ghosts, remembered.probation))


def decode(data: bytes) -> Remembered:
    """Raises ValueError for anything else than what `encode` made."""
    if data[:1] != bytes((VERSION,)):
        raise ValueError("not of this version")
    try:
        file = msgspec.msgpack.decode(data[1:], type=_File)
        blocks = {BlockId(a, b): Heat(score, proven) for a, b, score, proven in _BLOCK.iter_unpack(file.blocks)}
        ghosts = [(Content(a, b), Heat(score, proven)) for a, b, score, proven in _GHOST.iter_unpack(file.ghosts)]
    except (msgspec.DecodeError, struct.error) as error:
        raise ValueError(str(error)) from None
    scores = (heat.score for heat in (*blocks.values(), *(heat for _, heat in ghosts)))
    if not math.isfinite(file.probation) or not all(map(math.isfinite, scores)):
        raise ValueError("a score is not a number")
    return Remembered(blocks, ghosts, file.probation)


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
        remembered = self._store.heat.remember(self._store.all())
        try:
            await self._store.runtime.in_thread(_save, home, remembered)
        except OSError as error:
            self._store.explain(home, error, "saving the heat of its blocks")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._store.runtime.sleep(INTERVAL_S)
            await self.save()

    def _home(self) -> Volume | None:
        """The volume that has the file: memory would forget it."""
        return next((volume for volume in self._store.in_service if volume.tier != "mem"), None)


def _save(volume: Volume, remembered: Remembered) -> None:
    volume.disk.replace_durably(f"{volume.path}/{NAME}", encode(remembered))


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
