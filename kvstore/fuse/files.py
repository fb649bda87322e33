"""Open files: create, open, read, write, flush, release. All inode numbers are the kernel's below the root, which are
the master's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyfuse3

from kvstore.core.errors import AlreadyExists, IsDirectory, KvError, Stale
from kvstore.core.types import Entry
from kvstore.fuse.backing import Backing
from kvstore.fuse.handles import HandleTable
from kvstore.fuse.inodes import Cached, Numbers
from kvstore.fuse.local import GRACE_S, HAND_SHAKE_S, LocalFiles
from kvstore.fuse.localfile import Key, LocalFile
from kvstore.fuse.publishing import Publisher
from kvstore.fuse.readopens import ReadOpens
from kvstore.fuse.saved import HandleRecord, Saved
from kvstore.fuse.sealed import SealedFile, SealedFiles
from kvstore.fuse.staging import StagingArea
from kvstore.fuse.tree import Tree
from kvstore.runtime import Runtime

log = logging.getLogger(__name__)

_ACCESS: Final = os.O_ACCMODE


@dataclass(slots=True, eq=False)
class Handle:
    """An open file: of a sealed inode, or of a local one (then `writes` says whether it may change it).

    `number` is the inode number that the kernel opened.
    """

    file: SealedFile | LocalFile
    number: int
    writes: bool = False


class Opened(NamedTuple):
    """What open answers beside the handle's number."""

    handle: int
    direct: bool = False
    keep_cache: bool = False
    passthrough: bool = False


