"""The few threads of a synchronous client, for calls that move many values; a call for one value runs in its
caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

from kvstore.client.deadline import Deadline
from kvstore.core.errors import Timeout

I = TypeVar("I")  # noqa: E741 - item
T = TypeVar("T")

THREADS = 4
"""Two saturate the memory bandwidth of a small machine (field notes: 2 readers), the others hide round trips."""


class Threads:
    """Made at the first use. Tasks never wait for other tasks, so a full pool only makes them wait their turn."""

    def __init__(self, count: int = THREADS) -> None:
        self._count = count
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def map(self, function: Callable[[I], T], items: Sequence[I], deadline: Deadline) -> list[T]:
        """Results in order. When one raises, the others still run to their end before it is raised here.

        Raises Timeout when the deadline passes while some wait for their turn behind another caller's; those that run
        end before it is raised (they keep the deadline themselves), for they may write into the caller's buffers.
        """
        if len(items) <= 1:
            return [function(item) for item in items]
        futures = [self._executor().submit(function, item) for item in items]
        wait(futures, deadline.left_s)
        late = [future for future in futures if future.cancel()]
        wait(set(futures).difference(late))
        if late:
            raise Timeout(
                f"{len(late)} of {len(items)} did not begin within {deadline.timeout_s:g} s; the client is busy"
            )
        return [future.result() for future in futures]

    def start(self, function: Callable[[], object]) -> None:
        """In its turn, while nobody waits for it; not at all after `close`. It keeps a deadline of its own, and raises
        nothing.
        """
        with suppress(RuntimeError):
            self._executor().submit(function)

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="kvstore-client")
            return self._pool
