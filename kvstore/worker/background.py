"""Work that outlives whoever asked for it: what touches files and books is never cut in half by a caller that goes
away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvstore.core.errors import KvError

log = logging.getLogger(__name__)
T = TypeVar("T")


class Background:
    """Keeps tasks alive, and logs what fails unseen."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Nobody waits for it."""
        _ = self._keep(work)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Await it through `asyncio.shield`."""
        return self._keep(work)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work; when the caller is cancelled, the work goes on to its end."""
        return await asyncio.shield(self._keep(work))

    async def close(self, timeout_s: float) -> None:
        """Let what runs come to its end, at most `timeout_s` seconds; then cancel it."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, KvError):
            log.error("background work failed", exc_info=error)
