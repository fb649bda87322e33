"""The process ``kvstore worker``."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any

import uvloop

from kvstore import __version__
from kvstore.config import Config, HostPort, WorkerConfig
from kvstore.obs import notify
from kvstore.obs.http import HttpServer, Route, health_routes
from kvstore.obs.http import serve as http_serve
from kvstore.obs.metrics import Metrics
from kvstore.runtime import SystemRuntime, raise_fd_limit
from kvstore.worker import metrics as worker_metrics
from kvstore.worker.settings import Settings, VolumeSettings, Watermarks
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.volumes.opening import open_volumes, start_error
from kvstore.worker.worker import Worker

log = logging.getLogger(__name__)
JOIN_WAIT_S = 2.0
"""Ready means that puts and gets work; without a master we say so all the same after this long."""


def run(config: Config, *, accept_rollback: bool = False) -> None:
    """Run until SIGTERM or SIGINT. Raises KvError with the one line for the operator."""
    # A conflicting open while a lease is held sends SIGIO, whose default is to kill (rule 5).
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    raise_fd_limit()
    uvloop.run(serve(settings_of(config.worker, accept_rollback), config.worker.http_address))


async def serve(settings: Settings, http_address: HostPort | None) -> None:
    runtime, disk = SystemRuntime(name="kvstore-worker"), Disk()
    stopped = _on_signals()
    http = HttpServer({})
    try:
        volumes = await open_volumes(settings, runtime, disk)
        worker = Worker(settings, runtime, volumes, disk)
        http, address = await http_serve(http_address, _routes(worker))
        worker.settings = settings._replace(http=address)
        try:
            await _start(worker)
            await _until_stopped(worker, stopped)
        finally:
            notify.stopping()
            await worker.stop()
            await http.close()
    finally:
        runtime.close()


async def _start(worker: Worker) -> None:
    try:
        await worker.start()
    except OSError as error:
        raise start_error(error, f"worker.socket: {worker.settings.socket}") from None
    try:
        async with asyncio.timeout(JOIN_WAIT_S):
            await worker.joined.wait()
    except TimeoutError:
        log.warning("not registered with a master yet (%s); trying on", worker.complaint or _silent(worker))
    log.info("worker %s is ready at %s and %s", worker.settings.node, worker.endpoint, worker.settings.socket)
    notify.ready(endpoint=worker.endpoint, http=worker.settings.http, socket=worker.settings.socket)


def _silent(worker: Worker) -> str:
    return f"no answer from {','.join(worker.settings.master)}"


async def _until_stopped(worker: Worker, stopped: asyncio.Event) -> None:
    """Raises what the worker was refused with."""
    stop = asyncio.ensure_future(stopped.wait())
    waits: set[asyncio.Future[Any]] = {stop, worker.refused}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if worker.refused.done():
        raise worker.refused.result()
    log.info("stopping")


def _routes(worker: Worker) -> dict[str, Route]:
    metrics = Metrics("worker", __version__)
    worker_metrics.watch(metrics, worker)
    return health_routes(metrics, _alive(worker), _ready(worker))


def _alive(worker: Worker) -> Callable[[], str | None]:
    """A restart takes volumes back that were mended, or emptied."""
    return lambda: None if worker.store.in_service else "no volume is in service: the log says why"


def _ready(worker: Worker) -> Callable[[], str | None]:
    def problem() -> str | None:
        if worker.joined.is_set():
            return _alive(worker)()
        return f"not registered with a master: {worker.complaint or _silent(worker)}"

    return problem


def _on_signals() -> asyncio.Event:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


def settings_of(config: WorkerConfig, accept_rollback: bool = False) -> Settings:
    """Configuration → what a worker needs. Raises InvalidRequest."""
    return Settings(
        node=config.effective_node_id,
        master=endpoints_of(config.master),
        listen=str(config.listen_address),
        advertise=config.advertise,
        socket=config.socket,
        socket_mode=config.socket_mode_bits,
        session_grace_s=config.session_grace_s,
        full_report_s=config.full_report_s,
        volumes=[
            VolumeSettings(
                v.tier, v.path, v.capacity_bytes, v.free_floor_bytes, Watermarks(v.high_watermark, v.low_watermark)
            )
            for v in config.volumes
        ],
        accept_rollback=accept_rollback,
        move_bytes_per_s=float(config.move_bytes_per_s),
        moves_at_a_time=config.moves_at_a_time,
        pin_share=config.pin_share,
        scrub_bytes_per_s=float(config.scrub_bytes_per_s),
        scrub_interval_s=config.scrub_interval_s,
    )


def endpoints_of(url: str) -> list[str]:
    """``kvstore://host:port[,host:port][/root]`` → the endpoints."""
    return url.partition("://")[2].partition("/")[0].split(",")
