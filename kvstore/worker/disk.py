"""The operating system as the worker sees it: one method a system call, all of them blocking.

The seam for fault injection: tests subclass `Disk` and fail the Nth call. Everything raises OSError;
`errors.disk_error` maps it. Files are opened afresh each time (rule 8: whoever holds an open file description holds
the bytes) and close on exec.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.core.errors import Corrupt, KvError, NoSpace, NotFound, Overloaded, Unavailable

PAGE_BYTES = 4096
_COPY_UNSUPPORTED = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
_COPY_BYTES = 1 << 20
FATAL_ERRNOS = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EUCLEAN, errno.ESHUTDOWN)
"""After one of these a drive is not trusted any more: its volume goes out of service."""


class FileState(NamedTuple):
    size_bytes: int
    allocated_bytes: int
    mtime_ns: int

    @property
    def used_bytes(self) -> int:
        """What counts against a cap: a sparse file by its size (it can be filled), a preallocated one by its blocks."""
        return max(disk_bytes(self.size_bytes), self.allocated_bytes)


def disk_bytes(length_bytes: int) -> int:
    """Bytes that a file of this length takes on a disk of 4 KiB blocks."""
    return -(-length_bytes // PAGE_BYTES) * PAGE_BYTES


class Disk:
    """The real one."""

    def open_read(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def create(self, path: str) -> int:
        """A new file, open for reading and writing. Mode 0600: nobody but its receiver gets at it."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def create_in_memory(self) -> int:
        """A file without a name whose bytes are memory of this process's cgroup."""
        return os.memfd_create("kvstore-scratch", os.MFD_CLOEXEC)

    def reopen_read(self, fd: int) -> int:
        """A fresh open of a file that has no name."""
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def make_directory(self, path: str) -> None:
        os.makedirs(path, mode=0o755, exist_ok=True)

    def free_bytes(self, path: str) -> int:
        """What the file system still gives to an ordinary process."""
        state = os.statvfs(path)
        return state.f_bavail * state.f_frsize

    def stat(self, path: str) -> FileState:
        return _file_state(os.stat(path, follow_symlinks=False))

    def fstat(self, fd: int) -> FileState:
        return _file_state(os.fstat(fd))

    def read(self, fd: int, size_bytes: int, offset: int) -> bytes:
        return os.pread(fd, size_bytes, offset)

    def read_into(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while len(view):
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def copy(self, source: int, target: int, length_bytes: int) -> int:
        """The first `length_bytes` of one file into another; a reflink where the file system has it.

        Returns the bytes copied: fewer when the source became shorter.
        """
        done = 0
        while done < length_bytes:
            count = self._copy_some(source, target, length_bytes - done, done)
            if count == 0:
                break
            done += count
        return done

    def _copy_some(self, source: int, target: int, count: int, offset: int) -> int:
        try:
            return os.copy_file_range(source, target, count, offset, offset)
        except OSError as error:
            if error.errno not in _COPY_UNSUPPORTED:
                raise
        data = os.pread(source, min(count, _COPY_BYTES), offset)
        self.write(target, data, offset)
        return len(data)

    def replace_durably(self, path: str, data: bytes) -> None:
        """Put a small file in place of another: after a crash the old one or the new one is there."""
        temporary = f"{path}.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self.write(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        self.sync_directory(os.path.dirname(path))

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _file_state(state: os.stat_result) -> FileState:
    return FileState(state.st_size, state.st_blocks * 512, state.st_mtime_ns)


def disk_error(error: OSError, where: str) -> KvError:
    """What a caller is told of a failed system call."""
    text = f"{where}: {error.strerror}"
    match error.errno:
        case errno.ENOENT:
            return NotFound(text, reason="no_replica")
        case errno.ENOSPC | errno.EDQUOT:
            return NoSpace(f"{text}; the disk's other users filled it below the volume's capacity")
        case errno.EMFILE | errno.ENFILE | errno.ENOMEM:
            return Overloaded(f"{text}; raise the limit of open files of the worker")
        case errno.EIO:
            return Corrupt(text)
        case _:
            return Unavailable(text)
