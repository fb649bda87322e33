"""Room for staging files at their worker: how much is asked for, when, and what goes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from kvstore.client.blocks import AsyncBlocks
from kvstore.client.staging import Staging, room_to_ask
from kvstore.core.errors import KvError, NoSpace, NotFound, Stale, Timeout, TooLarge, Unavailable
from kvstore.core.limits import KIB, MIB
from kvstore.fuse.localfile import LocalFile
from kvstore.fuse.usual import UsualSizes
from kvstore.runtime import Runtime

log = logging.getLogger(__name__)

FIRST_RESERVATION_BYTES: Final = 4 * MIB
MAX_RESERVATION_STEP_BYTES: Final = 256 * MIB
"""Reservations grow fourfold up to this step: a chunk of 14 MiB takes three calls, a file of 1 GiB nine."""
SMALL_FILE_BYTES: Final = 64 * KIB
"""Such a file has only what it needs: a thousand of them that nobody renames must not push the cache out."""
SPARED_BYTES: Final = 64 * KIB
"""So much more than it needs a file may keep reserved. What was reserved ahead beyond that goes back at the flush."""
TIGHT_FOR_S: Final = 10.0
"""After a reservation that was too much for the disk, so long only what is needed is asked for."""
T = TypeVar("T")


class Reservations:
    """`LocalFile.reserved_bytes` of all files of a mount; `max_block_bytes`: a file is one block.

    The caller holds the file's lock wherever one waits.
    """

    def __init__(self, blocks: AsyncBlocks, runtime: Runtime, max_block_bytes: int) -> None:
        self._blocks, self._runtime, self._max_block_bytes = blocks, runtime, max_block_bytes
        self._ahead: dict[int, asyncio.Task[None]] = {}
        """By `LocalFile.id`: reservations that nobody waits for."""
        self._tight_until_s = 0.0
        self._usual = UsualSizes(FIRST_RESERVATION_BYTES)

    def check(self, size_bytes: int) -> None:
        """Raises TooLarge for what no block can hold."""
        if size_bytes > self._max_block_bytes:
            raise TooLarge(f"a file holds at most {self._max_block_bytes} bytes (max_block_size)")

    async def stage(self, size_bytes: int) -> tuple[int, Staging]:
        """(bytes reserved, a new staging file). Raises NoSpace."""
        return await self._reserve(0, size_bytes, self._blocks.stage)

    async def grow(self, file: LocalFile, staged: Staging, size_bytes: int) -> None:
        """So much is about to be written. Raises NoSpace."""
        file.reserved_bytes, _ = await self._reserve(
            file.reserved_bytes, size_bytes, lambda room: self._blocks.reserve(staged, room)
        )

    async def make_room(self, file: LocalFile, staged: Staging) -> None:
        """Others have filled the disk, and the worker does not know yet: it looks. Raises NoSpace."""
        room = room_to_ask(file.size_bytes)
        await self._blocks.reserve(staged, room)
        file.reserved_bytes = room

    async def fit(self, file: LocalFile, staged: Staging) -> None:
        """Just what was written, once that is known. Raises TooLarge, NoSpace."""
        if file.reserved_bytes - SPARED_BYTES <= file.size_bytes <= file.reserved_bytes:
            return
        self.check(file.size_bytes)
        try:
            await self._blocks.reserve(staged, file.size_bytes)
            file.reserved_bytes = file.size_bytes
        except (NotFound, Stale, Timeout, Unavailable) as error:
            log.debug("nothing reserved: %s", error.message)  # nor is it where it was: the seal has the last word

    def ahead(self, file: LocalFile) -> None:
        """In the background, what files of its directory usually measure: by passthrough the kernel does not ask."""
        task = self._ahead[file.id] = asyncio.create_task(self._try_ahead(file, file.staged))
        task.add_done_callback(lambda _: self._ahead.pop(file.id, None))

    async def settled(self, file: LocalFile) -> None:
        """What is reserved ahead for it is done, or failed."""
        if (ahead := self._ahead.get(file.id)) is not None:
            await asyncio.wait({ahead})

    def sealed(self, file: LocalFile) -> None:
        """It is whole: so much do files of its directory measure."""
        self._usual.add(_directory(file), file.size_bytes)

    async def _reserve(self, reserved_bytes: int, size_bytes: int, ask: Callable[[int], Awaitable[T]]) -> tuple[int, T]:
        """(bytes that are reserved now, the answer): more than is needed, so that not every write asks, or where that
        is too much just what is needed.
        """
        room = self._room(reserved_bytes, size_bytes)
        try:
            return room, await ask(room)
        except NoSpace:
            if room == size_bytes:
                raise
        # An answer of NoSpace has waited for room: the next writes do not ask for too much again.
        self._tight_until_s = self._runtime.monotonic_s() + TIGHT_FOR_S
        return size_bytes, await ask(size_bytes)

    def _room(self, reserved_bytes: int, size_bytes: int) -> int:
        if self._runtime.monotonic_s() < self._tight_until_s:
            return size_bytes
        if size_bytes <= SMALL_FILE_BYTES:
            return max(size_bytes, min(2 * reserved_bytes, SMALL_FILE_BYTES))
        step = min(max(3 * reserved_bytes, FIRST_RESERVATION_BYTES), MAX_RESERVATION_STEP_BYTES)
        return max(size_bytes, min(reserved_bytes + step, self._max_block_bytes))

    async def _try_ahead(self, file: LocalFile, staged: Staging | None) -> None:
        room = self._usual.of(_directory(file))
        if staged is None or file.reserved_bytes >= room:
            return
        try:
            await self._blocks.reserve(staged, room, evict=False)
        except KvError as error:
            log.debug("nothing reserved ahead: %s", error.message)
            return
        if file.staged is staged:
            file.reserved_bytes = max(file.reserved_bytes, room)


def _directory(file: LocalFile) -> int:
    """The directory it was made in; 0 where that is not known any more."""
    key = file.temp_key or file.key
    return key[0] if key else 0
