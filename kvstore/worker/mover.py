"""Blocks move between tiers by heat: what `core.mover` plans is carried out here, at a bounded rate.

A move copies the block into a private staging file of the target, renames it to its address there, switches the map,
unlinks the source: the block can be read at every moment, and a crash leaves at least one whole copy (`Store.scan`
removes a second one).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple, TypeVar

from kvstore.core import mover as core
from kvstore.core.errors import Corrupt, KvError, NoSpace, NotFound, Unavailable
from kvstore.core.limits import MIB
from kvstore.core.types import TIERS, BlockId
from kvstore.runtime import P, Runtime
from kvstore.worker.background import Background
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.blocks.store import Store
from kvstore.worker.blocks.verify import FILE_ERRNOS, Damaged, Verifier
from kvstore.worker.capacity.evict import Evictor
from kvstore.worker.reports.names import Names, room_bytes
from kvstore.worker.volumes.disk import Disk, NotAFile
from kvstore.worker.volumes.sink import Sink
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.writes.seal import Sealer
from kvstore.worker.writes.staging import Staging

log = logging.getLogger(__name__)
T = TypeVar("T")

INTERVAL_S: Final = 0.25
"""Between two plans while nobody asks for one."""
PAUSE: Final = 9
"""Times what a plan took (10 ms where all tiers have many blocks), but never longer than `INTERVAL_S`: however often
blocks are touched, plans have no more than a tenth of a core.
"""
PIECE_BYTES: Final = 4 * MIB
"""Copied by one thread in one go; the rate is kept between pieces."""
PLAN_S: Final = 1.0
"""Moves of one plan take about so long at the allowed rate: what has become hot meanwhile need not wait longer."""
AHEAD_S: Final = 2.0
"""Moves that a writer waits for do not keep the pace: they may get so far ahead of it; background moves wait then."""
MAX_SEEN: Final = 4096
"""Blocks of a volume that a plan looks through for those that may move: a few milliseconds."""
MAX_CANDIDATES: Final = 1024
"""The oldest go first: blocks that are used will come again."""


class Pace(NamedTuple):
    """How fast blocks may move."""

    bytes_per_s: float
    moves_at_a_time: int


class Rest:
    """Between plans of one kind. The moves and evictions of a plan are no part of what it took: they have bounds of
    their own, and as long as they last the next plan waits anyway.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._until_s = runtime, 0.0

    @contextmanager
    def after(self) -> Iterator[None]:
        """Around the making of a plan."""
        start_s = self._runtime.monotonic_s()
        yield
        end_s = self._runtime.monotonic_s()
        self._until_s = end_s + min(INTERVAL_S, PAUSE * (end_s - start_s))

    async def over(self) -> None:
        left_s = self._until_s - self._runtime.monotonic_s()
        if left_s > 0:
            await self._runtime.sleep(left_s)


