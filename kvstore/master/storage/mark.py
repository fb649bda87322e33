"""The file ``SYNCED`` beside the database: how far it was last synced; and the lock on it.

It is written after flushes, in place, and seldom synced itself: after a power cut it may tell of an earlier moment,
which only makes it ask for less. `kvstore.master.storage.wal` compares it with what is there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import zlib
from pathlib import Path
from typing import Final

from kvstore.core.errors import Unavailable
from kvstore.core.limits import KIB, MIB
from kvstore.master.storage.wal import Synced

log = logging.getLogger(__name__)

NAME: Final = "SYNCED"
SYNC_EVERY_BYTES: Final = 8 * MIB
"""Of the logs: what was written behind the last mark that survived is checked byte by byte, at 10 MB/s."""
_MAX_BYTES: Final = 64 * KIB


class Mark:
    """Held, with the database, by one process. Raises Unavailable when another one has it, OSError when the file can be
    neither opened nor made."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._manifest = ("", 0)
        self._marked_bytes = 0
        self._fd = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise Unavailable(
                f"the data directory {directory} is in use: does another master run there? Stop it, or choose another "
                "directory with --data"
            ) from None

    def read(self) -> Synced:
        """What was written last; nothing when that makes no sense."""
        data = os.pread(self._fd, _MAX_BYTES, 0)
        if not data:
            return Synced()
        try:
            return _decoded(data)
        except ValueError:
            log.warning("%s is damaged, so the logs are checked without it", NAME)
            return Synced()

    def write(self, synced: Synced) -> None:
        """Raises OSError. The manifest is synced here when it grew: a thread of RocksDB may still be at it."""
        if synced.manifest != self._manifest:
            _sync(self._directory / synced.manifest[0])
            self._manifest = synced.manifest
        os.pwrite(self._fd, _encoded(synced), 0)
        total = sum(synced.logs.values())
        if not 0 <= total - self._marked_bytes < SYNC_EVERY_BYTES:
            os.fdatasync(self._fd)
            self._marked_bytes = total

    def close(self) -> None:
        """What is written later fails: the number of the descriptor may be somebody else's by then."""
        fd, self._fd = self._fd, -1
        os.close(fd)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _encoded(synced: Synced) -> bytes:
    """A line with the checksum and the length of the rest; the sequence; the manifest and its size; a line a log."""
    files = "".join(f"{name} {size}\n" for name, size in (synced.manifest, *synced.logs.items()))
    body = f"{synced.sequence}\n{files}".encode()
    return b"%08x %d\n" % (zlib.crc32(body), len(body)) + body


def _decoded(data: bytes) -> Synced:
    """Raises ValueError. Behind the text there may be the end of a longer one."""
    head, _, body = data.partition(b"\n")
    checksum, length = head.split()
    body = body[: int(length)]
    if zlib.crc32(body) != int(checksum, 16):
        raise ValueError
    sequence, *files = body.decode().splitlines()
    manifest, *logs = [(name, int(size)) for name, size in (line.split() for line in files)]
    return Synced(int(sequence), dict(logs), manifest)
