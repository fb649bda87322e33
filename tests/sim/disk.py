"""The system calls of one process: the real ones, on the drive of its host, until one of them is its last."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.worker.volumes.disk import Disk, FileState
from tests.sim.drive import FREE_BYTES, Drive
from tests.sim.loop import Killed

FDS_A_PROCESS: Final = 700
FIRST_FD: Final = 1500
"""Below are those of clients, sockets and the interpreter."""


class SimDisk(Disk):
    """`number` tells processes' file descriptors apart. `kill_at`: the system call before which `kill` is called."""

    def __init__(self, drive: Drive, number: int, kill: Callable[[], None]) -> None:
        self._drive, self._kill = drive, kill
        self._fds = range(FIRST_FD + number * FDS_A_PROCESS, FIRST_FD + (number + 1) * FDS_A_PROCESS)
        self.kill_at = 0
        self.dead = False

    def give_up(self) -> None:
        """The process is dead. Its files are closed; their numbers stay taken, as its remains may still close them."""
        self.dead = True
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd in self._fds or self._is_lock(fd):
                os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)

    def open_read(self, path: str) -> int:
        self._call(path)
        return self._own(super().open_read(path))

    def create(self, path: str) -> int:
        self._call(path, writes=True)
        fd = self._own(super().create(path))
        self._drive.made(path)
        return fd

    def create_unnamed(self, path: str) -> int:
        self._call(path, writes=True)
        return super().create_unnamed(path)

    def create_in_memory(self) -> int:
        return self._own(super().create_in_memory())

    def reopen_read(self, fd: int) -> int:
        return self._own(super().reopen_read(fd))

    def close(self, fd: int) -> None:
        super().close(fd)

    def rename(self, source: str, target: str) -> None:
        self._call(source, writes=True)
        self._drive.renaming(source, target)
        super().rename(source, target)
        self._drive.renamed(target)

    def unlink(self, path: str) -> None:
        self._call(path)
        self._drive.unlinking(path)
        super().unlink(path)

    def names(self, path: str) -> list[str]:
        """In an order that is the same in each run."""
        self._call(path)
        return sorted(super().names(path))

    def make_directory(self, path: str) -> None:
        if self.dead:
            self._call(path)
        try:
            os.mkdir(path)  # there are 256 of them in a volume: without what os.makedirs asks first
        except FileExistsError:
            return
        except FileNotFoundError:
            super().make_directory(path)

    def free_bytes(self, path: str) -> int:
        return 0 if self._drive.full else FREE_BYTES

    def stat(self, path: str) -> FileState:
        self._call(path)
        return self._drive.state(super().stat(path))

    def fstat(self, fd: int) -> FileState:
        return self._drive.state(super().fstat(fd))

    def read(self, fd: int, size_bytes: int, offset: int) -> bytes:
        self._call("a file")
        self._warm(fd)
        return super().read(fd, size_bytes, offset)

    def read_into(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._call("a file")
        self._warm(fd)
        return super().read_into(fd, buffers, offset)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        self._call("a file", writes=True)
        super().write(fd, data, offset)

    def copy(self, source: int, target: int, length_bytes: int) -> int:
        self._call("a file", writes=True)
        return super().copy(source, target, length_bytes)

    def attribute(self, path: str, name: str) -> bytes | None:
        self._call(path)
        return super().attribute(path, name)

    def set_attribute(self, path: str, name: str, value: bytes) -> None:
        self._call(path, writes=True)
        self._drive.noting(path, name, super().attribute(path, name))
        super().set_attribute(path, name, value)

    def replace_durably(self, path: str, data: bytes) -> None:
        self._call(path, writes=True)
        super().replace_durably(path, data)
        self._drive.synced(path)

    def _call(self, path: str, *, writes: bool = False) -> None:
        if self.dead:
            raise OSError(errno.EIO, "this process is dead", path)
        if self.kill_at:
            self.kill_at -= 1
            if self.kill_at == 0:
                self._kill()
                raise Killed
        if error := self._drive.error(path, writes):
            raise error

    def _warm(self, fd: int) -> None:
        """What is read is in memory then."""
        if self._drive.cold:
            self._drive.cold.discard(os.fstat(fd).st_ino)

    def _own(self, fd: int) -> int:
        """The same open file under a number of this process."""
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, self._fds.start)
        finally:
            os.close(fd)

    def _is_lock(self, fd: int) -> bool:
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return False
        return path.startswith(f"{self._drive.root}/") and path.endswith("/lock")
