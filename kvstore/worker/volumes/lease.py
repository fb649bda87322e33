"""Leases: how the kernel says that nobody else can write (rule 5) or that nobody else holds a file (rule 8).

A conflicting open is told to the process that holds the lease, by SIGIO unless it asks for another signal, and the
default of SIGIO is to kill. They work for the file's owner or with CAP_LEASE, and not on every file system: where they
are unsupported nothing is ever taken for free.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import signal
from typing import Final

BROKEN: Final = signal.SIGURG
"""In place of SIGIO: ignored by default. Nobody here waits for it, a lease is held for microseconds."""


class Holders(enum.Enum):
    """What a probe found out about *other* open file descriptions of the file."""

    NONE = enum.auto()
    SOME = enum.auto()
    UNKNOWN = enum.auto()
    """Leases do not work here."""


def writers(fd: int) -> Holders:
    """Whether somebody can still write the file behind a fresh read-only fd: open for writing, or mapped shared."""
    return _probe(fd, fcntl.F_RDLCK)


def holders(fd: int) -> Holders:
    """Whether somebody besides this private, never sent read-only fd has the file open or mapped.

    It is blind to duplicates of this very fd, hence private (tried on 6.18).
    """
    return _probe(fd, fcntl.F_WRLCK)


def _probe(fd: int, kind: int) -> Holders:
    """Take the lease and drop it at once: while it is held, an open by anybody would wait for us."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, BROKEN)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)
    except OSError as error:
        return Holders.SOME if error.errno == errno.EAGAIN else Holders.UNKNOWN
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return Holders.NONE
