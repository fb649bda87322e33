"""What is remembered of evicted blocks, and what follows from it for new ones. Pure.

A content that comes back goes on with its old score. And each return says which kind of block was evicted too early:
if it was one that nobody had read, new blocks deserve more room, else those that proved useful do. So the score at
which a new block starts is learned, as ARC learns the border between its two lists: from the level of a touch (h = 1)
down to `MAX_PROBATION` half-lives below it (h = 1/8). By `bench/trace.py` no fixed start serves small and large caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvstore.core.heat import Heat

GHOST_CAPACITIES: Final = 2
"""Bytes of evicted blocks that are remembered, in capacities of the worker."""
MAX_GHOSTS: Final = 1_000_000
"""Whatever their bytes: about 300 MB."""
MAX_PROBATION: Final = 3.0
"""Half-lives. With more, a new block hardly lives until its first reader."""
LEARNING_RATE: Final = 2.0
"""Half-lives for one capacity of returned bytes, were all ghosts of one kind. 1 to 4 do equally well."""
MAX_RARITY: Final = 10.0
"""So much more at most does the return of the rarer kind weigh: a single block does not turn everything over."""


class Content(NamedTuple):
    """What a block holds. One that was evicted and is computed again has the same content and a new id."""

    length_bytes: int
    hash: int


class Ghosts:
    """Heat by content, of the blocks evicted last. `probation` (half-lives) is what was learned from their returns."""

    def __init__(self, capacity_bytes: int, probation: float = 0.0, max_ghosts: int = MAX_GHOSTS) -> None:
        self.probation = probation
        self._max_ghosts = max_ghosts
        self._ghosts: OrderedDict[Content, Heat] = OrderedDict()
        self._bytes = {False: 0, True: 0}
        """By `Heat.proven`."""
        self.resize(capacity_bytes)

    def __len__(self) -> int:
        return len(self._ghosts)

    def __iter__(self) -> Iterator[tuple[Content, Heat]]:
        """Those evicted longest ago first: adding them in this order to another one makes a copy."""
        return iter(self._ghosts.items())

    def contents(self) -> list[Content]:
        """Those evicted longest ago first, to go through while they change. No pairs: a million new tuples take a
        second with garbage collection."""
        return list(self._ghosts)

    def heat_of(self, content: Content) -> Heat | None:
        return self._ghosts.get(content)

    @property
    def size_bytes(self) -> int:
        return sum(self._bytes.values())

    def resize(self, capacity_bytes: int) -> None:
        """The worker's capacity is another one now."""
        if capacity_bytes <= 0:
            raise ValueError(f"a capacity of {capacity_bytes} bytes has nothing to remember")
        self._capacity_bytes = capacity_bytes
        self._trim()

    def add(self, content: Content, heat: Heat) -> None:
        """A block with this content was evicted. Of two with one content the hotter is remembered."""
        known = self._take(content)
        self._ghosts[content] = heat if known is None else max(heat, known)
        self._bytes[self._ghosts[content].proven] += content.length_bytes
        self._trim()

    def admit(self, content: Content, clock: float) -> Heat:
        """The heat of a block that was just stored, or fetched: its ghost's, touched; or that of a newcomer."""
        ghost = self._ghosts.get(content)
        if ghost is None:
            return Heat(clock - self.probation, False)
        self._learn(content.length_bytes, ghost.proven)
        self._take(content)
        return ghost.touched(clock)

    def _learn(self, size_bytes: int, proven: bool) -> None:
        """A return weighs more the rarer its kind is among the ghosts: that kind would cost less to keep."""
        rarity = min(MAX_RARITY, self.size_bytes / max(1, self._bytes[proven]))
        step = LEARNING_RATE * size_bytes / self._capacity_bytes * rarity
        self.probation = min(MAX_PROBATION, max(0.0, self.probation + (step if proven else -step)))

    def _take(self, content: Content) -> Heat | None:
        heat = self._ghosts.pop(content, None)
        if heat is not None:
            self._bytes[heat.proven] -= content.length_bytes
        return heat

    def _trim(self) -> None:
        limit_bytes = self._capacity_bytes * GHOST_CAPACITIES
        while len(self._ghosts) > self._max_ghosts or self.size_bytes > limit_bytes:
            self._take(next(iter(self._ghosts)))
