"""A process that ends with its parent: a daemon that is killed must not leave children that hold locks and sockets from
its successor.

The child asks for it itself. Between fork and exec (``preexec_fn``) would be the usual place, but then it has to be a
real fork, and gRPC's handlers for forks wait, in a process that uses gRPC, now and then for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping
from typing import Final

_VARIABLE: Final = "KVSTORE_ENDS_WITH"
_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


def tied(environ: Mapping[str, str], number: signal.Signals) -> dict[str, str]:
    """The environment of a child that gets this signal when the calling thread's process ends."""
    return {**environ, _VARIABLE: f"{number:d}:{os.getpid()}"}


def obey() -> None:
    """In the child, first of all. Its own children are not meant."""
    number, _, parent = os.environ.pop(_VARIABLE, "").partition(":")
    if number.isdigit() and parent.isdigit():
        _libc.prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != int(parent):  # it has ended before we asked
            os.kill(os.getpid(), int(number))
