"""Which failures of one worker another one may make good, and when the local one is passed over for new blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.core.errors import Corrupt, Denied, KvError, NoSpace, NotFound, Overloaded, Stale, Timeout, Unavailable
from kvstore.rpc.breaker import blames

log = logging.getLogger(__name__)

ELSEWHERE = (Unavailable, Timeout, NoSpace, Overloaded, Corrupt, Stale)
"""Failures of one worker that say nothing about the next one."""
DISTRUST_S = 5.0
"""Of a local worker that could not write: one failed put in so many seconds finds out whether it can again."""


def is_elsewhere(error: KvError) -> bool:
    """Whether another worker may take the block that one did not: also when that one misses files of its own (a staging
    file, a directory that went with its disk), or failed inside.
    """
    return isinstance(error, (*ELSEWHERE, NotFound)) or error.code == KvError.code


def is_no_local_worker(error: KvError, path: str) -> bool:
    """Whether a remote worker should be used instead: the local one does not answer, or belongs to another cluster."""
    return blames(error, path) or isinstance(error, Denied)


class LocalWrites:
    """Whether the local worker, on the socket `path`, can write. A seal cannot go elsewhere, its bytes are in the
    worker's file; so for `DISTRUST_S` after a failure new blocks are staged elsewhere from the start, and a put that is
    repeated succeeds.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock, self._until_s = path, clock, 0.0

    @property
    def work(self) -> bool:
        return self._clock() >= self._until_s

    def is_trouble(self, error: KvError) -> bool:
        """Whether it is the worker's disk. Not when it is just full or busy (it says so after it tried to make room,
        and the network is dearer), too slow for its caller, or does not answer: that is the breaker's.
        """
        passing = isinstance(error, NoSpace | Overloaded | Timeout)
        return is_elsewhere(error) and not passing and not blames(error, self._path)

    @contextmanager
    def watched(self, is_local: bool = True) -> Iterator[None]:
        """Around a write."""
        try:
            yield
        except KvError as error:
            if is_local and self.is_trouble(error):
                log.warning("new blocks go to other workers for %g s, the local one failed: %s", DISTRUST_S, error)
                self._until_s = self._clock() + DISTRUST_S
            raise
