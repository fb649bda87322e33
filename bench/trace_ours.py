"""The store's own decisions as a cache of equal blocks: heat, bursts, ghosts and mover as a worker runs them.

A block counts one byte. Nothing is held, pinned or unowned here, and moves take no time.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Final

from kvstore.core import mover
from kvstore.core.bursts import Bursts
from kvstore.core.ghosts import Content, Ghosts
from kvstore.core.heat import Clock, Heat, Ranking
from kvstore.core.mover import Candidate, Resident, Space, Tier

FAST_SHARE: Final = 0.25
"""Of the whole capacity, with two tiers."""
FAST_LOW: Final = 0.95
"""Low watermark of the fast tier; its high one is its capacity, as that of the last tier is: room is made ahead."""
FAST, LAST = 0, 1
"""Volumes."""


class Ours:
    """A worker with one volume a tier."""

    def __init__(self, capacity: int, tiers: int) -> None:
        fast = int(capacity * FAST_SHARE) if tiers == 2 else 0
        self._capacity = {FAST: fast, LAST: capacity - fast}
        self._ranking: dict[int, Ranking[int]] = {volume: Ranking() for volume, size in self._capacity.items() if size}
        self._heat: dict[int, Heat] = {}
        self._volume: dict[int, int] = {}
        self._touches: dict[int, int] = {}
        """Since it came to its tier."""
        self._candidates: set[int] = set()
        self._clock, self._ghosts = Clock(capacity), Ghosts(capacity)
        self._bursts: Bursts[int] = Bursts()

    def __contains__(self, block: int) -> bool:
        return block in self._volume

    def is_fast(self, block: int) -> bool:
        return self._volume[block] == FAST

    def hit(self, block: int, client: int, now_s: float) -> None:
        self._put(block, self._volume[block], self._heat[block].touched(self._at(client, now_s)))
        self._touches[block] += 1
        if self._volume[block] != FAST:
            self._candidates.add(block)

    def insert(self, block: int, client: int, now_s: float) -> None:
        self._put(block, LAST, self._ghosts.admit(_content(block), self._at(client, now_s)))
        self._touches[block] = 0
        self._clock.admit(1)

    def make_room(self, blocks: int, keep: Collection[int]) -> None:
        """Evict until so many fit; not those to keep."""
        while (used := len(self._ranking[LAST]) + blocks) > self._capacity[LAST]:
            coldest = {LAST: self._coldest(LAST, blocks + len(keep), keep)}
            plan = mover.plan([self._last(used)], coldest, [], max_move_bytes=0)
            if not plan.evictions:
                raise ValueError(f"{blocks} blocks do not fit into {self._capacity[LAST]}")
            self._run(plan)

    def settle(self) -> None:
        """Promote what earned it, demote what has to go for it."""
        while FAST in self._ranking and self._candidates:
            size, used = self._capacity[FAST], len(self._ranking[FAST])
            fast = Tier("mem", [Space(FAST, size, used, size, int(size * FAST_LOW))])
            coldest = {
                FAST: self._coldest(FAST, mover.WINDOW),
                LAST: self._coldest(LAST, len(self._candidates)),
            }
            candidates = [
                Candidate(Resident(block, 1, self._heat[block].score), LAST, self._touches[block])
                for block in self._candidates
            ]
            plan = mover.plan([fast, self._last(len(self._ranking[LAST]))], coldest, candidates, mover.MAX_MOVES)
            if not plan.moves:
                break
            self._run(plan)
        self._candidates.clear()

    def _at(self, client: int, now_s: float) -> float:
        return self._bursts.touch(client, now_s, self._clock.now)

    def _last(self, used: int) -> Tier:
        size = self._capacity[LAST]
        return Tier("ssd", [Space(LAST, size, used, size, size)])

    def _coldest(self, volume: int, count: int, keep: Collection[int] = ()) -> list[Resident[int]]:
        return [
            Resident(block, 1, score, movable=block not in keep)
            for block, score in itertools.islice(self._ranking[volume].coldest(), count)
        ]

    def _run(self, plan: mover.Plan[int]) -> None:
        for eviction in plan.evictions:
            self._ranking[eviction.volume].discard(eviction.id)
            self._ghosts.add(_content(eviction.id), self._heat.pop(eviction.id))
            del self._volume[eviction.id], self._touches[eviction.id]
            self._candidates.discard(eviction.id)
        for move in plan.moves:
            self._ranking[move.source].discard(move.id)
            self._put(move.id, move.target, self._heat[move.id])
            self._touches[move.id] = 0
            self._candidates.discard(move.id)

    def _put(self, block: int, volume: int, heat: Heat) -> None:
        self._heat[block], self._volume[block] = heat, volume
        self._ranking[volume].set(block, heat.score)


def _content(block: int) -> Content:
    return Content(1, block)
