"""`kvstore up`: a whole store on one box, as child processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from kvstore.config import MountPoint
from kvstore.core.errors import InvalidRequest
from kvstore.node import plan
from kvstore.node.supervisor import Supervisor, stop_event
from kvstore.obs import notify

START_TIMEOUT_S = 30.0
MAX_PAUSE_S = 5.0
MAX_SOCKET_PATH_BYTES = 107
"""sun_path of a Unix socket, without its NUL."""


class Options(NamedTuple):
    data: Path
    capacity: str
    """Size with a unit, of each worker."""
    workers: int
    mounts: tuple[Path, ...]
    """Mount i belongs to node i."""
    port: int
    """Of the master; its HTTP is one above, worker i listens at port + 10 (i + 1). 0 = any free ports."""
    free_floor: str = "1GiB"


class Store(NamedTuple):
    """Where the running store is found."""

    url: str
    mounts: tuple[Path, ...]
    worker_sockets: tuple[str, ...]


async def run(options: Options, announce: Callable[[Store], None]) -> None:
    """Start master, workers and mount, announce them, and keep them running until SIGTERM or SIGINT.

    Raises Unavailable when one of them cannot start (a port that is taken, a volume in use): the others are stopped.
    """
    stop = stop_event()
    supervisor = Supervisor(MAX_PAUSE_S)
    try:
        announce(await _start(supervisor, options))
        notify.ready()
        await stop.wait()
    finally:
        await supervisor.stop()


async def _start(supervisor: Supervisor, options: Options) -> Store:
    files = prepare(options)
    facts = await supervisor.start(plan.master(str(files.master)), START_TIMEOUT_S)
    url = f"kvstore://{facts['endpoint']}"
    for index in range(options.workers):
        config = write_worker(options, index, url)
        await supervisor.start(plan.worker(str(config), f"worker node-{index + 1}"), START_TIMEOUT_S)
    sockets = tuple(socket_path(options, i) for i in range(options.workers))
    for path, socket in zip(options.mounts, sockets, strict=False):
        await supervisor.start(plan.mount(MountPoint(dir=str(path)), url, socket), START_TIMEOUT_S)
    return Store(url, options.mounts, sockets)


class Files(NamedTuple):
    master: Path


def prepare(options: Options) -> Files:
    """Make the data directory and the master's configuration file."""
    longest = socket_path(options, options.workers - 1)
    if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
        raise InvalidRequest(f"--data {options.data} is too long: {longest} must fit {MAX_SOCKET_PATH_BYTES} bytes")
    if len(options.mounts) > options.workers:
        raise InvalidRequest(f"{len(options.mounts)} mounts need as many nodes; say --workers {len(options.mounts)}")
    options.data.mkdir(parents=True, exist_ok=True)
    file = options.data / "master.toml"
    http = 0 if options.port == 0 else options.port + 1
    table = {"listen": f"127.0.0.1:{options.port}", "http": f"127.0.0.1:{http}", "data": str(options.data / "master")}
    file.write_text(_toml("master", table))
    return Files(file)


def write_worker(options: Options, index: int, url: str) -> Path:
    """The configuration file of worker `index` (from 0), node ``node-<index + 1>``."""
    home = options.data / f"node-{index + 1}"
    home.mkdir(exist_ok=True)
    port = options.port + 10 * (index + 1) if options.port else 0
    worker: dict[str, str] = {
        "node_id": f"node-{index + 1}",
        "master": url,
        "listen": f"127.0.0.1:{port}",
        "http": f"127.0.0.1:{port + 1 if port else 0}",
        "socket": socket_path(options, index),
    }
    volume = {
        "tier": "ssd", "path": str(home / "volume"), "capacity": options.capacity, "free_floor": options.free_floor,
    }  # fmt: skip
    file = options.data / f"node-{index + 1}.toml"
    file.write_text(_toml("worker", worker) + "\n" + _toml("[worker.volumes]", volume))
    return file


def socket_path(options: Options, index: int) -> str:
    return str(options.data / f"node-{index + 1}" / "worker.sock")


def _toml(table: str, values: Mapping[str, str]) -> str:
    """A table of texts; JSON's text literals are TOML's."""
    return "\n".join([f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""])
