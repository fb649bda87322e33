"""The breakers of the links that a client calls (rule 29): after one failure the next callers do not wait for the
dead one again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.core.breaker import Breaker
from kvstore.core.errors import KvError, Timeout, Unavailable

PATIENCE_S = 0.2
"""A call that was given less time than this says nothing about the link when it times out."""


def blames(error: BaseException, endpoint: str) -> bool:
    """Whether it is the fault of the one that was called. Whoever answers works, with whatever error."""
    return isinstance(error, Unavailable | Timeout) and error.fault == endpoint


class Breakers:
    """Breakers by endpoint (or socket path). Safe for many threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._breakers: dict[str, Breaker] = {}

    def closed(self, endpoint: str) -> bool:
        """For ordering candidates: those that work come first."""
        breaker = self._breakers.get(endpoint)
        return breaker is None or breaker.is_closed

    @contextmanager
    def call(self, endpoint: str, timeout_s: float) -> Iterator[None]:
        """Around one call on the link. Raises Unavailable at once while it is open."""
        with self._lock:
            breaker = self._breakers.setdefault(endpoint, Breaker())
            is_trial, allowed = not breaker.is_closed, breaker.allows(self._clock())
        if not allowed:
            raise Unavailable(f"{endpoint} failed a moment ago and is not asked again yet", fault=endpoint)
        try:
            yield
        except KvError as error:
            with self._lock:
                self._judge(breaker, error, endpoint, timeout_s, is_trial)
            raise
        if not breaker.is_closed:
            with self._lock:
                breaker.succeeded()

    def keep(self, endpoints: set[str]) -> None:
        """Forget links to workers that are no longer in the cluster."""
        with self._lock:
            self._breakers = {e: b for e, b in self._breakers.items() if e in endpoints or e.startswith("/")}

    def _judge(self, breaker: Breaker, error: KvError, endpoint: str, timeout_s: float, is_trial: bool) -> None:
        if blames(error, endpoint) and not (isinstance(error, Timeout) and timeout_s < PATIENCE_S):
            if is_trial or breaker.is_closed:  # of many that were under way the first opens it; the pause is for trials
                breaker.failed(self._clock())
        elif not isinstance(error, Timeout):
            breaker.succeeded()
