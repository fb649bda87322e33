"""Eviction (rule 12) and every other way in which a block's file goes away."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from kvstore.core.types import BlockId
from kvstore.worker.background import Background
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.blocks.store import Store
from kvstore.worker.volumes import lease
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.volumes.held import HeldBytes, HeldFiles, unlink_watched
from kvstore.worker.volumes.lease import Holders
from kvstore.worker.volumes.volume import Volume

MAX_SEEN = 4096
"""Blocks that a round looks through for those that may go (others are just leaving, moving, or shielded for a moment):
a few milliseconds.
"""
MAX_VICTIMS = 256
"""Blocks in one round: one report, a few milliseconds of unlinks."""
BATCH_SHARE = 64
"""A round may free up to 1/64 of the capacity more than was asked for, so that not every put costs a round."""


class Candidate(NamedTuple):
    size_bytes: int
    is_held: bool


def choose(candidates: Sequence[Candidate], need_bytes: int, extra_bytes: int) -> list[int]:
    """Indexes of the victims among candidates that come coldest first.

    Blocks nobody holds go first: the bytes of a held one are free only when its last reader closes it. Stops as soon
    as `need_bytes` are reached, and then takes more only while the sum stays within `extra_bytes` above that.
    """
    order = sorted(range(len(candidates)), key=lambda i: candidates[i].is_held)  # stable: cold before hot
    victims, total = [], 0
    for i in order:
        size, is_held = candidates[i]
        if total >= need_bytes and (is_held or total + size > need_bytes + extra_bytes):
            break
        victims.append(i)
        total += size
    return victims


class Evictor:
    """`announce` reports blocks as "nowhere" and returns whether the master has taken it."""

    def __init__(
        self,
        store: Store,
        disk: Disk,
        held: HeldFiles,
        background: Background,
        announce: Callable[[Sequence[BlockId]], Awaitable[bool]],
    ) -> None:
        self._store, self._disk, self._held = store, disk, held
        self._background, self._announce = background, announce

    async def make_room(self, volume: Volume, need_bytes: int) -> int:
        """Evict the coldest owned blocks of a volume; returns the bytes unlinked (some may still be held by readers).

        The round goes on when its caller is cancelled.
        """
        return await self._background.run(self._round(volume, need_bytes))

    async def _round(self, volume: Volume, need_bytes: int) -> int:
        extra = volume.books.capacity // BATCH_SHARE
        blocks = self._candidates(volume, need_bytes + extra)
        held = await self._store.runtime.in_thread(self._probe, [block.path for block in blocks])
        candidates = [Candidate(block.used_bytes, is_held) for block, is_held in zip(blocks, held, strict=True)]
        reason = Reason.FLOOR if volume.books.is_disk_full else Reason.CAPACITY
        return await self.evict([blocks[i] for i in choose(candidates, need_bytes, extra)], reason)

    def _candidates(self, volume: Volume, size_bytes: int) -> list[Block]:
        """Twice what is needed, so that there is a choice between held and not held; the coldest first."""
        now = self._store.runtime.monotonic_s()
        seen = itertools.islice(self._store.coldest_unpinned(volume), MAX_SEEN)
        fair = (b for b in seen if b.is_movable and not b.pinned and b.shielded_until_s <= now)
        found, total = [], 0
        for block in itertools.islice(fair, MAX_VICTIMS):
            found.append(block)
            total += block.used_bytes
            if total >= 2 * size_bytes:
                break
        return found

    def _probe(self, paths: Iterable[str]) -> list[bool]:
        return [self.is_held(path) for path in paths]

    def is_held(self, path: str) -> bool:
        """Whether anybody has it open. Blocks."""
        try:
            fd = self._disk.open_read(path)
        except OSError:
            return False
        try:
            return lease.holders(fd) is Holders.SOME
        finally:
            self._disk.close(fd)

    async def evict(self, blocks: Sequence[Block], reason: Reason) -> int:
        """Say that they are nowhere, await the reply, unlink. Without a master the cap still holds: unlink, report
        later.
        """
        going = self._leaving(blocks)
        if not going:
            return 0
        for block in going:
            self._store.heat.evicted(block)
        await self._announce([block.id for block in going])
        return await self._drop(going, reason)

    async def drop(self, blocks: Sequence[Block], reason: Reason = Reason.REMOVED) -> int:
        """Unlink blocks that are dead; the next report says so."""
        return await self._drop(self._leaving(blocks), reason)

    def _leaving(self, blocks: Iterable[Block]) -> list[Block]:
        """Those that go from now on, each once: a report may hold a block twice, as changed and in a full piece."""
        going = []
        for block in blocks:
            if not block.leaving and self._store.get(block.id) is block:
                block.leaving = True
                going.append(block)
        return going

    async def unlink_left(self, path: str, volume: Volume, used_bytes: int) -> None:
        """Unlink a file whose bytes are in the volume's books as a block's, and which is none any more."""
        (result,) = await self._background.run(self._store.runtime.in_thread(self._unlink, [path]))
        if isinstance(result, OSError):
            self._store.explain(volume, result, "unlinking what a move left behind")
            return
        self._release(volume, used_bytes, result)
        self._store.on_free()

    async def _drop(self, blocks: Sequence[Block], reason: Reason) -> int:
        results = await self._store.runtime.in_thread(self._unlink, [block.path for block in blocks])
        freed = sum(self._gone(block, result, reason) for block, result in zip(blocks, results, strict=True))
        self._store.on_free()
        return freed

    def _unlink(self, paths: Iterable[str]) -> list[int | OSError | None]:
        results: list[int | OSError | None] = []
        for path in paths:
            try:
                results.append(unlink_watched(self._disk, path))
            except OSError as error:
                results.append(error)
        return results

    def _gone(self, block: Block, result: int | OSError | None, reason: Reason) -> int:
        """The books after one unlink; returns the bytes that left the volume's blocks."""
        if isinstance(result, OSError):
            block.leaving = False
            self._store.explain(block.volume, result, "unlinking a block")
            self._store.on_change(block.id)
            return 0
        self._store.forget(block)
        self._store.counters.tiers[block.volume.tier].unlink(reason, block.used_bytes)
        self._release(block.volume, block.used_bytes, result)
        return block.used_bytes

    def _release(self, volume: Volume, size_bytes: int, watch_fd: int | None) -> None:
        if watch_fd is None:
            volume.books.free_block(size_bytes)
        else:
            volume.books.hold(blocks=size_bytes)
            self._held.add(watch_fd, HeldBytes(volume.books, size_bytes, self._store.on_free))
