"""Where a store on one box keeps its things: its directory, held under a lock, its ports, its configuration files.

::

    lock                 held under flock while `kvstore up` runs on it
    master.toml          what the master was started with; master/ is its data
    node-<i>.toml        likewise worker i; node-<i>/volume and node-<i>/worker.sock are its own
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvstore.config import load
from kvstore.core.errors import Denied, InvalidRequest, Unavailable

MAX_SOCKET_PATH_BYTES = 107
"""sun_path of a Unix socket, without its NUL."""
HOST = "127.0.0.1"


class Options(NamedTuple):
    data: Path
    capacity: str
    """Size with a unit, of each worker."""
    workers: int
    mounts: tuple[Path, ...]
    """Mount i belongs to node i."""
    port: int
    """Of the master; its HTTP is one above, worker i (from 0) listens at port + 10 (i + 1). 0 = any free ports."""
    free_floor: str = "1GiB"


class Node(NamedTuple):
    """One node of the box."""

    id: str
    config: Path
    socket: str


class Box(NamedTuple):
    """What was laid out."""

    master_config: Path
    url: str
    nodes: tuple[Node, ...]


def check(options: Options) -> None:
    """Whatever can be said before anything is touched. Raises InvalidRequest."""
    longest = socket_path(options, options.workers - 1)
    if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
        raise InvalidRequest(f"--data {options.data} is too long: {longest} must fit {MAX_SOCKET_PATH_BYTES} bytes")
    if len(options.mounts) > options.workers:
        raise InvalidRequest(f"{len(options.mounts)} mounts need as many nodes; say --workers {len(options.mounts)}")
    if len(set(options.mounts)) != len(options.mounts):
        raise InvalidRequest("the same --mount is given twice")
    for path in options.mounts:
        # lstat of a dead mount would hang or fail: only what is certainly a file is refused here.
        with contextlib.suppress(OSError):
            if path.is_file():
                raise InvalidRequest(f"--mount {path} is a file, not a directory")


@contextmanager
def locked(data: Path) -> Iterator[None]:
    """Make the directory and hold it. Raises Unavailable when another store runs on it, Denied without the right to."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        lock = (data / "lock").open("w")
    except OSError as error:
        raise Denied(f"cannot use --data {data}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(f"another `kvstore up` runs on {data}: stop it, or choose another --data") from None
        yield


def lay_out(options: Options) -> Box:
    """Choose the ports once, so that whoever is started again comes back where the others look for it, and write the
    configuration files. Raises InvalidRequest for values that they refuse.
    """
    ports = _ports(options)
    url = f"kvstore://{HOST}:{ports[0]}"
    master = {"listen": f"{HOST}:{ports[0]}", "http": f"{HOST}:{ports[1]}", "data": str(options.data / "master")}
    box = Box(
        _write(options.data / "master.toml", _toml("master", master)),
        url,
        tuple(_node(options, i, url, ports[2 * i + 2], ports[2 * i + 3]) for i in range(options.workers)),
    )
    for file in (box.master_config, *(node.config for node in box.nodes)):
        load(str(file), environ={})
    return box


def socket_path(options: Options, index: int) -> str:
    return str(options.data / f"node-{index + 1}" / "worker.sock")


def _node(options: Options, index: int, url: str, port: int, http: int) -> Node:
    node = f"node-{index + 1}"
    home = options.data / node
    home.mkdir(exist_ok=True)
    worker = {
        "node_id": node,
        "master": url,
        "listen": f"{HOST}:{port}",
        "http": f"{HOST}:{http}",
        "socket": socket_path(options, index),
    }
    volume = {"tier": "ssd", "path": str(home / "volume"), "capacity": options.capacity}
    text = _toml("worker", worker) + "\n" + _toml("[worker.volumes]", volume | {"free_floor": options.free_floor})
    return Node(node, _write(options.data / f"{node}.toml", text), worker["socket"])


def _ports(options: Options) -> list[int]:
    """(gRPC, HTTP) of the master, then of each worker."""
    if options.port == 0:
        return _free_ports(2 + 2 * options.workers)
    firsts = [options.port, *(options.port + 10 * (i + 1) for i in range(options.workers))]
    return [port for first in firsts for port in (first, first + 1)]


def _free_ports(count: int) -> list[int]:
    """All held at once, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((HOST, 0))
        return [sock.getsockname()[1] for sock in sockets]


def _write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def _toml(table: str, values: Mapping[str, str]) -> str:
    """A table of texts; JSON's text literals are TOML's."""
    return "\n".join([f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""])