class Mover:
    """Blocks that are used are candidates for the faster tier; volumes above their high watermark are relieved."""

    def __init__(
        self, store: Store, disk: Disk, staging: Staging, sealer: Sealer, evictor: Evictor, verifier: Verifier,
        background: Background, pace: Pace, names: Names,
    ) -> None:  # fmt: skip
        self._store, self._disk, self._staging, self._sealer = store, disk, staging, sealer
        self._evictor, self._verifier, self._background, self._pace = evictor, verifier, background, pace
        self._names = names
        self._candidates: dict[BlockId, None] = {}
        self._next_s = 0.0
        self._wake, self._filled = asyncio.Event(), asyncio.Event()
        self._turn, self._relief_turn = asyncio.Lock(), asyncio.Lock()
        self._rest, self._relief_rest = Rest(store.runtime), Rest(store.runtime)

    def touched(self, block: Block) -> None:
        """Somebody used it."""
        fastest = next(iter(self._store.in_service), None)  # none when every drive has failed meanwhile
        if fastest is not None and block.volume.tier != fastest.tier:
            self._candidates.pop(block.id, None)
            self._candidates[block.id] = None
            if len(self._candidates) > MAX_CANDIDATES:
                del self._candidates[next(iter(self._candidates))]
            self._wake.set()

    def filled(self, volume: Volume) -> None:
        """Something of it was given away."""
        if _is_over(self._space(volume)):
            self._filled.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await _set_or_late(self._wake)
            if self._store.scanned.is_set():
                await self.step()
                await self._rest.over()

    async def run_relief(self) -> None:
        """Until cancelled: the last tier is brought down to its low watermark as soon as it passes the high one,
        whatever moves are under way. Who writes without asking starts in what is free between the two.
        """
        while True:
            await _set_or_late(self._filled)
            if self._store.scanned.is_set() and not await self.relieve():
                await self._relief_rest.over()

    async def relieve(self) -> int:
        """The last tier's evictions. Returns the bytes unlinked."""
        async with self._relief_turn:
            return await self._relieve()

    async def _relieve(self) -> int:
        last = [tier for tier in self._tiers() if tier.spaces][-1:]
        if not any(_is_over(space) for tier in last for space in tier.spaces):
            return 0
        with self._relief_rest.after():
            plan = core.plan(last, await self._coldest(), (), 0)
        return await self._evict(plan.evictions)

    async def step(self) -> None:
        """One plan, carried out; one after the other, as each looks at what the one before did."""
        async with self._turn:
            await self._step()

    async def _step(self) -> None:
        tiers = self._tiers()
        candidates = self._take_candidates()
        if not candidates and not any(_is_over(space) for tier in tiers for space in tier.spaces):
            return
        with self._rest.after():
            coldest = await self._coldest()
            plan = core.plan(tiers, coldest, candidates, round(self._pace.bytes_per_s * PLAN_S))
        await self._carry_out(plan)

    async def demote(self, volume: Volume, need_bytes: int) -> int:
        """Make room for somebody who waits on a volume, by giving its coldest blocks to the next tier: at once, but
        never more than `AHEAD_S` ahead of the pace. Returns the bytes that moved (some may still be held by readers),
        always 0 in the last tier. What has begun goes on when the caller is cancelled.
        """
        ahead_bytes = round(self._pace.bytes_per_s * (AHEAD_S - max(0.0, self._next_s - self._now_s())))
        if not volume.in_service or volume.tier == self._store.in_service[-1].tier or ahead_bytes <= 0:
            return 0
        plan = core.shed(self._tiers(), await self._coldest(), volume.id, need_bytes, ahead_bytes)
        return await self._carry_out(plan, is_awaited=True)

    def place_fetched(self, size_bytes: int) -> Volume | None:
        """The volume for a block from a peer, if one has room as it is: no reader waits for a move."""
        fastest = [v for v in self._store.in_service if v.tier == self._store.in_service[0].tier]
        windows = {volume.id: self._window(volume) for volume in fastest}
        return self._volume(core.place_fetched(self._tiers(), windows, size_bytes, self._store.heat.clock.now))

    async def _carry_out(self, plan: core.Plan[BlockId], *, is_awaited: bool = False) -> int:
        """In the order of the plan: what makes room comes before what takes it. Returns the bytes that moved."""
        await self._evict(plan.evictions)
        queue = iter(plan.moves)

        async def take() -> int:
            return sum([await self._background.run(self._move(move, is_awaited)) for move in queue])

        return sum(await asyncio.gather(*(take() for _ in range(self._pace.moves_at_a_time))))

    async def _evict(self, evictions: Sequence[core.Eviction[BlockId]]) -> int:
        by_reason: dict[Reason, list[Block]] = {}
        for block in self._blocks(eviction.id for eviction in evictions):
            reason = Reason.FLOOR if block.volume.books.is_disk_full else Reason.CAPACITY
            by_reason.setdefault(reason, []).append(block)
        freed = 0
        for reason, blocks in by_reason.items():
            freed += await self._background.run(self._evictor.evict(blocks, reason))
        return freed

    async def _move(self, move: core.Move[BlockId], is_awaited: bool) -> int:
        """Returns the bytes that moved, 0 when it came to nothing."""
        block, target = self._store.get(move.id), self._volume(move.target)
        if block is None or target is None or not block.is_movable or block.volume.id != move.source:
            return 0
        block.moving = True
        try:
            note = await self._names.beside(block, target)
            size = block.data_bytes + room_bytes(note)
            async with self._staging.private_on(target, size) as (staged, sink):
                sink.guard = partial(self._store.despite_full_disk, target)
                await self._copy(block, target, sink, is_awaited)
                extra_bytes = await self._names.carry(block, note, target, staged.path)
                left = await self._sealer.move_in(block, staged, sink.state(), extra_bytes)
            await self._evictor.unlink_left(*left)
            return self._count(block, move)
        except NoSpace:
            pass  # others were quicker: the next plan sees what is left
        except (Corrupt, NotFound):
            pass  # the block is damaged or gone, or its volume is: whoever found that has said so
        except (KvError, OSError) as error:
            log.warning("%s was not moved to %s: %s", block.path, target.path, error)
        finally:
            block.moving = False
        return 0

    def _count(self, block: Block, move: core.Move[BlockId]) -> int:
        source = self._volume(move.source)
        if source is None or block.volume.id != move.target:
            return 0
        counters = self._store.counters.tiers[block.volume.tier]
        if TIERS.index(block.volume.tier) < TIERS.index(source.tier):
            counters.promotions += 1
            counters.promoted_bytes += move.size_bytes
        else:
            counters.demotions += 1
            counters.demoted_bytes += move.size_bytes
        return move.size_bytes

    async def _copy(self, block: Block, target: Volume, sink: Sink, is_awaited: bool) -> None:
        """Its bytes into the sink. Raises Corrupt when they are not what its name says, NotFound when the file is gone,
        and what `Store.explain` makes of either disk's errors.
        """
        try:
            await self._copy_file(block, target, sink, is_awaited)
        except Damaged as doubt:
            await self._verifier.verify(block)  # it goes to quarantine, unless somebody was just writing there
            raise Unavailable(f"{doubt}, and is as it should be now") from None

    async def _copy_file(self, block: Block, target: Volume, sink: Sink, is_awaited: bool) -> None:
        """Raises Damaged when the file seems to be something else than the block."""
        length_bytes = block.address.length_bytes
        fd = await self._read(block, self._disk.open_read, block.path)
        try:
            if (await self._read(block, self._disk.fstat, fd)).size_bytes != length_bytes:
                raise Damaged("it had another length than its name says")
            while left_bytes := length_bytes - sink.length_bytes:
                size = min(PIECE_BYTES, left_bytes)
                await self._wait_for_pace(size, is_awaited)
                piece = await self._read(block, self._disk.read, fd, size, sink.length_bytes)
                if not piece:
                    raise Damaged("it became shorter while it was read")
                await self._write(target, sink, piece)
        finally:
            self._disk.close(fd)
        if sink.digest() != block.address.hash:
            raise Damaged("other bytes than its hash says were read")

    async def _read(self, block: Block, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Raises Damaged when it is this file that cannot be read, and not its drive."""
        volume = block.volume
        try:
            return await self._store.runtime.in_thread(read, *args, **kwargs)
        except (NotAFile, FileNotFoundError) as error:
            raise Damaged(f"there was no such file: {error.strerror}") from None
        except OSError as error:
            if error.errno in FILE_ERRNOS:
                raise Damaged(f"it could not be read: {error.strerror}") from None
            raise self._store.explain(volume, error, "reading a block to move it") from None

    async def _write(self, target: Volume, sink: Sink, piece: bytes) -> None:
        try:
            await sink.write(piece)
        except OSError as error:
            raise self._store.explain(target, error, "writing a copy of a block") from None

    async def _wait_for_pace(self, size_bytes: int, is_awaited: bool) -> None:
        now = self._now_s()
        start = max(now, self._next_s)
        self._next_s = start + size_bytes / self._pace.bytes_per_s
        if start > now and not is_awaited:
            await self._store.runtime.sleep(start - now)

    def _now_s(self) -> float:
        return self._store.runtime.monotonic_s()

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
        """Without those that can neither move nor go: they would hide the ones behind them."""
        is_last = volume.tier == self._store.in_service[-1].tier
        seen = itertools.islice(self._store.coldest(volume), MAX_SEEN)
        fair = (block for block in seen if block.is_movable and not (is_last and block.pinned))
        return [self._resident(block) for block in itertools.islice(fair, core.WINDOW)]

    def _resident(self, block: Block) -> core.Resident[BlockId]:
        movable = block.is_movable
        shielded = block.shielded_until_s > self._store.runtime.monotonic_s()
        return core.Resident(
            block.id,
            block.used_bytes,
            self._store.heat.of(block).score,
            movable=movable,
            evictable=movable and not shielded and not block.pinned,
        )

    def _take_candidates(self) -> list[core.Candidate[BlockId]]:
        """Those that cannot move yet (the master has not called them owned) are asked again."""
        blocks = self._blocks(self._candidates)
        self._candidates = {block.id: None for block in blocks if not block.is_movable}
        found = [block for block in blocks if block.is_movable]
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


def _is_over(space: core.Space) -> bool:
    return space.used_bytes - space.leaving_bytes > space.high_bytes


async def _set_or_late(event: asyncio.Event) -> None:
    """Until somebody sets it, or `INTERVAL_S` have passed; it is clear then."""
    try:
        async with asyncio.timeout(INTERVAL_S):
            await event.wait()
    except TimeoutError:
        pass
    event.clear()
