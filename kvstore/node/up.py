"""`kvstore up`: a whole store on one box, as child processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvstore.config import MountPoint
from kvstore.node import box, plan
from kvstore.node.box import Box, Options
from kvstore.node.supervisor import Supervisor, stop_event
from kvstore.obs import notify

START_TIMEOUT_S = 30.0
MAX_PAUSE_S = 5.0


class Store(NamedTuple):
    """Where the running store is found."""

    url: str
    mounts: tuple[Path, ...]
    worker_sockets: tuple[str, ...]


async def run(options: Options, announce: Callable[[Store], None]) -> None:
    """Start master, workers and mounts, announce them, and keep them running until SIGTERM or SIGINT.

    Raises InvalidRequest before anything is touched, Unavailable when another store runs on the directory, ChildEnded
    when one of them cannot start (a port that is taken, a volume in use): the others are stopped.
    """
    stop = stop_event()
    box.check(options)
    with box.locked(options.data):
        supervisor = Supervisor(MAX_PAUSE_S)
        stopped = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(_start(supervisor, options, box.lay_out(options)))
        try:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                announce(starting.result())
                notify.ready()
                await stopped
        finally:
            await _cancel(starting, stopped)
            await supervisor.stop()


async def _start(supervisor: Supervisor, options: Options, laid_out: Box) -> Store:
    await supervisor.start(plan.master(str(laid_out.master_config)), START_TIMEOUT_S)
    for node in laid_out.nodes:
        await supervisor.start(plan.worker(str(node.config), node.socket, f"worker {node.id}"), START_TIMEOUT_S)
    sockets = tuple(node.socket for node in laid_out.nodes)
    for path, socket in zip(options.mounts, sockets, strict=False):
        await supervisor.start(plan.mount(MountPoint(dir=str(path)), laid_out.url, socket), START_TIMEOUT_S)
    return Store(laid_out.url, options.mounts, sockets)


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
