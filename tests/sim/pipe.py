"""One direction of one call: messages take their time, and do not overtake each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.net import Net


class Pipe:
    def __init__(self, net: Net) -> None:
        self._net = net
        self._under_way: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._last_s = 0.0

    def send(self, deliver: Callable[..., object], *args: object) -> None:
        self._under_way.append((deliver, args))
        self._last_s = max(self._last_s, self._net.loop.time() + self._net.delay_s())
        self._net.at(self._last_s, self._deliver)

    def _deliver(self) -> None:
        """Whichever timer fires: what was sent first arrives first."""
        deliver, args = self._under_way.popleft()
        deliver(*args)
