"""What moves between tiers, what is evicted, and where a new block starts. Pure: the caller carries it out.

Blocks rise by use: while the faster tier has room below its low watermark, with the first touch; after that with the
second, and only in the place of a block that is colder by `MARGIN`, so that two blocks never swap to and fro. They sink
by weight: a volume above its high watermark gives its coldest to the next tier until it is down to the low one, and the
last tier evicts. Between the two watermarks nothing sinks; that is where promotions and fetched blocks land before
somebody has to go for them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)

PROMOTING_TOUCHES: Final = 2
"""Touches since it came to its tier that a block needs to displace another one in the faster tier."""
MARGIN: Final = 1.0
"""In half-lives: a promoted block is twice as hot as the one that goes for it (scores are logarithms to base 2)."""
MAX_MOVES: Final = 64
"""Moves of one plan."""
WINDOW: Final = 256
"""How many of a volume's coldest blocks a plan needs to see: what it can evict at most, and more than it can move."""


class Space(NamedTuple):
    """A volume in service."""

    volume: int
    capacity_bytes: int
    used_bytes: int
    """On disk or reserved (the targets of running moves are)."""
    high_bytes: int
    low_bytes: int
    leaving_bytes: int = 0
    """Of those used: bytes that go without any further plan (running moves away, unlinked files that are held)."""


class Tier(NamedTuple):
    name: str
    spaces: Sequence[Space]


class Resident(NamedTuple, Generic[K]):
    """A block on a volume."""

    id: K
    size_bytes: int
    score: float
    held: bool = False
    """Somebody has it open: its bytes are free only after the last close."""
    movable: bool = True
    """False: it is unowned, leaving, shielded or moving already."""
    evictable: bool = True
    """False: it is not movable, or pinned."""


class Candidate(NamedTuple, Generic[K]):
    """A block that was touched just now."""

    block: Resident[K]
    volume: int
    touches: int
    """Since it came to its tier: reads, not the arrival itself."""


class Move(NamedTuple, Generic[K]):
    id: K
    size_bytes: int
    source: int
    target: int


class Eviction(NamedTuple, Generic[K]):
    id: K
    size_bytes: int
    volume: int


class Plan(NamedTuple, Generic[K]):
    """To be carried out in this order: all evictions, then the moves one after the other. No volume passes its capacity
    then, provided that a move reserves its bytes on the target first.
    """

    evictions: list[Eviction[K]]
    moves: list[Move[K]]


Coldest = Mapping[int, Sequence[Resident[K]]]
"""By volume, its first `WINDOW` blocks from the coldest up."""


def plan(
    tiers: Sequence[Tier], coldest: Coldest[K], candidates: Sequence[Candidate[K]], max_move_bytes: int
) -> Plan[K]:
    """What to do next. `tiers` from fast to slow; `max_move_bytes` bounds the moves (one is always allowed).

    The work is bounded by the lengths of what is given. What a plan leaves undone the next one finds again.
    """
    planner = _Planner([tier for tier in tiers if tier.spaces], coldest, max_move_bytes)
    planner.relieve()
    planner.promote(candidates)
    return Plan(planner.evictions, planner.moves)


def shed(tiers: Sequence[Tier], coldest: Coldest[K], volume: int, need_bytes: int, max_move_bytes: int) -> Plan[K]:
    """What makes room for somebody who waits on one volume: its coldest blocks go to the next tier, which evicts for
    them if it is the last one. A volume of the last tier itself evicts. Bounded like `plan`.
    """
    planner = _Planner([tier for tier in tiers if tier.spaces], coldest, max_move_bytes)
    planner.shed(volume, need_bytes)
    return Plan(planner.evictions, planner.moves)


def place_fetched(tiers: Sequence[Tier], coldest: Coldest[K], size_bytes: int, score: float) -> int | None:
    """The volume for a block from a peer: the fastest tier if only colder blocks have to go for it, else the next one
    with room (the last one takes whatever fits). None when no tier has room as it is: evict first.
    """
    tiers = [tier for tier in tiers if tier.spaces]
    if len(tiers) > 1:
        fastest, *tiers = tiers
        for space in _freest(fastest.spaces):
            room = space.capacity_bytes - space.used_bytes
            if size_bytes <= room and _may_displace(space, coldest, size_bytes, score):
                return space.volume
    return _with_room(tiers, size_bytes)


def place_written(tiers: Sequence[Tier], size_bytes: int) -> int | None:
    """The volume for a block that a client writes: the fastest disk tier with room (rule 7). None: evict first."""
    return _with_room([tier for tier in tiers if tier.name != "mem"], size_bytes)


def _with_room(tiers: Sequence[Tier], size_bytes: int) -> int | None:
    for tier in tiers:
        for space in _freest(tier.spaces):
            if size_bytes <= space.capacity_bytes - space.used_bytes:
                return space.volume
    return None


def _freest(spaces: Sequence[Space]) -> list[Space]:
    """By the share that is free, so that volumes of different size fill evenly."""
    return sorted(spaces, key=lambda space: space.used_bytes / max(1, space.capacity_bytes))


def _may_displace(space: Space, coldest: Coldest[K], size_bytes: int, score: float) -> bool:
    """Whether all that has to go for the block sooner or later is colder than `score`.

    What fills the volume above its low watermark will push out as many bytes of its coldest blocks: what stands above
    it already has the first of them to its account, this block those that follow.
    """
    pushed_out = space.used_bytes + size_bytes - space.low_bytes
    if pushed_out <= 0:
        return True
    hottest = None
    for block in coldest.get(space.volume, ()):
        if not block.movable:
            continue
        hottest = block.score
        pushed_out -= block.size_bytes
        if pushed_out <= 0 or hottest >= score:
            break
    return hottest is not None and hottest < score


