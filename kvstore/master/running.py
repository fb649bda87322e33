"""A master at work: its server, and what goes on beside the calls. The process (`main`) and the simulation start it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from kvstore.core.errors import KvError, ReadOnly
from kvstore.master.master import Master, Settings
from kvstore.master.metrics import MasterMetrics
from kvstore.master.recovery.rebuild import Wanted
from kvstore.master.service import MasterService
from kvstore.master.storage.commit import Committer
from kvstore.master.storage.db import Db
from kvstore.master.storage.scan import Scan, Scanned
from kvstore.rpc.server import Server, serve, stop_all
from kvstore.rpc.transport import GRPC, Transport
from kvstore.runtime import Runtime

log = logging.getLogger(__name__)

REBUILD_PAUSE_S: Final = 0.005
RECOUNT_PAUSE_S: Final = 0.04
"""After a step of about 10 ms: 1,000,000 files take under two minutes."""


class ScannedDb(Db, Scanned, Protocol):
    """A database as a master runs on it."""


class Running:
    """Put together over an open database; `serve` begins the work, `stop` ends it in order."""

    def __init__(
        self,
        db: ScannedDb,
        runtime: Runtime,
        settings: Settings,
        *,
        free_bytes: Callable[[], int],
        reserve_bytes: int,
        scan_interval_s: float,
        wanted: Wanted | None = None,
    ) -> None:
        """`free_bytes` says what the drive has left, and may block; `wanted`: the rebuild to begin with. Raises
        KvError."""
        self._runtime = runtime
        self.committer = Committer(db, runtime, free_bytes, reserve_bytes)
        self.master = Master(db, self.committer, runtime, settings, wanted)
        self.metrics = MasterMetrics(self.master)
        self._scan = Scan(db, runtime, scan_interval_s, self.committer.stop_mutations)
        self._tasks: list[asyncio.Task[None]] = []
        self._server: Server | None = None

    async def serve(self, listen: str, transport: Transport = GRPC) -> Server:
        """Begin to work, and to answer at ``host:port``. Raises Unavailable when the address cannot be bound."""
        self._tasks = [
            asyncio.create_task(self.committer.run(), name="commit"),
            asyncio.create_task(self._scan.run(), name="scan"),
            asyncio.create_task(self._tick(), name="tick"),
            asyncio.create_task(self._recount(), name="recount"),
            asyncio.create_task(self._rebuild(), name="rebuild"),
        ]
        service = MasterService(self.master, self._runtime, self.metrics)
        self._server = await serve(listen, [service.add_to], transport=transport)
        return self._server

    async def until_failed(self) -> None:
        """For as long as all is well. Raises what ended the work: a failed drive, or a bug in a task."""
        failed = asyncio.create_task(self.committer.failed.wait())
        try:
            done, _ = await asyncio.wait([failed, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await stop_all(failed)
        if self.committer.failure is not None:
            raise self.committer.failure
        for task in done:
            task.result()

    async def stop(self) -> None:
        """In order."""
        self.committer.close()  # answers all who wait, before the server waits for their calls to end
        if self._server is not None:
            await self._server.stop()
        await stop_all(*self._tasks)

    async def _tick(self) -> None:
        """A tick that comes late is one tick (rule 17): the sleep starts anew after each."""
        while True:
            await self._runtime.sleep(self.master.settings.tick_s)
            try:
                self.master.tick()
            except ReadOnly:  # the scan has said it
                pass
            except KvError as error:
                log.error("upkeep failed: %s", error)
            await self.committer.pulse()

    async def _recount(self) -> None:
        """In small steps with pauses, so that others get the loop and the log."""
        while True:
            busy = _step(self.master.recount, "counting what lies below a policy")
            await self._runtime.sleep(RECOUNT_PAUSE_S if busy else self.master.settings.tick_s)

    async def _rebuild(self) -> None:
        """To its end, if one is wanted; reports and heartbeats get the loop between the steps."""
        while True:
            busy = _step(self.master.rebuild_step, "taking names back")
            await self._runtime.sleep(REBUILD_PAUSE_S if busy else self.master.settings.tick_s / 4)


def _step(step: Callable[[], bool], what: str) -> bool:
    """Whether there is more to do at once."""
    try:
        return step()
    except ReadOnly:
        return False
    except KvError as error:
        log.error("%s failed: %s", what, error)
        return False
