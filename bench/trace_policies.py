"""The usual replacement policies, for comparison with ours: caches of equal blocks, known by their ids."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Protocol


class Policy(Protocol):
    """A cache of a fixed number of blocks."""

    def __contains__(self, block: int) -> bool: ...

    def begin(self, client: int, now_s: float) -> None:
        """What follows is one prompt of a client."""

    def hit(self, block: int) -> None:
        """A block that is here was read."""

    def insert(self, block: int) -> None:
        """A block that is not here was computed and stored."""


class _Timeless:
    """A policy that knows the order of accesses and nothing else."""

    def begin(self, client: int, now_s: float) -> None:
        return


class Lru(_Timeless):
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def hit(self, block: int) -> None:
        self._blocks.move_to_end(block)

    def insert(self, block: int) -> None:
        self._blocks[block] = None
        if len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class Fifo(Lru):
    def hit(self, block: int) -> None:
        return


class Arc(_Timeless):
    """Megiddo and Modha, FAST 2003: recent (t1) and frequent (t2) blocks; ghosts (b1, b2) shift the border."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._target = capacity, 0.0
        self._t1: OrderedDict[int, None] = OrderedDict()
        self._t2: OrderedDict[int, None] = OrderedDict()
        self._b1: OrderedDict[int, None] = OrderedDict()
        self._b2: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._t1 or block in self._t2

    def hit(self, block: int) -> None:
        self._t1.pop(block, None)
        self._t2[block] = None
        self._t2.move_to_end(block)

    def insert(self, block: int) -> None:
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        if block in b1:
            self._target = min(self._capacity, self._target + max(1.0, len(b2) / len(b1)))
            self._replace(block)
            del b1[block]
            t2[block] = None
        elif block in b2:
            self._target = max(0.0, self._target - max(1.0, len(b1) / len(b2)))
            self._replace(block)
            del b2[block]
            t2[block] = None
        else:
            self._forget(block)
            t1[block] = None

    def _forget(self, block: int) -> None:
        """Room for a block that was never seen, or is forgotten."""
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        if len(t1) + len(b1) == self._capacity:
            if len(t1) < self._capacity:
                b1.popitem(last=False)
                self._replace(block)
            else:
                t1.popitem(last=False)
        elif (total := len(t1) + len(t2) + len(b1) + len(b2)) >= self._capacity:
            if total == 2 * self._capacity:
                b2.popitem(last=False)
            self._replace(block)

    def _replace(self, block: int) -> None:
        if self._t1 and (len(self._t1) > self._target or (block in self._b2 and len(self._t1) == self._target)):
            self._b1[self._t1.popitem(last=False)[0]] = None
        elif self._t2:
            self._b2[self._t2.popitem(last=False)[0]] = None


class S3Fifo(_Timeless):
    """Yang and others, SOSP 2023: a small queue filters what is used once, ghosts go straight to the main one."""

    SMALL_SHARE = 0.1
    MAX_FREQUENCY = 3

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_capacity = max(1, int(capacity * self.SMALL_SHARE))
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._frequency: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._frequency

    def hit(self, block: int) -> None:
        self._frequency[block] = min(self.MAX_FREQUENCY, self._frequency[block] + 1)

    def insert(self, block: int) -> None:
        while len(self._frequency) >= self._capacity:
            self._evict()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main.append(block)
        else:
            self._small.append(block)
        self._frequency[block] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._small_capacity or not self._main:
            self._evict_small()
        else:
            self._evict_main()

    def _evict_small(self) -> None:
        block = self._small.popleft()
        if self._frequency[block] > 1:
            self._frequency[block] = 0
            self._main.append(block)
            return
        del self._frequency[block]
        self._ghosts[block] = None
        if len(self._ghosts) > self._capacity - self._small_capacity:
            self._ghosts.popitem(last=False)

    def _evict_main(self) -> None:
        block = self._main.popleft()
        if self._frequency[block] > 0:
            self._frequency[block] -= 1
            self._main.append(block)
        else:
            del self._frequency[block]
