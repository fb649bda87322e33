"""What a process takes from outside: time, randomness, threads. Injected, so that a simulation can own them.

The disk (`worker.volumes.disk`), the database (`master.storage.db`) and the transport (`rpc.link`) are the other seams,
each with an interface of its own where it is used.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


FD_LIMIT = 1 << 20


def raise_fd_limit() -> None:
    """As far as it may be: each client of a server costs one, and at a worker each block that somebody has open in
    flight, and each evicted one that somebody holds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FD_LIMIT if hard == resource.RLIM_INFINITY else min(FD_LIMIT, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Runtime(Protocol):
    def wall_ns(self) -> int:
        """Wall clock, ns since the epoch: only for what people read (mtime), never for liveness."""

    def monotonic_s(self) -> float: ...

    def random_u64(self) -> int: ...

    async def sleep(self, delay_s: float) -> None: ...

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something that blocks (disk, hash) off the loop."""

    def close(self) -> None: ...


class SystemRuntime:
    """The real one. `threads` bounds disk and hash work: more than a few per core only thrash."""

    def __init__(self, threads: int = 16, name: str = "kvstore") -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def wall_ns(self) -> int:
        return time.time_ns()

    def monotonic_s(self) -> float:
        return time.monotonic()

    def random_u64(self) -> int:
        return secrets.randbits(64)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