class _Planner(Generic[K]):
    """One plan in the making, and the books as they will be after it."""

    def __init__(self, tiers: Sequence[Tier], coldest: Coldest[K], max_move_bytes: int) -> None:
        self.evictions: list[Eviction[K]] = []
        self.moves: list[Move[K]] = []
        self._tiers, self._coldest, self._move_bytes = tiers, coldest, max_move_bytes
        self._used = {space.volume: space.used_bytes for tier in tiers for space in tier.spaces}
        self._level = {space.volume: level for level, tier in enumerate(tiers) for space in tier.spaces}
        self._planned: set[K] = set()

    def relieve(self) -> None:
        """Bring every volume that is above its high watermark down to its low one, with what comes from above it."""
        for level, tier in enumerate(self._tiers):
            for space in tier.spaces:
                staying = self._used[space.volume] - space.leaving_bytes
                if staying > space.high_bytes:
                    self._shed(level, space, staying - space.low_bytes)

    def shed(self, volume: int, need_bytes: int) -> None:
        """Make room on one volume, if it is in service."""
        for level, tier in enumerate(self._tiers):
            for space in tier.spaces:
                if space.volume == volume:
                    self._shed(level, space, need_bytes)

    def promote(self, candidates: Sequence[Candidate[K]]) -> None:
        """The hottest first: where one is refused, a colder one that is no smaller would be too."""
        refused_bytes: dict[tuple[int, bool], int] = {}
        for candidate in sorted(candidates, key=lambda each: -each.block.score):
            block, level = candidate.block, self._level.get(candidate.volume, 0)
            if level == 0 or not block.movable or block.id in self._planned or not self._may_move(block):
                continue
            kind = level, candidate.touches >= PROMOTING_TOUCHES
            if block.size_bytes >= refused_bytes.get(kind, math.inf):
                continue
            self._planned.add(block.id)  # making room for it must not choose it as a victim
            target = self._promotion_target(level - 1, block, candidate.touches)
            if target is None:
                self._planned.discard(block.id)
                refused_bytes[kind] = block.size_bytes
            else:
                self._move(block, candidate.volume, target)

    def _promotion_target(self, level: int, block: Resident[K], touches: int) -> int | None:
        limit = block.score - MARGIN
        for space in self._by_room(level):
            is_free = space.used_bytes + block.size_bytes <= space.low_bytes
            if not is_free and touches < PROMOTING_TOUCHES:
                continue
            if not _may_displace(space, self._coldest, block.size_bytes, limit):
                continue
            missing = block.size_bytes - self._room(space)
            if missing > 0:
                self._shed(level, space, missing, limit)
            if block.size_bytes <= self._room(space) and self._may_move(block):
                return space.volume
        return None

    def _shed(self, level: int, space: Space, need_bytes: int, limit: float = math.inf) -> None:
        """Demote, or evict from the last tier, a volume's coldest blocks until `need_bytes` are on their way out."""
        is_last = level == len(self._tiers) - 1
        too_large = math.inf  # the smallest size for which there was no room below
        for block in self._victims(space, limit, is_last):
            if need_bytes <= 0:
                return
            if is_last:
                self._evict(block, space.volume)
            elif block.size_bytes >= too_large or not self._may_move(block):
                continue
            elif (target := self._demotion_target(level + 1, block)) is not None:
                self._move(block, space.volume, target)
            else:
                too_large = block.size_bytes
                continue
            need_bytes -= block.size_bytes

    def _victims(self, space: Space, limit: float, is_last: bool) -> list[Resident[K]]:
        """From the coldest up; those that somebody holds come last, as they free nothing now."""
        fair = [
            block
            for block in self._coldest.get(space.volume, ())
            if block.score < limit
            and block.movable
            and (block.evictable or not is_last)
            and block.id not in self._planned
        ]
        return sorted(fair, key=lambda block: block.held)  # stable: the coldest stay first

    def _demotion_target(self, level: int, block: Resident[K]) -> int | None:
        """A volume of that tier with room for the block, or that makes some."""
        for space in self._by_room(level):
            missing = block.size_bytes - self._room(space)
            if missing > 0 and block.size_bytes <= space.capacity_bytes:
                self._shed(level, space, missing)
            if block.size_bytes <= self._room(space):
                return space.volume
        return None

    def _by_room(self, level: int) -> list[Space]:
        spaces = self._tiers[level].spaces
        return _freest([space._replace(used_bytes=self._used[space.volume]) for space in spaces])

    def _room(self, space: Space) -> int:
        return space.capacity_bytes - self._used[space.volume]

    def _may_move(self, block: Resident[K]) -> bool:
        return not self.moves or (len(self.moves) < MAX_MOVES and block.size_bytes <= self._move_bytes)

    def _move(self, block: Resident[K], source: int, target: int) -> None:
        self.moves.append(Move(block.id, block.size_bytes, source, target))
        self._move_bytes -= block.size_bytes
        self._used[target] += block.size_bytes
        self._leave(block, source)

    def _evict(self, block: Resident[K], volume: int) -> None:
        self.evictions.append(Eviction(block.id, block.size_bytes, volume))
        self._leave(block, volume)

    def _leave(self, block: Resident[K], volume: int) -> None:
        self._planned.add(block.id)
        if not block.held:
            self._used[volume] -= block.size_bytes
