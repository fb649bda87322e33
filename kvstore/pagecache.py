"""Whether bytes of a file lie in memory.

cachestat(2), Linux 6.5 and later, costs 0.7 µs for a file of any size. Where it is missing or forbidden (seccomp),
mincore(2) on a mapping says the same for more; where that fails too the answer is no.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import Final

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
    try:
        # Private and writable, because ctypes takes the address of writable memory only; nothing is read or written.
        mapped = mmap.mmap(fd, length_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError):
        return False
    pages = -(-length_bytes // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    first = ctypes.c_char.from_buffer(mapped)
    try:
        failed = _mincore(ctypes.addressof(first), length_bytes, ctypes.addressof(vector))
    finally:
        del first
        mapped.close()
    return not failed and all(page & 1 for page in bytes(vector))
