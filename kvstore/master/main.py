"""The master's process: wires everything, says when it is ready, and ends in order."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
from pathlib import Path

import uvloop

from kvstore.config import Config, MasterConfig
from kvstore.core.errors import KvError, ReadOnly
from kvstore.master.commit import Committer
from kvstore.master.db import RocksDb
from kvstore.master.master import Master, Settings
from kvstore.master.metrics import MasterMetrics
from kvstore.master.rebuild import Wanted
from kvstore.master.records import JournalLimits
from kvstore.master.scan import Scan
from kvstore.master.service import MasterService
from kvstore.obs import notify
from kvstore.obs.http import HttpServer, Route, health_routes
from kvstore.obs.http import serve as http_serve
from kvstore.rpc.server import Server, serve, stop_all
from kvstore.runtime import Runtime, SystemRuntime, raise_fd_limit

log = logging.getLogger(__name__)

THREADS = 4
"""One flushes; the others look at the drive's free space, and scan."""
DATABASE_DIRECTORY = "db"
REBUILD_PAUSE_S = 0.005
RECOUNT_PAUSE_S = 0.04
"""After a step of about 10 ms: 1,000,000 files take under two minutes."""


def main(config: Config, wanted: Wanted | None = None) -> None:
    """Run until SIGTERM or SIGINT, after the rebuild that is wanted. Raises KvError when it cannot start, or had to
    stop because its drive failed."""
    raise_fd_limit()
    uvloop.run(run(config.master, wanted=wanted))


async def run(config: MasterConfig, runtime: Runtime | None = None, wanted: Wanted | None = None) -> None:
    """The same on a running loop."""
    runtime = runtime or SystemRuntime(THREADS, "master")
    db = RocksDb(Path(config.data) / DATABASE_DIRECTORY)
    try:
        await _run(config, runtime, db, wanted)
    finally:
        runtime.close()
        db.close()


async def _run(config: MasterConfig, runtime: Runtime, db: RocksDb, wanted: Wanted | None) -> None:
    committer = Committer(db, runtime, lambda: shutil.disk_usage(db.path).free, config.free_reserve_bytes)
    master = Master(db, committer, runtime, settings_of(config), wanted)
    metrics = MasterMetrics(master)
    scan = Scan(db, runtime, config.scan_interval_s, committer.stop_mutations)
    tasks = [
        asyncio.create_task(committer.run(), name="commit"),
        asyncio.create_task(scan.run(), name="scan"),
        asyncio.create_task(_tick(master, runtime), name="tick"),
        asyncio.create_task(_recount(master, runtime), name="recount"),
        asyncio.create_task(_rebuild(master, runtime), name="rebuild"),
    ]
    server: Server | None = None
    http: HttpServer | None = None
    try:
        server = await serve(config.listen, [MasterService(master, runtime, metrics).add_to])
        http, http_endpoint = await http_serve(config.http_address, _routes(metrics, committer))
        await server.set_serving(True)
        log.info("ready: gRPC at %s, HTTP at %s, cluster %s", server.endpoint, http_endpoint, master.cluster_id)
        notify.ready(endpoint=server.endpoint, http=http_endpoint, cluster=master.cluster_id)
        await _until_stopped(committer, tasks)
    finally:
        committer.close()  # answers all who wait, before the server waits for their calls to end
        if server is not None:
            await server.stop()
        if http is not None:
            await http.close()
        await stop_all(*tasks)


def settings_of(config: MasterConfig) -> Settings:
    journal = JournalLimits(config.journal_records, config.journal_size_bytes)
    return Settings(config.tick_s, config.dead_ticks, config.forget_after_s, journal)


def _routes(metrics: MasterMetrics, committer: Committer) -> dict[str, Route]:
    def failure() -> str | None:
        return committer.failure.message if committer.failure else None

    def problem() -> str | None:
        return failure() or committer.damage

    return health_routes(metrics.metrics, failure, problem)


async def _tick(master: Master, runtime: Runtime) -> None:
    """A tick that comes late is one tick (rule 17): the sleep starts anew after each."""
    while True:
        await runtime.sleep(master.settings.tick_s)
        try:
            master.tick()
        except ReadOnly:  # the scan has said it
            pass
        except KvError as error:
            log.error("upkeep failed: %s", error)
        await master.committer.pulse()


async def _recount(master: Master, runtime: Runtime) -> None:
    """In small steps with pauses, so that others get the loop and the log."""
    while True:
        try:
            busy = master.recount()
        except ReadOnly:
            busy = False
        except KvError as error:
            log.error("counting what lies below a policy failed: %s", error)
            busy = False
        await runtime.sleep(RECOUNT_PAUSE_S if busy else master.settings.tick_s)


async def _rebuild(master: Master, runtime: Runtime) -> None:
    """To its end, if one is wanted; reports and heartbeats get the loop between the steps."""
    while True:
        try:
            busy = master.rebuild_step()
        except ReadOnly:
            busy = False
        except KvError as error:
            log.error("taking names back failed: %s", error)
            busy = False
        await runtime.sleep(REBUILD_PAUSE_S if busy else master.settings.tick_s / 4)


async def _until_stopped(committer: Committer, tasks: list[asyncio.Task[None]]) -> None:
    """Wait for a signal. Raises what ended the work instead: a failed drive, or a bug in a task."""
    stop = stop_event()
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(committer.failed.wait())]
    done, _ = await asyncio.wait([*waits, *tasks], return_when=asyncio.FIRST_COMPLETED)
    await stop_all(*waits)
    if committer.failure is not None:
        raise committer.failure
    for task in tasks:
        if task in done:
            task.result()
    log.info("stopping")


def stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event
