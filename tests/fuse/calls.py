"""System calls and what they should answer."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

NOREPLACE, EXCHANGE = 1, 2


def error_of(function: Callable[..., object], *args: object) -> str:
    """The name of the error that the call ends with, "ok" without one."""
    try:
        function(*args)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "?")
    return "ok"


def expect(code: int, function: Callable[..., object], *args: object) -> None:
    assert error_of(function, *args) == errno.errorcode[code]


def rename_with(flags: int, source: Path, target: Path) -> None:
    """renameat2(2), for which Python has no name."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd = -100
    if libc.renameat2(at_cwd, os.fsencode(source), at_cwd, os.fsencode(target), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
