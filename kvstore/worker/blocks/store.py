"""All blocks on this worker: block id → where it lies, and what the master has said of it.

Everything here runs on the loop and without an await in between, so each method is atomic. Files are touched only by
the two methods that look for blocks (`scan`, `adopt`), in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from kvstore.core.errors import KvError, Stale
from kvstore.core.policies import NONE
from kvstore.core.types import TIERS, Address, BlockId
from kvstore.runtime import Runtime
from kvstore.worker.blocks.block import FOUND, Block
from kvstore.worker.blocks.counters import Counters, Reason
from kvstore.worker.blocks.fences import Fences
from kvstore.worker.blocks.heat import HeatMap
from kvstore.worker.blocks.labels import Labels
from kvstore.worker.volumes.disk import FATAL_ERRNOS, FULL_ERRNOS, SHORT_ERRNOS, Stamp, disk_error
from kvstore.worker.volumes.volume import FoundBlock, Volume

log = logging.getLogger(__name__)
T = TypeVar("T")

SCAN_RETRY_S: Final = 0.5
"""Until the directories of a volume are read again, where the worker lacked fds or memory for it."""


class Store:
    """
    volumes     all of them, the fastest tier first; some may be out of service
    unowned     blocks without the verdict "owned", those reported longest ago first
    fences      ids that may still be published
    scanned     set once every block file is known; until then a block that is not here may still be there
    on_change   called with the id of each block that came, went, or turned out not to be here (the reporter listens)
    on_free     called when room may have appeared on a volume
    on_full     called when the disk of a volume turned out to be full; returns whether a write is worth another try
    on_touch    called with each block that was used
    heat        the order of the blocks of each volume
    labels      the policies of blocks, and what follows from them
    """

    def __init__(
        self, runtime: Runtime, volumes: Sequence[Volume], fences: Fences, counters: Counters, pin_share: float
    ) -> None:
        self.runtime, self.fences, self.counters = runtime, fences, counters
        self.volumes = sorted(volumes, key=lambda v: TIERS.index(v.tier))
        self.unowned: OrderedDict[BlockId, Block] = OrderedDict()
        self.scanned = asyncio.Event()
        self.on_change: Callable[[BlockId], None] = lambda block: None
        self.on_free: Callable[[], None] = lambda: None
        self.on_full: Callable[[Volume], Awaitable[bool]] = _no_room
        self.on_touch: Callable[[Block], None] = lambda block: None
        self._blocks: dict[BlockId, Block] = {}
        self._by_volume: dict[int, dict[BlockId, Block]] = {v.id: {} for v in volumes}
        self.heat = HeatMap(self.volumes)
        self.labels = Labels(self.heat, self.volumes, pin_share)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def in_service(self) -> list[Volume]:
        return [v for v in self.volumes if v.in_service]

    def get(self, block: BlockId) -> Block | None:
        return self._blocks.get(block)

    def find(self, address: Address) -> Block | None:
        """The block of exactly this address. Raises Stale when the id stands for other bytes (rule 1)."""
        block = self._blocks.get(address.block)
        if block is not None and block.address != address:
            raise Stale(f"{address}: this worker has {block.address} under that id; look the name up again")
        return block

    def ids(self, volume: Volume) -> list[BlockId]:
        """Ids of the blocks of a volume, but for those that are leaving, in order."""
        return sorted(block.id for block in self._by_volume[volume.id].values() if not block.leaving)

    def coldest(self, volume: Volume) -> Iterator[Block]:
        """Those that are owned, from the coldest up; in the last tier without those that are pinned, as there is no
        place below for them.
        """
        pinned = any(TIERS.index(v.tier) > TIERS.index(volume.tier) for v in self.in_service)
        return (self._blocks[block] for block in self.heat.coldest(volume, pinned=pinned))

    def coldest_unpinned(self, volume: Volume) -> Iterator[Block]:
        """Those that eviction may choose from: owned, and not pinned, from the coldest up."""
        return (self._blocks[block] for block in self.heat.coldest(volume, pinned=False))

    def all(self) -> Iterable[Block]:
        return self._blocks.values()

    def count(self, volume: Volume) -> int:
        """Blocks of a volume."""
        return len(self._by_volume[volume.id])

    def hold(self, volume: Volume) -> Iterable[Block]:
        """All blocks of a volume."""
        return self._by_volume[volume.id].values()

    def add(self, address: Address, volume: Volume, session: int, stamp: Stamp | None) -> Block:
        """A file was renamed to its address. Its bytes are already in the books."""
        block = self._enter(address, volume, session, stamp)
        self.heat.came(block, session, self.runtime.monotonic_s())
        return block

    def touch(self, block: Block, client: int) -> None:
        """A client (its session) used it. One that went while it was being opened is left alone."""
        if self._blocks.get(block.id) is not block:
            return
        block.touches += 1
        block.used_s = self.runtime.monotonic_s()
        self.heat.touch(block, client, block.used_s)
        self.labels.touched(block)
        self.on_touch(block)

    def measured(self, block: Block, extra_bytes: int) -> int:
        """Its file takes so much beyond its length. Returns how much more that is than before, for the books, which are
        the caller's.
        """
        more = extra_bytes - block.extra_bytes
        block.extra_bytes = extra_bytes
        self.counters.extra_bytes += more
        return more

    def move(self, block: Block, target: Volume, stamp: Stamp | None, extra_bytes: int = 0) -> None:
        """Its bytes lie in another volume now, under the same name, and take `extra_bytes` beyond its length there. The
        books are the caller's.
        """
        source = block.volume
        self.measured(block, extra_bytes)
        del self._by_volume[source.id][block.id]
        self._by_volume[target.id][block.id] = block
        block.volume, block.stamp, block.touches = target, stamp, 0
        self.heat.moved(block, source)
        self.labels.moved(block, source)
        self.on_change(block.id)

    def own(self, block: Block) -> None:
        """An entry lists it."""
        block.owned, block.given_up = True, False
        self.unowned.pop(block.id, None)
        self.heat.reowned(block)
        self.fences.settle(block.id)
        self.on_free()  # it can be evicted now

    def disown(self, block: Block) -> None:
        """The master does not know it (any more): its grace starts again."""
        if block.owned:
            block.owned, block.since_s, block.session = False, self.runtime.monotonic_s(), FOUND
            self.unowned[block.id] = block
            self.labels.set(block, NONE)
            self.heat.reowned(block)

    def give_up(self, block: Block) -> None:
        """Its writer will not publish it: the next report says so, and the verdict on it decides."""
        block.given_up = True
        self.on_change(block.id)

    def forget(self, block: Block) -> None:
        """Its file is gone from its place. The books are the caller's."""
        if self._blocks.get(block.id) is not block:
            return
        del self._blocks[block.id]
        self._by_volume[block.volume.id].pop(block.id, None)
        self.heat.gone(block)
        self.labels.gone(block)
        self.unowned.pop(block.id, None)
        self.fences.settle(block.id)
        self.on_change(block.id)

    def miss(self, address: Address) -> None:
        """Somebody came for a block that is not here: tell the master so (rule 15)."""
        if self.scanned.is_set() and address.block not in self._blocks:
            self.on_change(address.block)

    def explain(self, volume: Volume, error: OSError, what: str) -> KvError:
        """The error for the caller; a drive that failed, or is gone, takes its volume out of service."""
        if error.errno in FATAL_ERRNOS:
            self.fail(volume, f"{what}: {error.strerror}")
        elif error.errno in FULL_ERRNOS:
            volume.books.found_full()
        return disk_error(error, f"{volume.path}: {what}")

    async def despite_full_disk(self, volume: Volume, write: Callable[[], Awaitable[T]]) -> T:
        """`write()`. When the operating system says that the disk is full (its other users filled it, and the books are
        out of date), room is made and it is done once more. Raises OSError.
        """
        try:
            return await write()
        except OSError as error:
            if error.errno not in FULL_ERRNOS or not await self.on_full(volume):
                raise
        return await write()

    def fail(self, volume: Volume, why: str) -> None:
        """Take a volume out of service: no longer listed in heartbeats, all its replicas are gone in one step (rule
        4).
        """
        if volume.failed:
            return
        volume.failed = why
        gone = self._by_volume[volume.id]
        log.error(
            "volume %s is out of service with %d blocks: %s; mend or empty it, then restart the worker",
            volume.path, len(gone), why,
        )  # fmt: skip
        for block in list(gone.values()):
            self.forget(block)
        self.heat.resize(self.in_service)

    async def scan(self) -> None:
        """Find the blocks of all volumes. A volume that cannot be read fails alone."""
        for volume in self.in_service:
            try:
                found = await self.read_directories(volume, volume.scan)
            except OSError as error:
                self.fail(volume, f"reading its directories: {error.strerror}")
                continue
            for block in self._add_found(volume, found.blocks):
                await self._drop_copy(volume, block)
            volume.books.quarantine = found.quarantine.kept_bytes
            self.counters.tiers[volume.tier].unlink_all(Reason.CORRUPT, found.quarantine.unlinked)
        mine = {boot for volume in self.in_service for boot in volume.identity.boots}
        self.fences.add_found(block for block in self.unowned if block.boot in mine)
        self.heat.all_found()
        self.scanned.set()

    async def read_directories(self, volume: Volume, read: Callable[[], T]) -> T:
        """`read()` in a thread. What lacks to the worker says nothing of the drive: it waits until it has that. Raises
        OSError.
        """
        while True:
            try:
                return await self.runtime.in_thread(read)
            except OSError as error:
                if error.errno not in SHORT_ERRNOS:
                    raise
                log.warning("%s", disk_error(error, f"{volume.path}: reading its directories, trying again"))
            await self.runtime.sleep(SCAN_RETRY_S)

    def _add_found(self, volume: Volume, blocks: Iterable[FoundBlock]) -> list[FoundBlock]:
        """Returns those that lie on a faster volume too: a move that a crash cut short."""
        twice = []
        for found in blocks:
            if (known := self._blocks.get(found.address.block)) is None:
                self._adopt(volume, found)
            elif known.volume is not volume:  # not one that `adopt` has found while the scan was running
                twice.append(found)
        return twice

    async def _drop_copy(self, volume: Volume, found: FoundBlock) -> None:
        """The copy on the slower volume goes, unless the other one is cut short."""
        address = found.address
        known = self._blocks.get(address.block)
        if known is None:
            return
        try:
            if await self.runtime.in_thread(known.volume.look_up, address):
                await self.runtime.in_thread(volume.disk.unlink, volume.block_path(address))
                return
        except OSError as error:
            self.explain(volume, error, "removing the second copy of a block")
            return
        path, first, size = known.path, known.volume, known.used_bytes
        self.forget(known)
        first.books.blocks -= size
        self._adopt(volume, found)
        try:
            await self.runtime.in_thread(first.disk.unlink, path)
        except OSError as error:
            self.explain(first, error, "removing half of a block")

    def _adopt(self, volume: Volume, found: FoundBlock) -> Block:
        block = self._enter(found.address, volume, FOUND, None)
        block.extra_bytes = found.extra_bytes
        self.heat.found(block)
        volume.books.blocks += block.used_bytes
        return block

    def _enter(self, address: Address, volume: Volume, session: int, stamp: Stamp | None) -> Block:
        now = self.runtime.monotonic_s()
        block = Block(address, volume, session, now, stamp=stamp, used_s=now)
        self._blocks[block.id] = self._by_volume[volume.id][block.id] = self.unowned[block.id] = block
        self.on_change(block.id)
        return block

    async def adopt(self, address: Address) -> Block | None:
        """Look for a block by its file name while the scan is still running (rule 2)."""
        for volume in self.in_service:
            try:
                found = await self.runtime.in_thread(volume.look_up, address)
            except OSError as error:
                self.explain(volume, error, "looking for a block")
                continue
            if found is not None and volume.in_service:
                return self._blocks.get(address.block) or self._adopt(volume, found)
        return None


async def _no_room(volume: Volume) -> bool:
    return False
