"""A real store on loopback for tests: one master and N workers as processes of their own, each with a socket and a
volume under `root`.

    with Cluster(tmp_path, workers=3) as cluster:
        client = Client(cluster.url, worker_socket=cluster.workers[0].socket)
        cluster.master.kill()
        cluster.master.start()

Ports are free ones chosen by the kernel; a process that starts again keeps its own. Readiness is the process's own
word (sd_notify). Every process dies with the test run; their logs stand in `root`, and in the message of whatever
fails here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from kvstore.client.messages import ClusterMap
from kvstore.client.meta import Meta
from kvstore.node import parent
from kvstore.rpc.failover import Failover
from kvstore.rpc.metadata import Caller

READY_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.02
_LOG_TAIL_BYTES = 4000
_VOLUME = '[[worker.volumes]]\ntier = "{tier}"\npath = "{path}"\ncapacity = "{capacity}"\nfree_floor = "1MiB"\n'


class ProcessFailed(AssertionError):
    """A process ended, or was not ready in time; with the end of its log."""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Ask again and again, for what has no event to wait for."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"still not after {timeout_s:g} s: {what}")
        time.sleep(POLL_S)


class Process:
    """One ``kvstore <argv>``, started and killed as often as a test likes.

    `facts`: what it said when it was ready (``{"ENDPOINT": "127.0.0.1:…", …}``); `log`: the file with all its output.
    """

    def __init__(self, name: str, argv: Sequence[str], root: Path, environ: Mapping[str, str] | None = None) -> None:
        self.name, self.argv = name, list(argv)
        self.log = root / f"{name}.log"
        self.facts: dict[str, str] = {}
        self._environ = dict(environ or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._notify: socket.socket | None = None

    def __repr__(self) -> str:
        return f"<Process {self.name} pid={self.pid}>"

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self, *, wait: bool = True) -> None:
        assert self.pid is None, f"{self.name} runs already"
        address = f"kvstore-test-{os.getpid()}-{self.name}-{os.urandom(4).hex()}"
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._notify.bind("\0" + address)
        environ = {**clean_environment(), **self._environ, "NOTIFY_SOCKET": "@" + address}
        with self.log.open("ab") as log:
            self._process = self._spawn(environ, log)
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until it says READY. Raises ProcessFailed when it ends before, or takes too long."""
        assert self._notify is not None
        end = time.monotonic() + timeout_s
        self._notify.settimeout(0.1)
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                lines = self._notify.recv(4096).decode().splitlines()
                self.facts |= dict(line[2:].split("=", 1) for line in lines if line.startswith("X_"))
                if "READY=1" in lines:
                    return
            if self.pid is None:
                raise ProcessFailed(f"{self.name} ended before it was ready\n{self.log_tail()}")
        raise ProcessFailed(f"{self.name} was not ready after {timeout_s:g} s\n{self.log_tail()}")

    def signal(self, number: int) -> None:
        assert self.pid is not None, f"{self.name} does not run"
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and wait for its end."""
        self.signal(signal.SIGKILL)
        self._end()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, and wait; its exit code."""
        self.signal(signal.SIGTERM)
        return self._end(timeout_s)

    def restart(self) -> None:
        """kill -9, start, wait until it is ready."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End it whatever state it is in."""
        if self.pid is not None:
            self.signal(signal.SIGCONT)
            try:
                self.stop(timeout_s=5.0)
            except ProcessFailed:
                self.kill()
        if self._notify is not None:
            self._notify.close()

    def log_tail(self) -> str:
        data = self.log.read_bytes() if self.log.exists() else b""
        return f"--- end of {self.log.name}\n{data[-_LOG_TAIL_BYTES:].decode(errors='replace')}"

    def _spawn(self, environ: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kvstore.cli.main", *self.argv]
        return subprocess.Popen(
            command,
            env=parent.tied(environ, signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

    def _end(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        assert self._process is not None
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(f"{self.name} did not end within {timeout_s:g} s\n{self.log_tail()}") from None
        if self._notify is not None:
            self._notify.close()
            self._notify = None
        return code


class Worker(Process):
    """Attributes besides: `node` (its id), `socket` (path of its Unix socket), `volume` (its directory)."""

    def __init__(self, node: str, socket_path: str, volume: Path, config: Path, root: Path) -> None:
        super().__init__(node, ["worker", "--config", str(config)], root)
        self.node, self.socket, self.volume, self.config = node, socket_path, volume, config

    @property
    def memory(self) -> Path:
        """Directory of its volume of the tier mem."""
        return self.volume.with_name(f"{self.volume.name}-mem")

    @property
    def block_files(self) -> list[Path]:
        """Sealed blocks that lie in the volume now."""
        return [p for p in self.volume.rglob("*.*.*") if p.is_file() and p.name.count(".") == 2]


class Cluster:
    """See the module. `tick` and `dead_ticks` are short, so that a dead worker is noticed within a test's patience."""

    def __init__(
        self,
        root: Path,
        workers: int = 3,
        *,
        capacity: str = "256MiB",
        tick: str = "100ms",
        dead_ticks: int = 5,
        session_grace: str = "60s",
        tier: str = "ssd",
        memory: str = "",
    ) -> None:
        """`memory`: capacity of a second volume of each worker, of the tier mem."""
        self.root = root
        self._sockets = Path(tempfile.mkdtemp(prefix="kvs-"))  # short: a socket's path has at most 107 bytes
        self._options = (capacity, session_grace, tier, memory)
        self._extra: list[Process] = []
        self._master_listen = "127.0.0.1:0"
        self._tick, self._dead_ticks = tick, dead_ticks
        self.master = Process("master", ["master", "--config", str(root / "master.toml")], root)
        self.workers = [self._new_worker(i) for i in range(workers)]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"kvstore://{self.master.facts['ENDPOINT']}"

    def start(self) -> None:
        """Start all and wait until the master counts every worker as live."""
        self._write_master()
        self.master.start()
        self._master_listen = self.master.facts["ENDPOINT"]  # the same address after a restart
        self._write_master()
        for i, worker in enumerate(self.workers):
            self._write_worker(i, "127.0.0.1:0")
            worker.start(wait=False)
        for i, worker in enumerate(self.workers):
            worker.wait_ready()
            self._write_worker(i, worker.facts["ENDPOINT"])
        self.wait_live(*(w.node for w in self.workers))

    def close(self) -> None:
        for process in (*reversed(self._extra), *self.workers, self.master):
            process.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def process(self, name: str, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Process:
        """Another process (a mount, a node daemon), not started yet; it ends before the workers do."""
        process = Process(name, argv, self.root, environ)
        self._extra.append(process)
        return process

    def map(self) -> ClusterMap:
        """The master's map as of now."""
        link = Failover([self.master.facts["ENDPOINT"]], Caller())
        try:
            return Meta(link, 0).cluster_map()
        finally:
            link.close()

    def wait_live(self, *nodes: str) -> None:
        """Until exactly these workers are live."""
        wait_until(lambda: {n.id for n in self.map().nodes if n.live} == set(nodes), f"live workers are {nodes}")

    def logs(self) -> str:
        return "\n".join(p.log_tail() for p in (self.master, *self.workers, *self._extra))

    def _new_worker(self, index: int) -> Worker:
        node, root = f"node-{index}", self.root
        volume = root / f"volume-{index}"
        return Worker(node, str(self._sockets / f"{index}.sock"), volume, root / f"{node}.toml", root)

    def _write_master(self) -> None:
        (self.root / "master.toml").write_text(
            f'[master]\nlisten = "{self._master_listen}"\nhttp = ""\ndata = "{self.root / "master"}"\n'
            f'tick = "{self._tick}"\ndead_ticks = {self._dead_ticks}\nfree_reserve = "1MiB"\n'
        )

    def _write_worker(self, index: int, listen: str) -> None:
        worker, (capacity, grace, tier, memory) = self.workers[index], self._options
        worker.config.write_text(
            f'[worker]\nnode_id = "{worker.node}"\nmaster = "{self.url}"\nlisten = "{listen}"\nhttp = ""\n'
            f'socket = "{worker.socket}"\nsession_grace = "{grace}"\n\n'
            + _VOLUME.format(tier=tier, path=worker.volume, capacity=capacity)
            + (memory and _VOLUME.format(tier="mem", path=worker.memory, capacity=memory))
        )


def clean_environment() -> dict[str, str]:
    """Without what configures a real store on this machine, or these tests alone."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("KVSTORE_", "GRPC_ENABLE_FORK_SUPPORT"))}
