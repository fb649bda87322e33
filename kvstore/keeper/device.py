"""/dev/fuse and the mount on it: the system calls, without a policy."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from typing import Final

from kvstore.keeper import mountinfo

DEVICE: Final = "/dev/fuse"
SOURCE: Final = "kvstore"
MAX_MESSAGE_BYTES: Final = (1 << 20) + (64 << 10)
"""A WRITE or READ of 1 MiB, and its heads."""

_BACKING_OPEN: Final = 0x4010E501
_BACKING_CLOSE: Final = 0x4004E502
_BACKING_MAP: Final = struct.Struct("<iIQ")
"""fd, flags, padding."""
_MS_NOSUID: Final = 2
_MS_NODEV: Final = 4
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8
_ENDED: Final = frozenset({errno.ENODEV, errno.ECONNABORTED, errno.ENOTCONN})

_libc = ctypes.CDLL(None, use_errno=True)


class Unmounted(Exception):
    """The connection is over: unmounted, or aborted."""


class Device:
    """An open, non-blocking /dev/fuse: one mount on `directory` (absolute). Raises OSError when it cannot be opened."""

    def __init__(self, directory: str) -> None:
        self._fd = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._directory = directory
        self.connection = -1
        """The kernel's number of it, from `mount` on."""

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Aborts the connection if it is still mounted."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def mount(self, *, allow_other: bool) -> None:
        """Raises OSError: EPERM without CAP_SYS_ADMIN, ENOENT, ENOTDIR, ELOOP."""
        if os.path.islink(self._directory):  # the mount would stand under another name
            raise self._error(errno.ELOOP)
        options = f"fd={self._fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
        options += ",allow_other,default_permissions" if allow_other else ",default_permissions"
        arguments = SOURCE.encode(), os.fsencode(self._directory), mountinfo.FS_TYPE.encode()
        if _libc.mount(*arguments, ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), options.encode()):
            raise self._error(ctypes.get_errno())
        there = mountinfo.find(self._directory)
        if there is None:  # unmounted by somebody in this moment
            raise self._error(errno.ENOENT)
        self.connection = there.minor

    def unmount(self, *, lazy: bool) -> None:
        """Raises OSError, EBUSY above all. Lazy: the name is free at once, the mount ends with its last user. Nothing
        happens when it is not mounted (any more).
        """
        there = mountinfo.find(self._directory)
        if there is None or self.connection < 0:
            return
        if there.minor != self.connection:  # somebody mounted something over it
            raise self._error(errno.EBUSY)
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        if _libc.umount2(os.fsencode(self._directory), flags):
            raise self._error(ctypes.get_errno())

    def _error(self, code: int) -> OSError:
        return OSError(code, os.strerror(code), self._directory)

    def read_into(self, buffer: bytearray) -> int:
        """The next request's length. Raises BlockingIOError when there is none, Unmounted."""
        while True:
            try:
                return os.readv(self._fd, [buffer])
            except OSError as error:
                if error.errno in _ENDED:
                    raise Unmounted from error
                if error.errno != errno.ENOENT:  # ENOENT: its caller was killed while we read it
                    raise

    def write(self, message: bytes | memoryview) -> int:
        """The errno of the kernel, 0 for success; ENOENT: nobody waits for this reply."""
        try:
            os.write(self._fd, message)
        except OSError as error:
            return errno.ENOENT if error.errno in _ENDED else error.errno or errno.EIO
        return 0

    def backing_open(self, fd: int) -> int:
        """Register a file for passthrough; its id, above 0. Raises OSError: EPERM without CAP_SYS_ADMIN or where
        passthrough was not negotiated, ELOOP on a stacked file system, EINVAL for what is no regular file.
        """
        return int(fcntl.ioctl(self._fd, _BACKING_OPEN, bytearray(_BACKING_MAP.pack(fd, 0, 0)), True))

    def backing_close(self, id: int) -> None:
        """Open handles keep their file. Raises OSError: ENOENT for an unknown id."""
        fcntl.ioctl(self._fd, _BACKING_CLOSE, struct.pack("<I", id))
