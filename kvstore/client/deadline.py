"""How much time a call has left: one deadline covers the whole call, retries included."""

from __future__ import annotations

import time
from typing import Self

from kvstore.core.errors import InvalidRequest, Timeout
from kvstore.core.limits import MAX_TIMEOUT_S, METADATA_TIMEOUT_S

MIN_STEP_S = 0.001
"""The smallest timeout that is passed on: zero means "no wait at all" to some of the callees."""


def seconds(given: float, what: str = "timeout_s") -> float:
    """A span of time as a caller gives it: 0 and more; what is longer than `MAX_TIMEOUT_S` (infinity, too) is cut to
    that, since sockets and gRPC do not take it. Raises InvalidRequest for a negative one, NaN, and what is no number.
    """
    try:
        if given >= 0:  # False for NaN
            return float(min(given, MAX_TIMEOUT_S))
    except (TypeError, ValueError):
        raise InvalidRequest(f"{what} must be a number of seconds, not {type(given).__name__}") from None
    raise InvalidRequest(f"{what} must be 0 or more seconds, not {given}")


class Deadline:
    """A point in time. `left_s` is what a step inside the call may take. See `seconds` for what is a timeout; one of 0
    has passed already.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = seconds(timeout_s)
        self._end = time.monotonic() + self.timeout_s
        self._fixed = False
        self.answer_s = self.timeout_s
        """What the master may take for one answer."""

    @classmethod
    def of(cls, given_s: float | None, default_s: float, answer_s: float | None = None) -> Self:
        """The caller's timeout if there is one, which then is final, else the default, which `allow` may extend.

        The default is for moving bytes, too; of the master an answer is expected within `answer_s`.
        """
        deadline = cls(default_s if given_s is None else given_s)
        deadline._fixed = given_s is not None
        if given_s is None and answer_s is not None:
            deadline.answer_s = min(answer_s, deadline.timeout_s)
        return deadline

    @property
    def is_patient(self) -> bool:
        """Whether the caller would rather wait for a server that restarts than be told at once."""
        return self.answer_s > METADATA_TIMEOUT_S

    @property
    def left_s(self) -> float:
        """Seconds left, at least `MIN_STEP_S`. Raises Timeout when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise Timeout(f"not done within {self.timeout_s:g} s; give a longer timeout_s, or look for what is slow")
        return max(left, MIN_STEP_S)

    @property
    def passed(self) -> bool:
        return not self.has_more_than(0)

    def has_more_than(self, span_s: float) -> bool:
        """Whether that much is left, for what only makes sense with time enough."""
        return self._end - time.monotonic() > span_s

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
