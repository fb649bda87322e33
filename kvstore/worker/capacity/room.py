"""Room on the volumes: whoever wants bytes gets them here, by their real size, or is told that there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from kvstore.config.units import format_size
from kvstore.core.errors import NoSpace, Unavailable
from kvstore.core.limits import KIB, MIB, ROOM_WAIT_S
from kvstore.core.types import TIERS
from kvstore.worker.blocks.store import Store
from kvstore.worker.capacity.evict import Evictor
from kvstore.worker.volumes.disk import disk_bytes
from kvstore.worker.volumes.volume import Volume

Place = Callable[[int], Volume | None]
"""Bytes on disk → a volume that has room for them as it is."""
NOWHERE: Place = lambda size_bytes: None  # noqa: E731
HOPELESS_S = 2.0
"""So long after a wait in vain the next ones wait less, unless something becomes free."""
HOPELESS_WAIT_S = 0.5
"""Two rounds of the probe that finds out whether an unlinked file is still open."""
DEMOTING_SHARE = 0.5
"""Of the time that somebody waits for room in a tier that is not the last: after that its blocks are evicted."""
REFILL_WAIT_S = 1.0
"""For room on a disk that its other users have filled: a reader may be waiting for the write."""
REFILL_ROUNDS = 3
"""What the first round unlinks or moves may be held by readers."""
REFILL_SHARE, MIN_REFILL_BYTES, MAX_REFILL_BYTES = 32, 256 * KIB, 16 * MIB
"""So much of the capacity has to be free beyond what the books demand: ext4 keeps 1/50 of its blocks, at most 4096 of
them, for its own use, and statvfs calls them free.
"""
RETRY_S = 0.05
"""Wait for room nobody announced (other programs of the disk freed some) no longer than this before looking again."""


class _Hopeless(NamedTuple):
    missing_bytes: int
    until_s: float


class Room:
    """Set by whoever wires the worker, as staging and mover need room first:

    look     brings the books of a volume up to what the disk says
    demote   moves so many of a volume's bytes to the next tier; returns those that moved, 0 where there is none
    on_take  told of each volume that gave something away
    """

    def __init__(self, store: Store, evictor: Evictor) -> None:
        self._store, self._evictor = store, evictor
        self.look: Callable[[Volume], Awaitable[None]] = _no_look
        self.demote: Callable[[Volume, int], Awaitable[int]] = _no_demotion
        self.on_take: Callable[[Volume], None] = lambda volume: None
        self._turns = {volume.id: asyncio.Lock() for volume in store.volumes}
        self._freed = asyncio.Event()
        self._hopeless: dict[int, _Hopeless] = {}

    def freed(self) -> None:
        """Room may have appeared: whoever waits looks again."""
        self._freed.set()
        self._hopeless.clear()

    async def take(self, size_bytes: int, timeout_s: float, place: Place) -> Volume:
        """A volume that now has `size_bytes` (as a disk counts them) in its books as staging.

        `place` may name one that has room as it is, also one of the tier mem: only the worker itself writes there
        (rule 7). Else it is the fastest disk tier with room; evicts from the slowest where there is none. Raises
        NoSpace, Unavailable when no volume is in service.
        """
        need = disk_bytes(size_bytes)
        try:
            async with asyncio.timeout(self._patience(self._store.in_service, need, timeout_s)):
                await self._store.scanned.wait()  # until then the books do not know what is there
                demote_until_s = self._now_s() + DEMOTING_SHARE * timeout_s
                in_vain: set[int] = set()
                while True:
                    if (placed := place(need)) is not None and placed.books.free >= need:
                        return self._taken(placed, need)
                    volumes = self._candidates(need)
                    for volume in volumes:
                        if volume.books.free >= need:
                            return self._taken(volume, need)
                    slowest = [v for v in volumes if v.tier == volumes[-1].tier]
                    await self._make_room(slowest, in_vain, need, demote_until_s)
        except TimeoutError:
            for volume in self._store.in_service:
                self._waited(volume, need, timeout_s)
            raise self._no_space(size_bytes, self._store.in_service) from None

    def take_on(self, volume: Volume, size_bytes: int) -> None:
        """The same on this volume. Raises NoSpace when it has no room as it is."""
        need = disk_bytes(size_bytes)
        if not volume.in_service or volume.books.free < need:
            raise self._no_space(size_bytes, [volume])
        self._taken(volume, need)

    async def grow(self, volume: Volume, missing_bytes: Callable[[], int], timeout_s: float) -> None:
        """The same on the volume where the file already lies. With no time to wait nothing is looked at or evicted.

        `missing_bytes` is asked in each round: what was written without leave is counted meanwhile, and has to fit too.
        The disk is looked at first: its writer may ask for more because the disk turned out to be full. Raises NoSpace.
        """
        if timeout_s <= 0 and not self._store.scanned.is_set():
            raise self._no_space(missing_bytes(), [volume])
        try:
            async with asyncio.timeout(self._patience([volume], missing_bytes(), timeout_s)):
                await self._store.scanned.wait()  # until then the books do not know what is there
                demote_until_s = self._now_s() + DEMOTING_SHARE * timeout_s
                if timeout_s > 0:
                    await self.look(volume)
                while volume.books.missing(more := missing_bytes()) > 0:
                    if more > volume.books.capacity or timeout_s <= 0:
                        raise self._no_space(more, [volume])
                    await self._make_room([volume], set(), more, demote_until_s)
        except TimeoutError:
            self._waited(volume, missing_bytes(), timeout_s)
            raise self._no_space(missing_bytes(), [volume]) from None
        self._taken(volume, more)

    async def refill(self, volume: Volume) -> bool:
        """The disk of a volume turned out to be full: look at it, and evict what its other users have taken. Returns
        whether what was given away can be written now.
        """
        volume.books.found_full()
        spare = min(max(volume.books.capacity // REFILL_SHARE, MIN_REFILL_BYTES), MAX_REFILL_BYTES)
        try:
            async with asyncio.timeout(REFILL_WAIT_S):
                demote_until_s = self._now_s() + DEMOTING_SHARE * REFILL_WAIT_S
                for _ in range(REFILL_ROUNDS):
                    await self._round(volume, spare, demote_until_s)
                    if volume.books.missing(spare) <= 0:
                        return volume.in_service
        except TimeoutError:
            pass
        return False

    def _taken(self, volume: Volume, size_bytes: int) -> Volume:
        volume.books.take(size_bytes)
        self.on_take(volume)
        return volume

    def _candidates(self, need: int) -> list[Volume]:
        """Disk volumes that could hold it: the fastest tier first, in it the freest."""
        usable = [v for v in self._store.in_service if v.tier != "mem"]
        if not usable:
            raise Unavailable("no volume of this worker is in service; its log says why")
        large = [v for v in usable if v.books.capacity >= need]
        if not large:
            largest = format_size(max(v.books.capacity for v in usable))
            raise NoSpace(
                f"{format_size(need)} do not fit on any disk volume of this worker (the largest has {largest}): "
                "raise its capacity, or write smaller files"
            )
        return sorted(large, key=lambda v: (TIERS.index(v.tier), -v.books.free))

    async def _make_room(self, volumes: Sequence[Volume], in_vain: set[int], need: int, demote_until_s: float) -> None:
        """One round on one of the volumes; returns when it is worth looking again.

        `in_vain`: ids of those where a round has freed nothing since the last wait (what fills them may be pinned, or
        not owned yet). Each of the others has a round before anybody waits.
        """
        untried = [v for v in volumes if v.id not in in_vain] or volumes
        volume = max(untried, key=_could_be_free)
        freed = await self._round(volume, need, demote_until_s)
        if volume.books.missing(need) <= 0:
            return
        if not freed:
            in_vain.add(volume.id)
            if not in_vain.issuperset(v.id for v in volumes):
                return
            in_vain.clear()
        await self._wait()

    async def _round(self, volume: Volume, need: int, demote_until_s: float) -> int:
        """Of demotion or eviction, one at a time on each volume. Returns the bytes that left the volume's blocks (some
        may still be held by readers).
        """
        async with self._turns[volume.id]:
            await self.look(volume)
            missing = volume.books.missing(need)
            if missing <= 0:
                return 0
            self._freed.clear()
            if missing > volume.books.blocks:
                return 0  # what is not there to be evicted cannot make room: nothing is evicted for nothing
            return await self._demoted(volume, missing, demote_until_s) or await self._evictor.make_room(
                volume, missing
            )

    async def _demoted(self, volume: Volume, missing: int, until_s: float) -> int:
        """The bytes that went to the next tier; 0 when there is none, nothing can move, or the time is up."""
        left_s = until_s - self._now_s()
        if left_s <= 0:
            return 0
        try:
            async with asyncio.timeout(left_s):
                return await self.demote(volume, missing)
        except TimeoutError:
            return 0

    def _waited(self, volume: Volume, need: int, timeout_s: float) -> None:
        """In vain. A reader's short wait says nothing of a longer one."""
        if timeout_s >= ROOM_WAIT_S:
            end_s = self._now_s() + HOPELESS_S
            self._hopeless[volume.id] = _Hopeless(volume.books.missing(need), end_s)

    def _patience(self, volumes: Sequence[Volume], need: int, timeout_s: float) -> float:
        """How long to wait: somebody who has the bytes open may be just about to close them, hopeless or not."""
        hopeless = all(self._is_hopeless(volume, need) for volume in volumes)
        return min(timeout_s, HOPELESS_WAIT_S) if hopeless else timeout_s

    def _is_hopeless(self, volume: Volume, need: int) -> bool:
        """Somebody waited in vain for no more than this, and nothing became free since. To wait again would hang
        whoever asks for one file after the other: a fork flushes each file that its process has open.
        """
        known = self._hopeless.get(volume.id)
        if known is None or self._now_s() >= known.until_s:
            return False
        return volume.books.missing(need) >= known.missing_bytes

    def _now_s(self) -> float:
        return self._store.runtime.monotonic_s()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(RETRY_S):
                await self._freed.wait()
        except TimeoutError:
            pass

    def _no_space(self, size_bytes: int, volumes: Sequence[Volume]) -> NoSpace:
        if not self._store.scanned.is_set():
            return NoSpace(
                f"no room for {format_size(size_bytes)} yet: this worker has just started, and still looks for the "
                "blocks on its volumes; retry later"
            )
        each = "; ".join(f"{v.path}: {v.books.describe()}" for v in volumes)
        return NoSpace(
            f"no room for {format_size(size_bytes)} and nothing to evict: {each}; retry later or "
            f"{_advice(size_bytes, volumes)}"
        )


def _advice(size_bytes: int, volumes: Sequence[Volume]) -> str:
    """What would help: a larger capacity does not where the disk ends before it."""
    if all(v.books.is_disk_full and size_bytes <= v.books.capacity for v in volumes):
        return "free some of the disk: its free_floor, not the capacity, is reached"
    return "raise the capacity"


async def _no_look(volume: Volume) -> None:
    return


async def _no_demotion(volume: Volume, need_bytes: int) -> int:
    return 0


def _could_be_free(volume: Volume) -> int:
    """What eviction could free at best."""
    return volume.books.blocks + volume.books.free
