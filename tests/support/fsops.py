"""Operations on files as data: ``call(pwrite, 3, 100, Bytes(1, 10))``.

A `Call` is made and logged by the test and carried out by a child process (`tests.support.actor`) on a `Side`: a mount,
or a plain directory. Paths are relative to the side's root; open files have numbers that the test chose.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import fcntl
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec

P = ParamSpec("P")
OLD_NS: Final = 1_000_000_000 * 10**9
"""Times before it (2001) were set by somebody; later ones are the clock's, and differ between any two files."""
PAGE_BYTES: Final = 4096
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PROT_READ, _PROT_WRITE, _MAP_SHARED, _MAP_PRIVATE, _MS_SYNC = 1, 2, 1, 2, 4
_AT_CWD: Final = -100


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Content by its seed: two seeds never look alike, and a log of calls stays readable."""

    seed: int
    size: int

    @property
    def value(self) -> bytes:
        return random.Random(self.seed).randbytes(self.size)


class Failed(NamedTuple):
    """The answer of a call that raised: the errno's name, or the class of what is no OSError."""

    error: str


class Attributes(NamedTuple):
    """What stat says, as far as it can be compared. Of a directory neither size nor links are."""

    kind: str
    permissions: int
    uid: int
    gid: int
    size: int | None
    links: int | None
    mtime_ns: int | None
    """None unless somebody set it (`OLD_NS`)."""


class Map:
    """mmap(2) itself: Python's own keeps a duplicate of the descriptor, and the close of that is a flush."""

    def __init__(self, fd: int, size: int, *, offset: int = 0, shared: bool = True, writable: bool = False) -> None:
        os.fstat(fd)  # as everybody does to learn the size: mmap alone does not make the kernel ask for it
        protection = _PROT_READ | (_PROT_WRITE if writable else 0)
        address = _libc.mmap(None, size, protection, _MAP_SHARED if shared else _MAP_PRIVATE, fd, offset)
        if address == ctypes.c_void_p(-1).value:
            raise _last_error()
        self._address, self._size = address, size

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        return ctypes.string_at(self._address + offset, self._size - offset if size is None else size)

    def write(self, offset: int, data: bytes) -> None:
        assert offset + len(data) <= self._size
        ctypes.memmove(self._address + offset, data, len(data))

    def sync(self) -> None:
        if _libc.msync(self._address, self._size, _MS_SYNC) != 0:
            raise _last_error()

    def protect(self, protection: int) -> int:
        """mprotect(2); its errno, 0 when it is done."""
        return ctypes.get_errno() if _libc.mprotect(self._address, self._size, protection) else 0

    def close(self) -> None:
        _libc.munmap(self._address, self._size)


@dataclasses.dataclass
class Side:
    """One of the file systems that an actor works on."""

    root: Path
    fds: dict[int, int] = dataclasses.field(default_factory=dict)
    scans: dict[int, int] = dataclasses.field(default_factory=dict)


