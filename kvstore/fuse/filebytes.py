"""Bytes of one fd into another, into a hash, or gone: what blocks. Raises OSError."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Final

from kvstore.core.errors import NoSpace, Stale
from kvstore.core.hashing import BlockHasher
from kvstore.core.limits import GIB
from kvstore.filecut import is_cut
from kvstore.filehash import hash_file
from kvstore.fuse.threads import on_fd
from kvstore.runtime import Runtime

_COPY_BYTES: Final = 1 * GIB


async def hash_of(runtime: Runtime, fd: int, size_bytes: int) -> int:
    """On a duplicate that lives as long as the threads do, whoever gives up waiting."""
    own = os.dup(fd)
    hashing = asyncio.ensure_future(hash_file(runtime, own, size_bytes))
    hashing.add_done_callback(lambda _: os.close(own))
    return await asyncio.shield(hashing)


async def copied(runtime: Runtime, source: int, target: int, size_bytes: int) -> None:
    """The first bytes of one file to the start of another, in a thread.

    Raises Stale when there are fewer, NoSpace when the worker has cut the source: whatever was copied then is void.
    """
    try:
        await on_fd(runtime, source, _copy_start, target, size_bytes)
    finally:
        check_whole(source)


def check_whole(fd: int) -> None:
    """Raises NoSpace when the file was cut (`filecut`)."""
    if is_cut(fd):
        raise NoSpace(
            "the file grew beyond the room that its worker has, and was emptied; write it again when there is room "
            "(kvstore report shows what is used)"
        )


def empty(fd: int) -> None:
    """Truncate it to 0, unless it is empty: what is written to a file that was truncated at 0, ext4 puts on the disk as
    soon as the file is closed, and the next sync of anybody's log waits for that (14 MiB: 3 ms, 32 MiB: 10 ms).
    """
    if os.fstat(fd).st_size:
        os.ftruncate(fd, 0)


def write_all(fd: int, offset: int, data: bytes, hasher: BlockHasher | None) -> None:
    written = os.pwrite(fd, data, offset)
    while written < len(data):
        written += os.pwrite(fd, memoryview(data)[written:], offset + written)
    if hasher is not None:
        hasher.update(data)


def _copy_start(source: int, target: int, size_bytes: int) -> None:
    """The first bytes of one file to the start of another: shared extents where the file system has them, else in the
    kernel.
    """
    at = 0
    while at < size_bytes:
        count = _copy_some(source, target, at, min(size_bytes - at, _COPY_BYTES))
        if count == 0:
            raise Stale("the file is shorter than it was")
        at += count


def _copy_some(source: int, target: int, at: int, size_bytes: int) -> int:
    try:
        return os.copy_file_range(source, target, size_bytes, at, at)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    os.lseek(target, at, os.SEEK_SET)
    return os.sendfile(target, source, at, size_bytes)
