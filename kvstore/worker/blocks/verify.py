"""Blocks are what their names say, or they are not served (rules 1 and 6)."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Final

from kvstore.core.errors import Corrupt, NotFound
from kvstore.core.types import BlockId
from kvstore.filehash import hash_file
from kvstore.pagecache import Residency
from kvstore.runtime import Runtime
from kvstore.worker.background import Background
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.blocks.store import Store
from kvstore.worker.volumes.disk import FULL_ERRNOS, Disk, NotAFile, Stamp

log = logging.getLogger(__name__)

FILE_ERRNOS: Final = (errno.EACCES, errno.EPERM, errno.EBADMSG, errno.ENODATA)
"""What open and read say when they will not give this file's bytes (permissions, a checksum of the file system, a bad
sector) and the rest of the drive is as good as it was.
"""


class Damaged(Exception):
    """A block is not what its name says; the text says why."""


class Verifier:
    """Verifies a block once after a start, and again when its file changed or its pages were dropped from memory; once
    for all who wait.
    """

    def __init__(self, runtime: Runtime, store: Store, disk: Disk, background: Background) -> None:
        self._runtime, self._store, self._disk, self._background = runtime, store, disk, background
        self._residency = Residency()
        self._running: dict[BlockId, asyncio.Task[None]] = {}

    def is_good(self, block: Block, fd: int) -> bool:
        """Whether this open of the block may be handed out as it is: about 3 µs, no thread."""
        return self.is_same(block, fd) and self._residency.is_whole(fd, block.address.length_bytes)

    def is_same(self, block: Block, fd: int) -> bool:
        """Whether this is the file that was hashed, as it was then. False for one that cannot be asked."""
        try:
            return block.stamp is not None and self._disk.fstat(fd).stamp == block.stamp
        except OSError:
            return False

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for a block that is being read."""
        return bool(self._running)

    async def verify(self, block: Block) -> None:
        """Read and hash the block. Raises Corrupt when it is not what its name says (it is then in quarantine),
        or what reading it raised.
        """
        running = self._running.get(block.id)
        if running is None:
            running = self._running[block.id] = self._background.spawn(self._verify(block))
            running.add_done_callback(lambda _: self._running.pop(block.id, None))
        await asyncio.shield(running)

    async def _verify(self, block: Block) -> None:
        path = block.path
        try:
            stamp = await self._hashed(block)
        except Damaged as damage:
            await self._quarantine(block, str(damage))
            raise Corrupt(f"{block.address}: {damage}; it is in quarantine now") from None
        except FileNotFoundError as error:
            if block.path != path:  # it moved to another volume just now
                await self._verify(block)
                return
            self.vanished(block)
            raise gone(block, error) from None
        except OSError as error:
            raise self._store.explain(block.volume, error, f"reading {block.address}") from None
        if block.path == path:
            block.stamp = stamp

    async def _hashed(self, block: Block) -> Stamp:
        """The file's stamp from before it was read, so that a change while it is read shows.

        Raises Damaged, OSError.
        """
        try:
            fd = await self._runtime.in_thread(self._disk.open_read, block.path)
            try:
                return await self._hashed_fd(block, fd)
            finally:
                self._disk.close(fd)
        except NotAFile:
            raise Damaged("something that is no regular file lies in its place") from None
        except OSError as error:
            if error.errno not in FILE_ERRNOS:
                raise
            raise Damaged(f"it cannot be read ({error.strerror})") from None

    async def _hashed_fd(self, block: Block, fd: int) -> Stamp:
        address, state = block.address, self._disk.fstat(fd)
        if state.size_bytes != address.length_bytes:
            raise Damaged(f"it has {state.size_bytes} bytes instead of {address.length_bytes}")
        if await hash_file(self._runtime, fd, address.length_bytes, self._disk.read_into) != address.hash:
            raise Damaged("its bytes differ from its hash")
        return state.stamp

    def vanished(self, block: Block) -> None:
        """Somebody removed the file; the books had it."""
        if self._store.get(block.id) is block and not block.leaving:
            log.warning("%s is gone from its volume", block.path)
            self._store.forget(block)
            block.volume.books.free_block(block.used_bytes)

    async def _quarantine(self, block: Block, why: str) -> None:
        volume, name = block.volume, block.address.file_name
        if self._store.get(block.id) is not block or block.leaving:
            return
        log.error("%s is corrupt: %s; moved to quarantine", block.path, why)
        self._store.counters.corruptions += 1
        self._store.forget(block)
        try:
            replaced_bytes = await self._runtime.in_thread(volume.set_aside, block.path, name)
            quarantine = await self._runtime.in_thread(volume.trim_quarantine)
        except FileNotFoundError:
            volume.books.free_block(block.used_bytes)  # somebody was faster
            return
        except OSError as error:
            self._store.explain(volume, error, "moving a corrupt block to quarantine")
            if error.errno in FULL_ERRNOS:
                await self._unlink(block)
            return
        volume.books.blocks -= block.used_bytes
        volume.books.quarantine = quarantine.kept_bytes
        left = quarantine.unlinked + ((replaced_bytes,) if replaced_bytes else ())
        self._store.counters.tiers[volume.tier].unlink_all(Reason.CORRUPT, left)
        self._store.on_free()

    async def _unlink(self, block: Block) -> None:
        """There is no room to keep it. It must not stay either: nobody but the next start would find it."""
        volume = block.volume
        try:
            await self._runtime.in_thread(self._disk.unlink, block.path)
        except OSError as error:
            self._store.explain(volume, error, "unlinking a corrupt block")
            return
        volume.books.free_block(block.used_bytes)
        self._store.counters.tiers[volume.tier].unlink_all(Reason.CORRUPT, (block.used_bytes,))
        self._store.on_free()


def gone(block: Block, error: OSError) -> NotFound:
    """What a reader is told when the file of a block is not there."""
    return NotFound(f"{block.path}: {error.strerror}", reason="no_replica")
