"""Work on a file descriptor in a thread, safe against its owner closing it meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from kvstore.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")


async def on_fd(
    runtime: Runtime, fd: int, function: Callable[Concatenate[int, P], T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """``function(fd, …)`` in a thread, on a duplicate that the thread closes.

    When the caller is cancelled (its deadline passed) the thread goes on; were it on the fd itself, a close and an open
    meanwhile would put it onto another file.
    """
    own = os.dup(fd)

    def run() -> T:
        try:
            return function(own, *args, **kwargs)
        finally:
            os.close(own)

    return await asyncio.shield(asyncio.ensure_future(runtime.in_thread(run)))
