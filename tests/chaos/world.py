"""The store under test: a master, three workers and two mounts, each in the network of its node.

node-0: mount "a" (passthrough). node-1: mount "b" (plain), and its disk is a small file system of its own. node-2: its
way to the master is a proxy. Each worker has a tier in memory (a tmpfs) and one on disk.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvstore import Client
from kvstore.node import parent
from tests.chaos.daemons import Daemon, MountDaemon
from tests.chaos.limits import MOUNT_DEADLINE_S, STALE_S
from tests.chaos.load import DIRECTORY, Spec, directory_of
from tests.chaos.net import HERE, Network
from tests.chaos.proxy import Proxy
from tests.support.cluster import clean_environment, wait_until
from tests.support.small_fs import Filler, small_ext4, small_tmpfs

WORKERS: Final = 3
SMALL_DISK: Final = 1
"""The worker whose disk is a file system of its own."""
SMALL_DISK_MIB: Final = 96
_MASTER_PORT: Final = 7070
_WORKER_PORT: Final = 7080
JOIN_TIMEOUT_S: Final = 60.0

_MASTER: Final = """[master]
listen = "{listen}"
http = ""
data = "{data}"
tick = "200ms"
dead_ticks = 10
free_reserve = "1MiB"
"""
_WORKER: Final = """[worker]
node_id = "{node}"
master = "{master}"
listen = "{listen}"
http = ""
socket = "{socket}"
session_grace = "20s"
full_report = "30s"
scrub_interval = "10s"

[[worker.volumes]]
tier = "mem"
path = "{memory}"
capacity = "24MiB"
free_floor = "1MiB"

[[worker.volumes]]
tier = "ssd"
path = "{disk}"
capacity = "{capacity}MiB"
free_floor = "2MiB"
"""
_MOUNT: Final = f"""[mount]
stale_max = "{STALE_S:g}s"
deadline = "{MOUNT_DEADLINE_S:g}s"

