"""How much time a call has left: one deadline covers the whole call, retries included."""

from __future__ import annotations

import time
from typing import Self

from kvstore.core.errors import Timeout

MIN_STEP_S = 0.001
"""The smallest timeout that is passed on: zero means "no wait at all" to some of the callees."""


class Deadline:
    """A point in time. `left_s` is what a step inside the call may take."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._fixed = False

    @classmethod
    def of(cls, given_s: float | None, default_s: float) -> Self:
        """The caller's timeout if there is one, which then is final, else the default, which `allow` may extend."""
        deadline = cls(default_s if given_s is None else given_s)
        deadline._fixed = given_s is not None
        return deadline

    @property
    def left_s(self) -> float:
        """Seconds left, at least `MIN_STEP_S`. Raises Timeout when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise Timeout(f"not done within {self.timeout_s:g} s; give a longer timeout_s, or look for what is slow")
        return max(left, MIN_STEP_S)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def at_most(self, timeout_s: float) -> float:
        """What is left, but no more than `timeout_s`: a step with a limit of its own."""
        return min(self.left_s, timeout_s)

    def check(self) -> None:
        """Raises Timeout when it has passed."""
        _ = self.left_s

    def allow(self, extra_s: float) -> None:
        """More time, for bytes whose number became known only now; not for a caller with a timeout of its own."""
        if not self._fixed:
            self.timeout_s += extra_s
            self._end += extra_s
