"""Whether all pages of a file are in memory: what was verified stays so only as long as its pages do (rule 6).

cachestat(2) costs 0.7 µs for a file of any size. Where it is missing (before Linux 6.5) or forbidden (seccomp),
mincore(2) on a mapping says the same for more; where that fails too the answer is always no, and every open verifies.
"""

from __future__ import annotations

import ctypes
import errno
import mmap

_SYS_CACHESTAT = 451  # the same number on every architecture
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_mincore = _libc.mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


class Residency:
    """Asks the kernel in the cheapest way it allows; remembers what it does not allow."""

    def __init__(self) -> None:
        self._has_cachestat = True

    def is_resident(self, fd: int, length_bytes: int) -> bool:
        """Whether the first `length_bytes` of the file are all in memory. False when nobody can tell."""
        if self._has_cachestat:
            pages = self._cachestat(fd)
            if pages is not None:
                return pages * mmap.PAGESIZE >= length_bytes
        return _all_in_core(fd, length_bytes)

    def _cachestat(self, fd: int) -> int | None:
        """Pages of the whole file in the page cache; None when the kernel does not say."""
        whole, state = _Range(0, 0), _Stat()
        if _syscall(_SYS_CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(state), 0) == 0:
            return int(state.cache)
        if ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
            self._has_cachestat = False
        return None


def _all_in_core(fd: int, length_bytes: int) -> bool:
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
