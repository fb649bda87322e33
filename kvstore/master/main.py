"""The master's process: wires everything, says when it is ready, and ends in order."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
from pathlib import Path

import uvloop

from kvstore.config import Config, MasterConfig
from kvstore.master.master import Settings
from kvstore.master.recovery.rebuild import MEND, Wanted
from kvstore.master.running import Running
from kvstore.master.storage.db import RocksDb
from kvstore.master.storage.records import JournalLimits
from kvstore.obs import notify
from kvstore.obs.http import HttpServer, Route, health_routes
from kvstore.obs.http import serve as http_serve
from kvstore.rpc.server import stop_all
from kvstore.runtime import Runtime, SystemRuntime, raise_fd_limit

log = logging.getLogger(__name__)

THREADS = 4
"""One flushes; the others look at the drive's free space, and scan."""
DATABASE_DIRECTORY = "db"


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
    running = Running(
        db,
        runtime,
        settings_of(config),
        free_bytes=lambda: shutil.disk_usage(db.path).free,
        reserve_bytes=config.free_reserve_bytes,
        scan_interval_s=config.scan_interval_s,
        wanted=wanted or (MEND if db.is_cut else None),
    )
    db.forget_cut()
    http: HttpServer | None = None
    try:
        server = await running.serve(config.listen)
        http, http_endpoint = await http_serve(config.http_address, _routes(running))
        await server.set_serving(True)
        # Its workers may come: what is started after us waits for this word.
        notify.ready(endpoint=server.endpoint, http=http_endpoint, cluster=running.master.cluster_id)
        announcement = asyncio.create_task(_announce(running, runtime, server.endpoint, http_endpoint))
        try:
            await _until_stopped(running)
        finally:
            await stop_all(announcement)
    finally:
        await running.stop()
        if http is not None:
            await http.close()


def settings_of(config: MasterConfig) -> Settings:
    journal = JournalLimits(config.journal_records, config.journal_size_bytes)
    return Settings(config.tick_s, config.dead_ticks, config.forget_after_s, journal)


async def _announce(running: Running, runtime: Runtime, endpoint: str, http_endpoint: str) -> None:
    """Say that it is ready, once it refuses no change any more."""
    master, where = running.master, f"gRPC at {endpoint}, HTTP at {http_endpoint}"
    if (refused := master.refusal()) is not None:
        log.info("listening for workers: %s; %s", where, refused)
    while master.refusal() is not None:
        await runtime.sleep(master.settings.tick_s / 4)
    log.info("ready: %s, cluster %s", where, master.cluster_id)


def _routes(running: Running) -> dict[str, Route]:
    master, committer = running.master, running.committer

    def failure() -> str | None:
        return committer.failure.message if committer.failure else None

    def not_ready() -> str | None:
        refused = master.refusal()
        return failure() or (refused.message if refused else None)

    # A damaged database is no reason to take readers their master: the metric, the log and `kvstore report` tell.
    return health_routes(running.metrics.metrics, failure, not_ready)


async def _until_stopped(running: Running) -> None:
    """Wait for a signal. Raises what ended the work instead."""
    stop = stop_event()
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(running.until_failed())]
    done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await stop_all(*waits)
    for task in done:
        task.result()
    log.info("stopping")


def stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event
