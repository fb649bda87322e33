"""The mark of a staging file whose bytes were thrown away.

By passthrough a client writes without asking. Where that passes the cap of a volume its worker *cuts* the file:
truncates it to 0. Whoever wrote it may write on, and then it is a hole with bytes behind it. Nothing of that may ever
be published, whoever has the file open, and whether the worker that cut it can be asked or not. So the file itself says
it: by the sticky bit of its mode, which means nothing for a file, needs no permission but the owner's, and survives
restarts.

The mark comes before the truncation. So who has read bytes and finds no mark *afterwards* has read what was written.
"""

from __future__ import annotations

import os
import stat
from typing import Final

MARK: Final = stat.S_ISVTX


def cut(fd: int) -> None:
    """Mark the file behind a writable fd and empty it; one that was cut before is only emptied. Raises OSError: then
    it has all its bytes, or the mark.
    """
    status = os.fstat(fd)
    if not status.st_mode & MARK:
        os.fchmod(fd, stat.S_IMODE(status.st_mode) | MARK)
    if status.st_size or status.st_blocks:
        os.ftruncate(fd, 0)


def cut_path(path: str) -> None:
    """The same by name. Raises OSError; FileNotFoundError when it is gone."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        cut(fd)
    finally:
        os.close(fd)


def is_cut(fd: int) -> bool:
    return bool(os.fstat(fd).st_mode & MARK)


def is_cut_path(path: str) -> bool:
    """False when it is gone. Raises OSError."""
    try:
        return bool(os.stat(path, follow_symlinks=False).st_mode & MARK)
    except FileNotFoundError:
        return False