class Call(NamedTuple):
    """Made by `call`, which checks the arguments' types."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"{self.function.__name__}({', '.join(map(repr, self.args))})"

    def on(self, side: Side) -> Any:
        """Carry it out. Returns its answer, `Failed` for an error."""
        try:
            return self.function(side, *self.args)
        except OSError as error:
            return Failed(errno.errorcode.get(error.errno or 0, str(error)))
        except (ValueError, OverflowError) as error:
            return Failed(type(error).__name__)


def call(function: Callable[Concatenate[Side, P], Any], /, *args: P.args, **_: P.kwargs) -> Call:
    return Call(function, args)


def at(side: Side, path: str) -> str:
    """Not by pathlib, which takes dots and slashes away."""
    return os.path.join(side.root, path)


# ---- the calls: descriptors ----


def open_file(side: Side, handle: int, path: str, flags: int, mode: int = 0o644) -> None:
    side.fds[handle] = os.open(at(side, path), flags | os.O_CLOEXEC, mode)


def close(side: Side, handle: int) -> None:
    os.close(side.fds.pop(handle))


def dup(side: Side, handle: int, new: int) -> None:
    side.fds[new] = os.dup(side.fds[handle])


def read(side: Side, handle: int, size: int) -> bytes:
    return os.read(side.fds[handle], size)


def pread(side: Side, handle: int, offset: int, size: int) -> bytes:
    return os.pread(side.fds[handle], size, offset)


def write(side: Side, handle: int, data: Bytes) -> int:
    return os.write(side.fds[handle], data.value)


def pwrite(side: Side, handle: int, offset: int, data: Bytes) -> int:
    return os.pwrite(side.fds[handle], data.value, offset)


def seek(side: Side, handle: int, offset: int, whence: int) -> int:
    return os.lseek(side.fds[handle], offset, whence)


def seek_as_if_all_were_data(side: Side, handle: int, offset: int, whence: int) -> int:
    """What SEEK_DATA and SEEK_HOLE answer where nobody knows of holes."""
    fd = side.fds[handle]
    size = os.fstat(fd).st_size
    if offset >= size or offset < 0:
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
    return os.lseek(fd, offset if whence == os.SEEK_DATA else size, os.SEEK_SET)


def truncate_open(side: Side, handle: int, size: int) -> None:
    os.ftruncate(side.fds[handle], size)


def sync(side: Side, handle: int, data_only: bool) -> None:
    (os.fdatasync if data_only else os.fsync)(side.fds[handle])


def stat_open(side: Side, handle: int) -> Attributes:
    return _attributes(os.fstat(side.fds[handle]))


def chmod_open(side: Side, handle: int, mode: int) -> None:
    os.fchmod(side.fds[handle], mode)


def set_times_open(side: Side, handle: int, mtime_ns: int) -> None:
    os.utime(side.fds[handle], ns=(mtime_ns, mtime_ns))


def read_map(side: Side, handle: int, offset: int, size: int, shared: bool) -> bytes:
    view = Map(side.fds[handle], size, offset=offset, shared=shared)
    try:
        return view.read()
    finally:
        view.close()


def write_map(side: Side, handle: int, offset: int, data: Bytes, shared: bool, synced: bool) -> bytes:
    """Store `data` at `offset` through a map of whole pages; what the map shows then."""
    start = offset - offset % PAGE_BYTES
    view = Map(side.fds[handle], offset + data.size - start, offset=start, shared=shared, writable=True)
    try:
        view.write(offset - start, data.value)
        if synced:
            view.sync()
        return view.read()
    finally:
        view.close()


def copy_range(side: Side, source: int, source_offset: int, target: int, target_offset: int, size: int) -> int:
    return os.copy_file_range(side.fds[source], side.fds[target], size, source_offset, target_offset)


def send_file(side: Side, target: int, source: int, offset: int, size: int) -> int:
    return os.sendfile(side.fds[target], side.fds[source], offset, size)


def flock(side: Side, handle: int, operation: int) -> None:
    fcntl.flock(side.fds[handle], operation | fcntl.LOCK_NB)


def lock_range(side: Side, handle: int, operation: int, start: int, length: int) -> None:
    patient = operation == fcntl.LOCK_UN
    fcntl.lockf(side.fds[handle], operation if patient else operation | fcntl.LOCK_NB, length, start)


# ---- the calls: names ----


def stat_path(side: Side, path: str) -> Attributes:
    return _attributes(os.lstat(at(side, path)))


def read_file(side: Side, path: str) -> bytes:
    return Path(at(side, path)).read_bytes()


def truncate(side: Side, path: str, size: int) -> None:
    os.truncate(at(side, path), size)


def chmod(side: Side, path: str, mode: int) -> None:
    os.chmod(at(side, path), mode)


def set_times(side: Side, path: str, mtime_ns: int) -> None:
    os.utime(at(side, path), ns=(mtime_ns, mtime_ns))


def rename(side: Side, source: str, target: str, flags: int = 0) -> None:
    source_bytes, target_bytes = os.fsencode(at(side, source)), os.fsencode(at(side, target))
    if _libc.renameat2(_AT_CWD, source_bytes, _AT_CWD, target_bytes, flags) != 0:
        raise _last_error()


def unlink(side: Side, path: str) -> None:
    os.unlink(at(side, path))


def make_directory(side: Side, path: str) -> None:
    os.mkdir(at(side, path))


def remove_directory(side: Side, path: str) -> None:
    os.rmdir(at(side, path))


def remove_tree(side: Side) -> None:
    """All that is there, and the root."""
    shutil.rmtree(side.root)


def names_in(side: Side, path: str) -> list[str]:
    return sorted(os.listdir(at(side, path)))


def begin_scan(side: Side, scan: int, path: str) -> None:
    side.scans[scan] = os.open(at(side, path), os.O_RDONLY | os.O_DIRECTORY)


def scan_on(side: Side, scan: int, buffer_bytes: int) -> list[str]:
    """The next few names (one getdents call); none at the end."""
    buffer = ctypes.create_string_buffer(buffer_bytes)
    filled = _libc.getdents64(side.scans[scan], buffer, buffer_bytes)
    if filled < 0:
        raise _last_error()
    names, at = [], 0
    while at < filled:
        length = int.from_bytes(buffer.raw[at + 16 : at + 18], "little")  # after d_ino and d_off
        names.append(os.fsdecode(buffer.raw[at + 19 : at + length].split(b"\0", 1)[0]))
        at += length
    return [name for name in names if name not in (".", "..")] or (
        [] if filled == 0 else scan_on(side, scan, buffer_bytes)
    )


def end_scan(side: Side, scan: int) -> None:
    os.close(side.scans.pop(scan))


# ---- the calls: what is refused on the mount ----


def hard_link(side: Side, source: str, target: str) -> None:
    os.link(at(side, source), at(side, target))


def symbolic_link(side: Side, target: str, path: str) -> None:
    os.symlink(target, at(side, path))


def make_fifo(side: Side, path: str) -> None:
    os.mkfifo(at(side, path))


def set_attribute(side: Side, path: str, name: str) -> None:
    os.setxattr(at(side, path), name, b"1")


def get_attribute(side: Side, path: str, name: str) -> bytes:
    return os.getxattr(at(side, path), name)


def unnamed(side: Side, path: str) -> None:
    os.close(os.open(at(side, path), os.O_TMPFILE | os.O_RDWR))


def enter(side: Side, root: Path) -> None:
    """Close whatever is open, and work below `root` from now on."""
    for fd in (*side.fds.values(), *side.scans.values()):
        os.close(fd)
    side.fds.clear()
    side.scans.clear()
    side.root = root


def _attributes(found: os.stat_result) -> Attributes:
    directory = stat.S_ISDIR(found.st_mode)
    return Attributes(
        "directory" if directory else "file" if stat.S_ISREG(found.st_mode) else "other",
        stat.S_IMODE(found.st_mode),
        found.st_uid,
        found.st_gid,
        None if directory else found.st_size,
        None if directory else found.st_nlink,
        found.st_mtime_ns if found.st_mtime_ns < OLD_NS else None,
    )


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
