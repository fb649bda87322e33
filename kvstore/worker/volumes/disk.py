"""The operating system as the worker sees it: one method a system call, all of them blocking.

The seam for fault injection: tests subclass `Disk` and fail the Nth call. Everything raises OSError;
`errors.disk_error` maps it. Files are opened afresh each time (rule 8: whoever holds an open file description holds
the bytes) and close on exec.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.core.errors import Corrupt, KvError, NoSpace, Overloaded, Unavailable

PAGE_BYTES = 4096
_COPY_UNSUPPORTED = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
_COPY_BYTES = 1 << 20
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.ENODEV)
"""What open says to links, sockets and devices; of a regular file the last two mean that its drive is gone."""
FATAL_ERRNOS = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EUCLEAN, errno.ESHUTDOWN)
"""After one of these a drive is not trusted any more: its volume goes out of service."""
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""The disk's other users have filled it: nothing is wrong with the drive."""
SHORT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What lacks to this process, and says nothing of the drive."""


class NotAFile(OSError):
    """A pipe, socket, device, directory or link lies where a file belongs."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "not a regular file", path)


class Stamp(NamedTuple):
    """What changes when a file is written to, or another one takes its place.

    The kernel sets the ctime, nobody else can. From Linux 6.13 on it moves with every change that somebody could have
    missed; before, a change within the same tick (4 ms) as the stamp hides.
    """

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


class FileState(NamedTuple):
    size_bytes: int
    allocated_bytes: int
    mtime_ns: int
    stamp: Stamp

    def is_same_file(self, other: FileState) -> bool:
        return self.stamp[:2] == other.stamp[:2]

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
        """Raises NotAFile for what is none; never waits for the other end of a pipe."""
        try:
            fd = os.open(path, _READ | os.O_NONBLOCK)
        except BlockingIOError:
            # A probe (`lease`) has the file for some µs: only a regular file has leases, and this waits it out.
            fd = os.open(path, _READ)
        except OSError as error:
            if error.errno in _NO_FILE and not stat.S_ISREG(os.lstat(path).st_mode):
                raise NotAFile(path) from None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotAFile(path)
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)  # with O_NONBLOCK io_uring would answer its receiver with EAGAIN
        return fd

    def create(self, path: str) -> int:
        """A new file, open for reading and writing. Mode 0600: nobody but its receiver gets at it."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def create_unnamed(self, path: str) -> int:
        """An empty file without a name, open for reading, where `path` would lie. Where the file system knows only
        files with names, it has that one for a moment.
        """
        try:
            fd = os.open(os.path.dirname(path), os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            fd = self.create(path)
            os.unlink(path)
        try:
            return self.reopen_read(fd)
        finally:
            os.close(fd)

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

    def attribute(self, path: str, name: str) -> bytes | None:
        """An extended attribute; None when the file has none of this name."""
        try:
            return os.getxattr(path, name, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
            return None

    def set_attribute(self, path: str, name: str, value: bytes) -> None:
        os.setxattr(path, name, value, follow_symlinks=False)

    def replace_durably(self, path: str, data: bytes) -> None:
        """Put a small file in place of another: after a crash the old one or the new one is there."""
        temporary = f"{path}.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            try:
                self.write(fd, data, 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # on a full disk half a file would only be in the way
            raise
        self.sync_directory(os.path.dirname(path))

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _file_state(state: os.stat_result) -> FileState:
    size, mtime_ns = state.st_size, state.st_mtime_ns
    stamp = Stamp(state.st_dev, state.st_ino, size, mtime_ns, state.st_ctime_ns)
    return FileState(size, state.st_blocks * 512, mtime_ns, stamp)


def disk_error(error: OSError, where: str) -> KvError:
    """What a caller is told of a failed system call. Never NotFound: only readers know of a miss."""
    text = f"{where}: {error.strerror}"
    match error.errno:
        case number if number in FULL_ERRNOS:
            return NoSpace(f"{text}; the disk's other users filled it below the volume's capacity")
        case errno.EMFILE | errno.ENFILE | errno.ENOMEM:
            return Overloaded(f"{text}; raise the limit of open files of the worker")
        case errno.EIO:
            return Corrupt(text)
        case _:
            return Unavailable(text)
