"""Heat: the score that orders blocks, and the order itself. Pure.

The clock does not count seconds but half-lives: bytes admitted ÷ (capacity × `HALF_LIFE`). So a store that nobody
writes to forgets nothing, and a busy one forgets as fast as it has to. A block's heat h halves with each half-life and
grows by 1 with each touch. Its *score* is log2(h) + the clock at its last touch: all scores fall behind the clock at
the same pace, so their order never needs a rescan, and one touch at clock v is worth the score v. Where a new block
starts is for `ghosts.py` to say.

Why float64 is enough without ever moving the zero: at 1,000 turnovers a day the clock stands at 4 million after ten
years, where neighbouring floats are 9e-10 apart: a kilobyte of a terabyte. A restart sets the zero anew (`Clock.age`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)

HALF_LIFE: Final = 1.0
"""In turnovers: heat halves while as many bytes are admitted as the worker can hold."""
_LN2: Final = math.log(2)


def touched(score: float, clock: float) -> float:
    """The score after a touch at `clock`.

    log2(2^score + 2^clock), whatever lies between the two: neither power is ever computed. The clock may be behind the
    score (touches of one burst are scored at its start).
    """
    return max(score, clock) + math.log1p(2.0 ** -abs(score - clock)) / _LN2


class Heat(NamedTuple):
    """What is known of the use of a block, or was when it was evicted. The hotter of two compares as the greater."""

    score: float
    proven: bool
    """It was read, or came back after its eviction."""

    def touched(self, clock: float) -> Heat:
        return Heat(touched(self.score, clock), True)


class Clock:
    """Half-lives since it was made. All tiers of a worker share one, so that their scores compare."""

    def __init__(self, capacity_bytes: int) -> None:
        self.now = 0.0
        self.resize(capacity_bytes)

    def resize(self, capacity_bytes: int) -> None:
        """The worker holds more or less than before (a volume failed): the pace changes, the clock does not jump."""
        if capacity_bytes <= 0:
            raise ValueError(f"a capacity of {capacity_bytes} bytes has no turnover")
        self._half_life_bytes = capacity_bytes * HALF_LIFE

    def admit(self, size_bytes: int) -> None:
        """These bytes came to the worker. Moves between tiers are no admission."""
        self.now += size_bytes / self._half_life_bytes

    def heat(self, score: float) -> float:
        """How many touches just now the score is worth: 1 after the first, halved with each half-life."""
        return float(2.0 ** min(score - self.now, 1023.0))

    def age(self, score: float) -> float:
        """The score as a clock at 0 would have it: what a snapshot holds, and a new clock starts from."""
        return score - self.now


class Ranking(Generic[K]):
    """Ids in order of their scores. Every change costs O(log n) at worst: there is no pause to tidy up.

    A binary heap that knows where each id stands; 1,000,000 ids take about 150 MB.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, K]] = []
        self._index: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, id: K) -> bool:
        return id in self._index

    def score(self, id: K) -> float | None:
        index = self._index.get(id)
        return None if index is None else self._heap[index][0]

    def set(self, id: K, score: float) -> None:
        """Add it, or give it another score."""
        if math.isnan(score):
            raise ValueError(f"{id!r}: not a number has no place in an order")
        index = self._index.get(id)
        if index is None:
            self._heap.append((score, id))
            self._rise(len(self._heap) - 1, (score, id))
        elif score < self._heap[index][0]:
            self._rise(index, (score, id))
        else:
            self._sink(index, (score, id))

    def discard(self, id: K) -> None:
        """Remove it if it is there."""
        index = self._index.pop(id, None)
        if index is None:
            return
        last = self._heap.pop()
        if index == len(self._heap):
            return
        if index > 0 and last[0] < self._heap[(index - 1) >> 1][0]:
            self._rise(index, last)
        else:
            self._sink(index, last)

    def lowest(self) -> float | None:
        """The lowest score; None when nothing is here. Any thread may ask."""
        try:
            return self._heap[0][0]
        except IndexError:
            return None

    def coldest(self) -> Iterator[tuple[K, float]]:
        """(id, score) from the lowest score up; the first n cost O(n log n). Not to be changed while it is iterated."""
        heap = self._heap
        border = [(heap[0][0], 0)] if heap else []
        while border:
            score, index = heapq.heappop(border)
            yield heap[index][1], score
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(border, (heap[child][0], child))

    def _rise(self, index: int, item: tuple[float, K]) -> None:
        """Put the item at the index or as far above it as its score demands."""
        heap, places = self._heap, self._index
        while index > 0:
            parent = (index - 1) >> 1
            if heap[parent][0] <= item[0]:
                break
            heap[index] = heap[parent]
            places[heap[index][1]] = index
            index = parent
        heap[index] = item
        places[item[1]] = index

    def _sink(self, index: int, item: tuple[float, K]) -> None:
        """Put the item at the index or as far below it as its score demands."""
        heap, places = self._heap, self._index
        size = len(heap)
        while (child := 2 * index + 1) < size:
            if child + 1 < size and heap[child + 1][0] < heap[child][0]:
                child += 1
            if item[0] <= heap[child][0]:
                break
            heap[index] = heap[child]
            places[heap[index][1]] = index
            index = child
        heap[index] = item
        places[item[1]] = index
