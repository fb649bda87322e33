"""Processes of the store in networks of their own, started again when they end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from kvstore.node import parent
from tests.chaos.net import Network
from tests.support.cluster import Process, ProcessFailed, clean_environment

_TRY_S: Final = 10.0
"""So long one start may take until it is looked at again whether the process lives."""
BACK_TIMEOUT_S: Final = 60.0


class NotBack(AssertionError):
    """A process did not come back; with the end of its log."""


class Daemon(Process):
    """``kvstore <argv>`` on `node` of the network.

    It says that it is ready through a socket with a path: an abstract one is seen in its own network only. `unasked`
    counts how often it ended by itself, or had to be started more than once.
    """

    def __init__(self, name: str, argv: Sequence[str], root: Path, sockets: Path, network: Network, node: str) -> None:
        super().__init__(name, argv, root)
        self.node = node
        self._network, self._sockets = network, sockets
        self.unasked = 0
        self._killed = True

    def start(self, *, wait: bool = True) -> None:
        assert self.pid is None, f"{self.name} runs already"
        address = self._sockets / f"{self.name}-{os.urandom(4).hex()}"
        self._close_notify()
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._notify.bind(str(address))
        with self.log.open("ab") as log:
            self._process = self._spawn({**clean_environment(), "NOTIFY_SOCKET": str(address)}, log)
        self._killed = False
        if wait:
            self.wait_ready()

    def end(self) -> None:
        """kill -9, whether it runs or not."""
        self._killed = True
        if self.pid is not None:
            self.signal(signal.SIGKILL)
            self._end()

    def back(self) -> None:
        """Until it serves, started as often as it takes. Raises NotBack."""
        end_s = time.monotonic() + BACK_TIMEOUT_S
        while time.monotonic() < end_s:
            if self.pid is None:
                self.unasked += not self._killed
                self.start(wait=False)
            if self._notify is None:
                return
            with contextlib.suppress(ProcessFailed):
                self.wait_ready(_TRY_S)
                self._close_notify()
                return
        raise NotBack(f"{self.name} is not back after {BACK_TIMEOUT_S:g} s\n{self.log_tail()}")

    @contextmanager
    def stopped(self, number: int | None = None) -> Iterator[None]:
        """Under SIGSTOP: it, or the process with this number."""
        pid = number or self.pid
        if pid is None:
            yield
            return
        _signal(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(pid, signal.SIGCONT)

    def family(self) -> list[int]:
        """Its pid and those of all below it."""
        found = [] if self.pid is None else [self.pid]
        for pid in found:
            found += _children(pid)
        return found

    def _spawn(self, environ: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = self._network.command(self.node, [sys.executable, "-m", "kvstore.cli.main", *self.argv])
        return subprocess.Popen(
            command, env=parent.tied(environ, signal.SIGKILL), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    def _close_notify(self) -> None:
        if self._notify is not None:
            self._notify.close()
            self._notify = None


class MountDaemon(Daemon):
    """A mount: by passthrough its process is the keeper, whose child is the file system process."""

    def __init__(self, place: str, path: Path, passthrough: bool, options: Sequence[str], *where: object) -> None:
        mode = "on" if passthrough else "off"
        argv = ["mount", str(path), "--passthrough", mode, *options]
        super().__init__(f"mount-{place}", argv, *where)  # type: ignore[arg-type]  # root, sockets, network, node
        self.place, self.path, self.passthrough = place, path, passthrough

    def file_system_process(self) -> int | None:
        """None while there is none apart from the mount's own."""
        below = [pid for pid in self.family()[1:] if b"kvstore\0mount" in _command_line(pid)]
        return below[-1] if below else None

    def close(self) -> None:
        try:
            super().close()
        finally:
            while _is_mounted(self.path):
                subprocess.run(["umount", "-l", str(self.path)], check=True, timeout=10)


def _is_mounted(path: Path) -> bool:
    return any(line.split(" ")[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines())


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
