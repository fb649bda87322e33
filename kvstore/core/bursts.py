"""Bursts: chunks that one client touches right after each other are a prompt, first chunk first. Pure.

A prefix chain is useless without its head, but plain recency evicts the head first, as it was touched first. So all
touches of a burst are scored at the clock of its start, each a tiny step below the one before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

C = TypeVar("C", bound=Hashable)

GAP_S: Final = 0.25
"""A longer pause ends a burst. LMCache opens chunk after chunk within milliseconds."""
MAX_BURST_S: Final = 5.0
"""A client that never pauses begins a new burst all the same, or it would be scored at an old clock for ever."""
MAX_BURST_CLOCK: Final = 1.0
"""Half-lives. Nor does one that brings as much as the worker holds while it lasts: what it brought last is not as old
as what it brought first."""
STEP: Final = 2.0**-20
"""Of a half-life, for each position in a burst."""


class _Burst:
    __slots__ = ("clock", "last_s", "position", "start_s")

    def __init__(self, clock: float, now_s: float) -> None:
        self.clock, self.start_s, self.last_s, self.position = clock, now_s, now_s, 0

    def is_over(self, now_s: float, clock: float) -> bool:
        paused = now_s - self.last_s > GAP_S
        return paused or now_s - self.start_s > MAX_BURST_S or clock - self.clock > MAX_BURST_CLOCK


class Bursts(Generic[C]):
    """The running burst of each client. Times are monotonic seconds; what is over is forgotten by itself."""

    def __init__(self) -> None:
        self._running: OrderedDict[C, _Burst] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    def touch(self, client: C, now_s: float, clock: float) -> float:
        """The clock at which a touch by this client is to be scored."""
        self._forget(now_s)
        burst = self._running.get(client)
        if burst is None or burst.is_over(now_s, clock):
            burst = self._running[client] = _Burst(clock, now_s)
        else:
            burst.position += 1
        burst.last_s = now_s
        self._running.move_to_end(client)
        return burst.clock - burst.position * STEP

    def _forget(self, now_s: float) -> None:
        """Drop those that paused for too long: the least recently touched stand first."""
        while self._running:
            client, burst = next(iter(self._running.items()))
            if now_s - burst.last_s <= GAP_S:
                return
            del self._running[client]
