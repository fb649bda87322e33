"""Whether a worker answers on its Unix socket. It greets on its event loop, which everything else needs, too."""

from __future__ import annotations

import asyncio
from typing import Final

from kvstore.client.local import AsyncLocalWorker
from kvstore.client.wiring import new_session
from kvstore.core.errors import KvError, Timeout, Unavailable

_AGAIN_S: Final = 0.2


class WatchedWorker:
    """Of the worker whose socket is at `path`, for `watch`. Nobody hangs in it: clients pass it over by themselves."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self._worker = AsyncLocalWorker(path, new_session())

    async def ask(self, deadline_s: float) -> str:
        """A refused connection is tried again until the deadline: one that stops in order closes its socket first."""
        complaint = ""
        try:
            async with asyncio.timeout(deadline_s):
                while complaint := await self._greeted(deadline_s):  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            return complaint or f"no answer within {deadline_s:g} s"
        return ""

    async def release(self) -> None:
        return

    async def _greeted(self, timeout_s: float) -> str:
        """ "" when it says anything, be it that it is overloaded; also when this process has no free descriptor."""
        try:
            await self._worker.ping(timeout_s)
        except (Timeout, Unavailable) as error:
            return error.message
        except (KvError, OSError):
            return ""
        return ""
