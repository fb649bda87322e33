"""Staging files made in advance, so that CREATE waits for nobody: the kernel holds the directory's lock meanwhile, and
every look-up in it waits behind (rule 25).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvstore.client.blocks import AsyncBlocks
from kvstore.client.staging import Staging
from kvstore.core.errors import KvError
from kvstore.runtime import Runtime

log = logging.getLogger(__name__)

KEEP: Final = 4
"""As many as LMCache writes at a time on a small machine."""
IDLE_S: Final = 5.0
"""Without a CREATE for so long they are given back."""


class Spares:
    """Empty, and no room is reserved for them. There are none before the first CREATE."""

    def __init__(self, blocks: AsyncBlocks, runtime: Runtime) -> None:
        self._blocks, self._runtime = blocks, runtime
        self._ready: list[Staging] = []
        self._filling: asyncio.Task[None] | None = None
        self._used_s = 0.0

    def take(self) -> Staging | None:
        """One, if there is any; more are made in the background."""
        self._used_s = self._runtime.monotonic_s()
        if self._filling is None:
            self._filling = asyncio.create_task(self._fill())
        return self._ready.pop() if self._ready else None

    async def sweep(self) -> None:
        """Give back what nobody needs."""
        if self._runtime.monotonic_s() - self._used_s >= IDLE_S:
            await self.close()

    async def close(self) -> None:
        ready, self._ready = self._ready, []
        for spare in ready:
            try:
                await self._blocks.abort(spare)
            except KvError as error:
                log.debug("spare staging file not aborted: %s", error.message)

    async def _fill(self) -> None:
        try:
            while len(self._ready) < KEEP:
                self._ready.append(await self._blocks.stage(0))
        except KvError as error:  # whoever needs one asks for himself
            log.debug("no spare staging file: %s", error.message)
        finally:
            self._filling = None
