"""A keeper as a process of its own, on the real device, with `tests.support.tiny_fs`. It is always unmounted."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvstore.keeper import admin, mountinfo
from tests.support.cluster import wait_until

WAIT_S: Final = 20.0
SIZE: Final = 3 << 20
"""Of the files that are there at first."""
_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Mounted:
    """A keeper's process; `shown` is the directory that the mount shows."""

    def __init__(self, root: Path) -> None:
        self.path, self.shown, self.log = root / "mnt", root / "shown", root / "log"
        self.path.mkdir()
        self.shown.mkdir()
        self.digest = ""
        for name in ("file", "direct"):
            data = os.urandom(SIZE)
            (self.shown / name).write_bytes(data)
            self.digest = self.digest or hashlib.sha256(data).hexdigest()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str, fs: tuple[str, ...] = ()) -> None:
        """Returns when it is ready."""
        address = f"\0kvstore-test-{os.getpid()}-{os.urandom(4).hex()}"
        command = [sys.executable, "-m", "kvstore.keeper", *options, str(self.path), "--"]
        command += [sys.executable, "-m", "tests.support.tiny_fs", str(self.shown), *fs]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, self.log.open("wb") as log:
            sock.bind(address)
            sock.settimeout(WAIT_S)
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "NOTIFY_SOCKET": "@" + address[1:]},
                stdout=log,
                stderr=log,
                preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
            )
            assert b"READY=1" in sock.recv(4096)

    def status(self) -> dict[str, Any]:
        return admin.status(str(self.path))

    def kill_fs(self) -> int:
        """kill -9 of the file system process; its pid."""
        wait_until(lambda: self.status()["state"] == "serving", "somebody serves")
        pid = int(self.status()["fs_pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(WAIT_S)

    def is_mounted(self) -> bool:
        return mountinfo.find(str(self.path)) is not None

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        while self.is_mounted():
            subprocess.run(["umount", "-l", str(self.path)], check=True, timeout=10)


@contextmanager
def mounting(root: Path) -> Iterator[Mounted]:
    made = Mounted(root)
    try:
        yield made
    finally:
        made.close()