class Files:
    """Handles and what stands behind them."""

    def __init__(
        self,
        tree: Tree,
        local: LocalFiles,
        sealed: SealedFiles,
        readopens: ReadOpens,
        area: StagingArea,
        publisher: Publisher,
        saved: Saved,
        runtime: Runtime,
        *,
        direct_io: bool,
    ) -> None:
        self._tree, self._local, self._sealed, self._readopens = tree, local, sealed, readopens
        self._area, self._publisher = area, publisher
        self._backing: Backing = area.backing
        self._saved, self._runtime, self._direct_io = saved, runtime, direct_io
        self.handles: HandleTable[Handle] = HandleTable()

    async def create(
        self, key: Key, temporary: bool, mode: int, flags: int, uid: int, gid: int, process: int
    ) -> tuple[Opened, LocalFile | Cached]:
        """The kernel knows no such name. A temporary one needs nobody; an ordinary one is published empty, and whoever
        opened it only to read has the published file, as everybody else (a lock file is one file for all).
        """
        now_ns = self._runtime.wall_ns()
        if temporary:
            file = self._local.new(key, True, mode, uid, gid, now_ns)
            self._local.temps.opened(key, file)
            return await self._hand_out_written(file, file.inode, flags, process, truncate=True), file
        file = self._local.by_key.get(key) or self._local.new(key, False, mode, uid, gid, now_ns)
        number = file.inode
        self._local.opened(file, number, writes=True)  # from here on it is not swept away
        try:
            truncate = await self._create_ordinary(file, bool(flags & os.O_EXCL), bool(flags & os.O_TRUNC))
            if flags & _ACCESS != os.O_RDONLY or file.entry is None or (truncate and file.size_bytes):
                await self._prepare(file, truncate)
                return self._add_local(file, number, flags), file
        except BaseException:
            await self._close(file, number, writes=True)
            raise
        await self._close(file, number, writes=True)
        cached = await self._tree.by_inode(file.entry.inode)
        return self._hand_out(await self._readopens.open_found(cached)), cached

    async def open(self, inode: int, flags: int, process: int) -> Opened:
        """Raises Stale for what must be looked up again: outdated numbers, and sealed files that are to be written."""
        writes = (flags & _ACCESS) != os.O_RDONLY or bool(flags & os.O_TRUNC)
        if Numbers.is_local(inode):
            return await self._open_local(inode, flags, process, writes)
        if writes:
            self._local.want(inode, self._tree.cache.last_key(inode), self._runtime.monotonic_s())
            raise Stale("to be written: look it up again")
        return self._hand_out(await self._readopens.open(inode))

    async def read(self, number: int, offset: int, size_bytes: int) -> bytes | memoryview:
        file = self.handles.get(number).file
        if isinstance(file, SealedFile):
            return await self._sealed.read(file, offset, size_bytes)
        return await self._area.read(file, offset, size_bytes)

    async def write(self, number: int, offset: int, data: bytes) -> int:
        """After a flush, too: of a duplicate, or of pages of a map. The version stays one that can be renamed: whoever
        closed it may be just about to.
        """
        return await self._area.write(self._writable(number), offset, data)

    async def truncate(self, file: LocalFile, size_bytes: int, *, by_path: bool) -> None:
        """By path it is published at once: no close of the caller will do it.

        Raises Stale where a reader has the bytes as a block that cannot be exchanged under it.
        """
        self._check_exchangeable(file)
        if size_bytes:
            await self._load(file)
        await self._area.truncate(file, size_bytes)
        if by_path and not file.temporary:
            await self._publisher.flush(file)
            self._local.arrived(file)
        self._saved.touch(file)

    async def flush(self, number: int) -> None:
        """A close(), of this or of a duplicate."""
        handle = self.handles.get(number)
        file = handle.file
        if not handle.writes or isinstance(file, SealedFile):
            return
        try:
            if not file.temporary:
                await self._publisher.flush(file)
                return
            await self._area.hash(file)
            if file.key is not None:  # no-op when it was renamed meanwhile
                self._local.temps.flushed(file.key, file)
        finally:
            self._saved.touch(file)  # also that it failed

    async def sync(self, number: int) -> None:
        file = self.handles.get(number).file
        if isinstance(file, LocalFile):
            await (self._area.sync(file) if file.temporary or file.key is None else self._publisher.flush(file))

    async def release(self, number: int) -> None:
        handle = self.handles.pop(number)
        self._saved.handle(number, None)
        if isinstance(handle.file, SealedFile):
            self._sealed.release(handle.file)
            if handle.file.removed and handle.file.handles == 0:
                self._saved.removed(handle.file.entry.inode, still_open=False)
        else:
            await self._close(handle.file, handle.number, handle.writes)

    async def discard(self, file: LocalFile) -> None:
        """A file that nobody has open and no name leads to."""
        self._local.remove(file)
        await self._area.drop(file)

    async def truncate_sealed(self, inode: int, size_bytes: int) -> None:
        """truncate(2) by path of a file that is not open for writing. Raises Stale: the kernel looks the name up again
        and is led to a local file, which it truncates.
        """
        cached = await self._tree.by_inode(inode)
        if cached.entry.is_dir:
            raise IsDirectory("a directory cannot be truncated")
        if cached.entry.length_bytes == size_bytes and cached.key not in self._local.by_key:
            return
        self._local.want(inode, cached.key, self._runtime.monotonic_s())
        raise Stale("to be truncated: look it up again")

    def _writable(self, number: int) -> LocalFile:
        handle = self.handles.get(number)
        if not handle.writes or isinstance(handle.file, SealedFile):
            raise pyfuse3.FUSEError(errno.EBADF)
        return handle.file

    async def _create_ordinary(self, file: LocalFile, exclusive: bool, truncate: bool) -> bool:
        """Its name exists. Returns whether it begins empty."""
        if file.published and exclusive:
            raise AlreadyExists("it exists")
        if file.published:
            there: Entry | None = file.entry
        else:
            there = await self._publisher.create(file, exclusive=exclusive)
        if there is None:
            return True
        if exclusive:
            raise AlreadyExists("somebody else made it just now")
        if there.is_dir:
            raise IsDirectory("somebody else made a directory of this name just now")
        if not file.published:
            file.entry, file.published = there, True
            file.mode, file.uid, file.gid = there.mode, there.uid, there.gid
            file.size_bytes = there.length_bytes
        return truncate

    async def _open_local(self, number: int, flags: int, process: int, writes: bool) -> Opened:
        file = self._local.get(number)
        if file is None:
            self._local.contested(self._local.former_key(number), self._runtime.monotonic_s())
            file = self._local.private_version(number, self._runtime.wall_ns()) if writes else None
            if file is None:
                raise Stale("this version of the file is gone")
            return await self._hand_out_written(file, number, flags, process, truncate=False)
        if not writes:
            return await self._open_local_to_read(file, number, flags)
        if file.temp_key is not None and not file.is_expected(self._runtime.monotonic_s()):
            file, truncate = await self._version_to_write(file, number, flags)
        else:
            truncate = bool(flags & os.O_TRUNC)
        return await self._hand_out_written(file, number, flags, process, truncate=truncate)

    async def _hand_out_written(
        self, file: LocalFile, number: int, flags: int, process: int, *, truncate: bool
    ) -> Opened:
        self._check_exchangeable(file)
        file.process = process
        self._local.opened(file, number, writes=True)
        try:
            await self._prepare(file, truncate)
            return self._add_local(file, number, flags)
        except BaseException:
            await self._close(file, number, writes=True)
            raise

    async def _open_local_to_read(self, file: LocalFile, number: int, flags: int) -> Opened:
        if not file.temporary and file.published and file.looked_up:
            # Its look-up came while a writer's number stood for the name.
            if file.entry is not None and not self._backing.passthrough:
                # It gets what was published last, past the page cache, which is the writer's.
                opened = self._hand_out(await self._readopens.open_found(await self._tree.by_inode(file.entry.inode)))
                return opened._replace(direct=True, keep_cache=False)
            # One inode has one file behind it: as soon as the writer is here, another look-up leads elsewhere.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(file.arrived.wait(), GRACE_S)
            await self._grace_is_over(file)
            self._local.expect_nobody(file)
            self._readopens.contend(file.key)
            raise Stale("a writer's number: look it up again")
        self._local.opened(file, number, writes=False)
        try:
            await self._load(file)
            return self._add_local(file, number, flags, changes=False)
        except BaseException:
            await self._close(file, number, writes=False)
            raise

    async def _grace_is_over(self, file: LocalFile) -> None:
        """The next look-up must not lead to the writers again: the kernel tries only once more. Other writers may have
        come meanwhile, and timers fire up to half a millisecond early.
        """
        end_s = (now_s := self._runtime.monotonic_s()) + HAND_SHAKE_S
        while now_s < min(file.grace_until_s, end_s):
            await asyncio.sleep(max(0.001, file.grace_until_s - now_s))
            now_s = self._runtime.monotonic_s()

    async def _version_to_write(self, found: LocalFile, number: int, flags: int) -> tuple[LocalFile, bool]:
        """The version that an open of `found`, looked up as temporary name, writes, and whether it begins empty: never
        one that somebody else may be writing.

        Raises Stale when somebody was quicker. The look-up that follows is answered a number of its own.
        """
        key, now_s = found.temp_key, self._runtime.monotonic_s()
        if found.key != key or key is None:
            self._local.contested(key, now_s)
            fresh = self._local.private_version(number, self._runtime.wall_ns())
            if fresh is None:
                raise Stale("renamed meanwhile: look it up again")
            return fresh, False
        if self._local.temps.is_open(key, found) and not found.looked_up:
            return found, bool(flags & os.O_TRUNC)  # its writer opens his own descriptor again (/proc/self/fd)
        if not self._local.temps.is_ready(key, found) or self._local.is_open(number):
            self._local.contested(key, now_s)
            fresh = self._local.private_version(number, self._runtime.wall_ns())
            if fresh is None:
                raise Stale("another writer was quicker: look it up again")
            return fresh, False
        fresh = self._local.rewrite(found, number, self._runtime.wall_ns(), now_s)
        appends = bool(flags & os.O_APPEND) or (flags & _ACCESS) == os.O_RDWR
        if appends and not flags & os.O_TRUNC and found.size_bytes:
            await self._area.copy(found, fresh)
        return fresh, False

    def _check_exchangeable(self, file: LocalFile) -> None:
        """With passthrough one inode has one file behind it as long as anybody has it open."""
        if file.fixed:
            raise Stale("its readers have it as a sealed block: look it up again")

    async def _prepare(self, file: LocalFile, truncate: bool) -> None:
        """Its bytes are there, or gone."""
        if not truncate:
            await self._load(file)
        if self._backing.passthrough:
            await self._area.begin(file, truncate=truncate)
        elif truncate and file.size_bytes:
            await self._area.truncate(file, 0)

    async def _load(self, file: LocalFile) -> None:
        """The block that it begins with, to be read or copied at the first change."""
        async with file.lock:
            if file.fd < 0 and file.size_bytes and file.entry is not None:
                file.set_block(await self._sealed.open_fd(file.entry))

    def _hand_out(self, file: SealedFile) -> Opened:
        inode = file.entry.inode
        handle = self._add(Handle(file, inode), HandleRecord(inode, 0, False, file.entry))
        if self._backing.passthrough and file.fd >= 0:
            self._backing.offer(inode, file.fd)
            return Opened(handle, passthrough=True)
        return Opened(handle, direct=self._direct_io, keep_cache=True)

    def _add_local(self, file: LocalFile, number: int, flags: int, *, changes: bool = True) -> Opened:
        """A handle that only writes goes past the page cache: nobody can map it, and a copy of every byte is saved.

        `changes`: its close may have something to publish; also of one that only reads, when it made the file or
        truncated it.
        """
        access = flags & _ACCESS
        handle = self._add(Handle(file, number, changes), HandleRecord(number, file.id, changes, None))
        self._saved.touch(file)
        if self._backing.passthrough and file.block_fd >= 0:
            file.mapped = file.mapped or access == os.O_RDWR
            file.fixed = file.fixed or file.staged is None
            self._backing.offer(number, file.block_fd)
            return Opened(handle, passthrough=True)
        return Opened(handle, direct=self._direct_io or access == os.O_WRONLY)

    def _add(self, handle: Handle, record: HandleRecord) -> int:
        number = self.handles.add(handle)
        self._saved.handle(number, record)
        return number

    async def _close(self, file: LocalFile, number: int, writes: bool) -> None:
        """A handle is gone; with the last one goes what has no name. Writes through a map may have come after the last
        flush.
        """
        self._local.closed(file, number, writes)
        if file.temporary:
            if writes and file.writers == 0 and file.key is not None and not file.renaming:
                self._local.temps.closed(file.key, file, self._runtime.monotonic_s())
        elif writes and (file.is_dirty or (file.seen is not None and file.writers == 0)):
            try:
                await self._publisher.flush(file)
            except KvError as error:
                name = file.key[1] if file.key else "(no name)"
                log.error("%r was closed, and its last changes could not be published: %s", name, error.message)
        if file.is_expected(self._runtime.monotonic_s()) or (file.temporary and file.key is not None):
            return
        if file.handles == 0:
            await self.discard(file)
        elif file.published and file.writers == 0 and self._backing.passthrough:
            self._local.forget_name(file)  # whoever reads it goes on; the next writer begins anew
