"""Blocks move between tiers by heat: what `core.mover` plans is carried out here, at a bounded rate.

A move copies the block into a private staging file of the target, renames it to its address there, switches the map,
unlinks the source: the block can be read at every moment, and a crash leaves at least one whole copy (`Store.scan`
removes a second one).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvstore.core import mover as core
from kvstore.core.errors import Corrupt, KvError, NoSpace
from kvstore.core.limits import MIB
from kvstore.core.types import TIERS, BlockId
from kvstore.worker.background import Background
from kvstore.worker.block import Block
from kvstore.worker.disk import Disk
from kvstore.worker.evict import Evictor
from kvstore.worker.seal import Sealer
from kvstore.worker.sink import Sink
from kvstore.worker.staging import Staging
from kvstore.worker.store import Store
from kvstore.worker.verify import Verifier
from kvstore.worker.volume import Volume

log = logging.getLogger(__name__)

INTERVAL_S: Final = 0.25
"""Between two plans while nobody asks for one."""
PIECE_BYTES: Final = 4 * MIB
"""Copied by one thread in one go; the rate is kept between pieces."""
PLAN_S: Final = 1.0
"""Moves of one plan take about so long at the allowed rate: what has become hot meanwhile need not wait longer."""
MAX_CANDIDATES: Final = 1024
"""The oldest go first: blocks that are used will come again."""


class Pace(NamedTuple):
    """How fast blocks may move."""

    bytes_per_s: float
    moves_at_a_time: int


class Mover:
    """Blocks that are used are candidates for the faster tier; volumes above their high watermark are relieved."""

    def __init__(
        self, store: Store, disk: Disk, staging: Staging, sealer: Sealer, evictor: Evictor, verifier: Verifier,
        background: Background, pace: Pace,
    ) -> None:  # fmt: skip
        self._store, self._disk, self._staging, self._sealer = store, disk, staging, sealer
        self._evictor, self._verifier, self._background, self._pace = evictor, verifier, background, pace
        self._candidates: dict[BlockId, None] = {}
        self._next_s = 0.0
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()

    def touched(self, block: Block) -> None:
        """Somebody used it."""
        if block.volume.tier != self._store.in_service[0].tier:
            self._candidates.pop(block.id, None)
            self._candidates[block.id] = None
            if len(self._candidates) > MAX_CANDIDATES:
                del self._candidates[next(iter(self._candidates))]
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if self._store.scanned.is_set():
                await self.step()

    async def step(self) -> None:
        """One plan, carried out; one after the other, as each looks at what the one before did."""
        async with self._turn:
            await self._step()

    async def _step(self) -> None:
        tiers = self._tiers()
        candidates = self._take_candidates()
        if not candidates and not any(_is_over(space) for tier in tiers for space in tier.spaces):
            return
        coldest = await self._coldest()
        plan = core.plan(tiers, coldest, candidates, round(self._pace.bytes_per_s * PLAN_S))
        if plan.evictions:
            await self._background.run(self._evictor.evict(self._blocks(e.id for e in plan.evictions)))
        await self._carry_out(plan.moves)

    def place_fetched(self, size_bytes: int) -> Volume | None:
        """The volume for a block from a peer, if one has room as it is: no reader waits for a move."""
        fastest = [v for v in self._store.in_service if v.tier == self._store.in_service[0].tier]
        windows = {volume.id: self._window(volume) for volume in fastest}
        return self._volume(core.place_fetched(self._tiers(), windows, size_bytes, self._store.heat.clock.now))

    async def _carry_out(self, moves: Sequence[core.Move[BlockId]]) -> None:
        """In the order of the plan: what makes room comes before what takes it."""
        queue = iter(moves)

        async def take() -> None:
            for move in queue:
                await self._background.run(self._move(move))

        await asyncio.gather(*(take() for _ in range(self._pace.moves_at_a_time)))

    async def _move(self, move: core.Move[BlockId]) -> None:
        block, target = self._store.get(move.id), self._volume(move.target)
        if block is None or target is None or not _is_movable(block) or block.volume.id != move.source:
            return
        block.moving = True
        try:
            async with self._staging.private_on(target, block.address.length_bytes) as (staged, sink):
                await self._copy(block, sink)
                path, volume = await self._sealer.move_in(block, staged, sink.state())
            await self._evictor.unlink_left(path, volume, block.used_bytes)
            self._count(block, move)
        except NoSpace:
            pass  # others were quicker: the next plan sees what is left
        except (KvError, OSError) as error:
            log.warning("%s was not moved to %s: %s", block.path, target.path, error)
        finally:
            block.moving = False

    def _count(self, block: Block, move: core.Move[BlockId]) -> None:
        source = self._volume(move.source)
        if source is None or block.volume.id != move.target:
            return
        counters = self._store.counters
        if TIERS.index(block.volume.tier) < TIERS.index(source.tier):
            counters.promotions += 1
            counters.promoted_bytes += move.size_bytes
        else:
            counters.demotions += 1
            counters.demoted_bytes += move.size_bytes

    async def _copy(self, block: Block, sink: Sink) -> None:
        """Its bytes into the sink. Raises Corrupt when they are not what its name says, OSError."""
        fd = await self._store.runtime.in_thread(self._disk.open_read, block.path)
        try:
            while sink.length_bytes < block.address.length_bytes:
                await self._wait_for_pace(PIECE_BYTES)
                piece = await self._store.runtime.in_thread(self._disk.read, fd, PIECE_BYTES, sink.length_bytes)
                if not piece:
                    break
                await sink.write(piece)
        finally:
            self._disk.close(fd)
        if sink.length_bytes != block.address.length_bytes or sink.digest() != block.address.hash:
            await self._verifier.verify(block)  # it goes to quarantine, unless somebody was just writing there
            raise Corrupt(f"{block.address}: other bytes than its hash says were read")

    async def _wait_for_pace(self, size_bytes: int) -> None:
        now = self._store.runtime.monotonic_s()
        start = max(now, self._next_s)
        self._next_s = start + size_bytes / self._pace.bytes_per_s
        if start > now:
            await self._store.runtime.sleep(start - now)

    # ---- what the plan sees

    def _tiers(self) -> list[core.Tier]:
        volumes = self._store.in_service
        return [core.Tier(name, [self._space(v) for v in volumes if v.tier == name]) for name in TIERS]

    def _space(self, volume: Volume) -> core.Space:
        """A disk that its other users fill makes the volume smaller."""
        books = volume.books
        capacity = max(0, min(books.capacity, books.used + books.slack))
        high, low = (round(share * capacity) for share in volume.watermarks)
        leaving = books.held + self._staging.overgrown_bytes(volume)
        return core.Space(volume.id, capacity, books.used, high, low, leaving)

    async def _coldest(self) -> dict[int, list[core.Resident[BlockId]]]:
        windows = {volume.id: self._window(volume) for volume in self._store.in_service}
        held = await self._store.runtime.in_thread(self._held, [self._path(b.id) for w in windows.values() for b in w])
        marks = iter(held)
        return {volume: [b._replace(held=next(marks)) for b in window] for volume, window in windows.items()}

    def _window(self, volume: Volume) -> list[core.Resident[BlockId]]:
        return [self._resident(block) for block in itertools.islice(self._store.coldest(volume), core.WINDOW)]

    def _resident(self, block: Block) -> core.Resident[BlockId]:
        movable = _is_movable(block)
        shielded = block.shielded_until_s > self._store.runtime.monotonic_s()
        return core.Resident(
            block.id,
            block.used_bytes,
            self._store.heat.of(block).score,
            movable=movable,
            evictable=movable and not shielded,
        )

    def _take_candidates(self) -> list[core.Candidate[BlockId]]:
        """Those that cannot move yet (the master has not called them owned) are asked again."""
        blocks = self._blocks(self._candidates)
        self._candidates = {block.id: None for block in blocks if not _is_movable(block)}
        found = [block for block in blocks if _is_movable(block)]
        return [core.Candidate(self._resident(block), block.volume.id, block.touches) for block in found]

    def _blocks(self, ids: Iterable[BlockId]) -> list[Block]:
        return [block for block in map(self._store.get, ids) if block is not None]

    def _path(self, id: BlockId) -> str:
        block = self._store.get(id)
        return block.path if block is not None else ""

    def _held(self, paths: Iterable[str]) -> list[bool]:
        return [bool(path) and self._evictor.is_held(path) for path in paths]

    def _volume(self, id: int | None) -> Volume | None:
        return next((volume for volume in self._store.in_service if volume.id == id), None)


def _is_movable(block: Block) -> bool:
    return block.owned and not block.leaving and not block.moving


def _is_over(space: core.Space) -> bool:
    return space.used_bytes - space.leaving_bytes > space.high_bytes
