"""Which bytes of a file lie in memory, and how to read without changing that.

cachestat(2), Linux 6.5 and later, costs 0.7 µs for a file of any size. Where it is missing or forbidden (seccomp),
mincore(2) on a mapping says the same for more; where that fails too the answer is no.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

_SYS_CACHESTAT: Final = 451  # the same number on every architecture
_NOT_HERE: Final = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)
_libc = ctypes.CDLL(None, use_errno=True)
_mincore = _libc.mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


class Residency:
    """Asks the kernel, one question at a time: its two structures are used again.

    `is_known` turns False when the kernel does not say.
    """

    def __init__(self) -> None:
        self._syscall = _libc.syscall
        self._range, self._stat = _Range(), _Stat()
        self._arguments = (ctypes.byref(self._range), ctypes.byref(self._stat))
        self.is_known = True

    def is_resident(self, fd: int, offset: int, size_bytes: int) -> bool:
        """Whether all of it is in the page cache: then touching it waits for no disk. False when nobody knows."""
        if not self.is_known:
            return False
        self._range.offset, self._range.length = offset, size_bytes
        if self._syscall(_SYS_CACHESTAT, fd, *self._arguments, 0) != 0:
            self.is_known = ctypes.get_errno() not in _NOT_HERE
            return False
        first, last = offset // mmap.PAGESIZE, (offset + size_bytes - 1) // mmap.PAGESIZE
        return int(self._stat.cache) >= last - first + 1

    def is_whole(self, fd: int, length_bytes: int) -> bool:
        """The same for a file of this length, in the dearer way too."""
        is_resident = self.is_resident(fd, 0, length_bytes)
        return is_resident if self.is_known else all_in_core(fd, length_bytes)


def all_in_core(fd: int, length_bytes: int) -> bool:
    """By mincore(2)."""
    pages = pages_in_core(fd, 0, length_bytes)
    return bool(pages) and all(pages)


class Run(NamedTuple):
    """Neighbouring pages of a file."""

    offset: int
    size_bytes: int


def absent_runs(fd: int, offset: int, size_bytes: int) -> list[Run]:
    """What of a part of a file is not in memory; `offset` is a multiple of the page. Nothing when nobody knows."""
    return list(_absent(pages_in_core(fd, offset, size_bytes), offset))


def drop(fd: int, runs: list[Run]) -> None:
    """Out of memory again with what was read meanwhile; the kernel keeps what is dirty, mapped or being read."""
    for run in runs:
        with suppress(OSError):
            os.posix_fadvise(fd, *run, os.POSIX_FADV_DONTNEED)


def read_no_further(fd: int) -> None:
    """No read-ahead behind what this open reads."""
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def _absent(pages: list[bool], offset: int) -> Iterator[Run]:
    start = None
    for index, is_here in enumerate([*pages, True]):
        if not is_here and start is None:
            start = index
        elif is_here and start is not None:
            yield Run(offset + start * mmap.PAGESIZE, (index - start) * mmap.PAGESIZE)
            start = None


def pages_in_core(fd: int, offset: int, size_bytes: int) -> list[bool]:
    """For each page of a part of a file whether it is in memory, by mincore(2); empty when nobody knows."""
    try:
        # Private and writable, because ctypes takes the address of writable memory only; nothing is read or written.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=access, offset=offset)
    except (OSError, ValueError):
        return []
    pages = -(-size_bytes // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    first = ctypes.c_char.from_buffer(mapped)
    try:
        failed = _mincore(ctypes.addressof(first), size_bytes, ctypes.addressof(vector))
    finally:
        del first
        mapped.close()
    return [] if failed else [bool(page & 1) for page in bytes(vector)]