[worker]
session_grace = "20s"
"""


class World:
    """Everything that stands, and goes at the end whatever happened."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self._seed = root, seed
        self._stack = ExitStack()
        self._loads: list[subprocess.Popen[bytes]] = []
        self._stop = root / "stop"

    def __enter__(self) -> Self:
        try:
            self._build()
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def daemons(self) -> list[Daemon]:
        """In the order in which they are started."""
        return [self.master, *self.workers, *self.mounts.values()]

    @property
    def records(self) -> list[Path]:
        return sorted(self.root.glob("calls-*.jsonl"))

    def volume(self, worker: int) -> Path:
        """Its disk."""
        return (self._small_disk if worker == SMALL_DISK else self.root) / f"volume-{worker}"

    def client(self) -> Client:
        """Without a node; close it."""
        return Client(self.url, worker_socket="", timeout_s=20.0)

    def back(self) -> None:
        """Until all serve again. Raises NotBack."""
        for daemon in self.daemons:
            daemon.back()

    def settle(self) -> None:
        """Until the master counts every worker as live."""
        with self.client() as client:
            nodes = {worker.name for worker in self.workers}
            live = lambda: {n.id for n in client.cluster_map().nodes if n.live} == nodes  # noqa: E731
            wait_until(live, "all workers are live", JOIN_TIMEOUT_S)

    def start_load(self) -> int:
        """Prepare the directories, and start all actors; the master's sequence before their first change."""
        specs = self._specs()
        with self.client() as client:
            for actor in range(specs[0].all_actors):
                client.mkdir(f"{DIRECTORY}/{directory_of(actor)}", parents=True)
            sequence = client.cluster_map().sequence
        for spec in specs:
            command = [sys.executable, "-m", "tests.chaos.load", json.dumps(spec)]
            environ = parent.tied(clean_environment(), signal.SIGKILL)
            with (self.root / "load.log").open("ab") as log:
                self._loads.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
        return sequence

    def load_alive(self) -> bool:
        return all(process.poll() is None for process in self._loads)

    def stop_load(self, timeout_s: float) -> int:
        """Number of load processes that did not end in time (a call hangs), or died."""
        self._stop.touch()
        failed = 0
        for process in self._loads:
            try:
                failed += process.wait(timeout_s) != 0
            except subprocess.TimeoutExpired:
                failed += 1
        return failed

    def load_log(self) -> str:
        path = self.root / "load.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def load_pids(self) -> list[int]:
        return [process.pid for process in self._loads]

    def _build(self) -> None:
        enter = self._stack.enter_context
        nodes = [f"node-{i}" for i in range(WORKERS)]
        self.network = enter(Network(["master", *nodes]))
        self._sockets = Path(tempfile.mkdtemp(prefix="kvc-"))  # short: a socket's path has at most 107 bytes
        self._stack.callback(shutil.rmtree, self._sockets, ignore_errors=True)
        memory = enter(small_tmpfs(self.root, WORKERS * 32))
        self._small_disk = enter(small_ext4(self.root, SMALL_DISK_MIB))
        self.filler = Filler(self._small_disk)
        address = self.network.address("master")
        self.url = f"kvstore://{address}:{_MASTER_PORT}"
        self.proxy = enter(Proxy(self.network.address(HERE), (address, _MASTER_PORT)))
        self.slow_url = f"kvstore://{self.network.address(HERE)}:{self.proxy.port}"
        self.master = self._daemon("master", "master", _MASTER.format(
            listen=f"{address}:{_MASTER_PORT}", data=self.root / "master"
        ))  # fmt: skip
        self.workers = [self._worker(i, node, memory) for i, node in enumerate(nodes)]
        self.mounts = {"a": self._mount("a", 0, True), "b": self._mount("b", 1, False)}
        self._stack.callback(self._end_loads)

    def _start(self) -> None:
        for daemon in self.daemons:
            daemon.back()
        self.settle()

    def _daemon(self, name: str, kind: str, config: str) -> Daemon:
        path = self.root / f"{name}.toml"
        path.write_text(config)
        daemon = Daemon(name, [kind, "--config", str(path)], self.root, self._sockets, self.network, name)
        self._stack.callback(daemon.close)
        return daemon

    def _worker(self, index: int, node: str, memory: Path) -> Daemon:
        return self._daemon(node, "worker", _WORKER.format(
            node=node,
            master=self.slow_url if index == WORKERS - 1 else self.url,
            listen=f"{self.network.address(node)}:{_WORKER_PORT}",
            socket=self._socket(index),
            memory=memory / node,
            disk=self.volume(index),
            capacity=SMALL_DISK_MIB - 16 if index == SMALL_DISK else 160,
        ))  # fmt: skip

    def _mount(self, place: str, worker: int, passthrough: bool) -> MountDaemon:
        config = self.root / f"mount-{place}.toml"
        config.write_text(_MOUNT)
        options = ["--master", self.url, "--config", str(config), "--worker-socket", self._socket(worker)]
        where = (self.root, self._sockets, self.network, f"node-{worker}")
        mount = MountDaemon(place, self.root / place, passthrough, options, *where)
        self._stack.callback(mount.close)
        return mount

    def _socket(self, worker: int) -> str:
        return str(self._sockets / f"{worker}.sock")

    def _specs(self) -> list[Spec]:
        ways = [
            ("a", "mount", self.mounts["a"].path, self.url, "", 2),
            ("b", "mount", self.mounts["b"].path, self.url, "", 2),
            ("sync", "sync", "", self.url, self._socket(0), 2),
            ("sync-far", "sync", "", self.slow_url, "", 1),
            ("async", "async", "", self.url, self._socket(2), 2),
        ]
        total, first, specs = sum(way[-1] for way in ways), 0, []
        for place, kind, path, url, sock, count in ways:
            actors = tuple(range(first, first + count))
            out = str(self.root / f"calls-{place}.jsonl")
            specs.append(Spec(place, kind, str(path), url, sock, actors, total, self._seed, out, str(self._stop)))
            first += count
        return specs

    def _end_loads(self) -> None:
        for process in self._loads:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        for process in self._loads:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:  # in a call to a mount: it ends with that
                continue
