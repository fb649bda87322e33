"""Sealed files that are open: one fd and one map for all handles of an inode, and reads that never make the loop wait
for a disk.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
from dataclasses import dataclass
from typing import Final

from kvstore.client.blocks import AsyncBlocks
from kvstore.core.errors import Corrupt, KvError
from kvstore.core.limits import MIB
from kvstore.core.types import Entry
from kvstore.fuse.threads import on_fd
from kvstore.pagecache import Residency
from kvstore.runtime import Runtime

log = logging.getLogger(__name__)

MAX_READ_BYTES: Final = 1 * MIB
"""The kernel asks for no more at a time (max_pages 256)."""
_MADV_POPULATE_READ: Final = 22
_NOTHING: Final = memoryview(b"")
_WOULD_WAIT: Final = frozenset({errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL})


@dataclass(slots=True, eq=False)
class SealedFile:
    """One published inode with at least one open handle.

    `fd` is -1 for an empty file, `view` its bytes once they were read.

    Its content is its own until the last handle goes: an unlink, a replacement or an eviction elsewhere does not touch
    it.
    """

    entry: Entry
    fd: int = -1
    map: mmap.mmap | None = None
    view: memoryview = _NOTHING
    handles: int = 0
    removed: bool = False
    """The name went while it was open: it has no links any more."""

    @property
    def is_behind(self) -> bool:
        """Its handles were opened by a former process; whoever needs the bytes opens the block again."""
        return self.fd < 0 and self.entry.address is not None


class SealedFiles:
    """By inode number. Invariant: a file is here as long as `handles` > 0."""

    def __init__(self, blocks: AsyncBlocks, runtime: Runtime) -> None:
        self._blocks, self._runtime = blocks, runtime
        self._open: dict[int, SealedFile] = {}
        self._used: list[Entry] = []
        self._telling: asyncio.Task[None] | None = None
        self._residency = Residency()
        self._buffer = memoryview(bytearray(MAX_READ_BYTES))

    def get(self, inode: int) -> SealedFile | None:
        return self._open.get(inode)

    async def open(self, entry: Entry) -> SealedFile:
        """One more handle. Raises what AsyncBlocks raises for a block that is nowhere."""
        file = self._open.get(entry.inode)
        if file is None or file.is_behind:
            fd = await self.open_fd(entry)
            file = self.restore(entry)
            _settle(file, fd)
        else:
            self._touch(entry)
        file.handles += 1
        return file

    def restore(self, entry: Entry) -> SealedFile:
        """The file of an inode, without an fd as yet when it is new. Not counted as a handle."""
        return self._open.setdefault(entry.inode, SealedFile(entry))

    async def open_fd(self, entry: Entry) -> int:
        """A read-only fd of its block, -1 for an empty file."""
        return -1 if entry.address is None else await self._blocks.open(entry)

    def release(self, file: SealedFile) -> None:
        file.handles -= 1
        if file.handles == 0:
            if self._open.get(file.entry.inode) is file:
                del self._open[file.entry.inode]
            file.map, file.view = None, _NOTHING  # the map ends with its last slice
            if file.fd >= 0:
                os.close(file.fd)
                file.fd = -1

    def _touch(self, entry: Entry) -> None:
        """It was opened by the fd that is here: its worker is told, and nobody waits for that."""
        self._used.append(entry)
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        try:
            while self._used:
                used, self._used = self._used, []
                await self._blocks.touch(used)
        except KvError as error:
            log.debug("the worker was not told of opened files: %s", error.message)
        finally:
            self._used.clear()
            self._telling = None

    async def read(self, file: SealedFile, offset: int, size_bytes: int) -> bytes | memoryview:
        """What lies in memory is a slice of the map, which the kernel copies itself (2,500 MB/s; with a buffer in
        between 1,700).

        What does not is read in a thread: a fault on the loop would stall the whole mount.
        """
        size_bytes = min(size_bytes, file.entry.length_bytes - offset)
        if file.is_behind:
            _settle(file, await self.open_fd(file.entry))
        if file.fd < 0 or size_bytes <= 0:
            return b""
        if self._residency.is_resident(file.fd, offset, size_bytes):
            return self._mapped(file, offset, size_bytes)
        if not self._residency.is_known and size_bytes <= MAX_READ_BYTES:
            # The buffer is handed to the kernel before anybody else runs: pyfuse3 replies without an await in between.
            view = self._buffer[:size_bytes]
            if _read_resident(file.fd, view, offset) == size_bytes:
                return view
        return await on_fd(self._runtime, file.fd, os.pread, size_bytes, offset)

    def _mapped(self, file: SealedFile, offset: int, size_bytes: int) -> memoryview:
        if file.map is None:
            file.map = mmap.mmap(file.fd, file.entry.length_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            file.view = memoryview(file.map)
        # One call instead of a fault for every few pages; and if the drive fails just now, an error here, where a fault
        # in the middle of the reply would leave the request without any.
        start = offset - offset % mmap.PAGESIZE
        try:
            file.map.madvise(_MADV_POPULATE_READ, start, offset + size_bytes - start)
        except OSError as error:
            raise Corrupt(f"cannot read block {file.entry.address}: {error.strerror}") from None
        return file.view[offset : offset + size_bytes]


def _settle(file: SealedFile, fd: int) -> None:
    """Give it the fd; somebody else may have been quicker."""
    if file.is_behind:
        file.fd = fd
    elif fd >= 0:
        os.close(fd)


def _read_resident(fd: int, view: memoryview, offset: int) -> int:
    """Bytes read without waiting for the disk; fewer than asked for when the rest is not in memory."""
    try:
        return os.preadv(fd, [view], offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in _WOULD_WAIT:
            return 0
        raise
