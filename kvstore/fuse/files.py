"""Open files: create, open, read, write, flush, release. All inode numbers are the kernel's below the root, which are
the master's.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyfuse3

from kvstore.core.errors import MISSES, AlreadyExists, IsDirectory, KvError, NotFound, Stale
from kvstore.core.recently import Recently
from kvstore.core.types import Entry
from kvstore.fuse.handles import HandleTable
from kvstore.fuse.inodes import Cached, Numbers
from kvstore.fuse.local import LocalFiles
from kvstore.fuse.localfile import Key, LocalFile
from kvstore.fuse.publishing import Publisher
from kvstore.fuse.sealed import SealedFile, SealedFiles
from kvstore.fuse.staging import StagingArea
from kvstore.fuse.tree import Tree
from kvstore.runtime import Runtime

log = logging.getLogger(__name__)

_ACCESS: Final = os.O_ACCMODE
OUTDATED_S: Final = 0.5
"""The kernel's second try comes at once."""


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
    direct: bool
    keep_cache: bool


class Files:
    """Handles and what stands behind them."""

    def __init__(
        self,
        tree: Tree,
        local: LocalFiles,
        sealed: SealedFiles,
        area: StagingArea,
        publisher: Publisher,
        runtime: Runtime,
        *,
        direct_io: bool,
    ) -> None:
        self._tree, self._local, self._sealed, self._area, self._publisher = tree, local, sealed, area, publisher
        self._runtime, self._direct_io = runtime, direct_io
        self.handles: HandleTable[Handle] = HandleTable()
        self._outdated: Recently[Key] = Recently(OUTDATED_S)

    async def create(
        self, key: Key, temporary: bool, mode: int, flags: int, uid: int, gid: int
    ) -> tuple[Opened, LocalFile]:
        """The kernel knows no such name. A temporary one needs nobody; an ordinary one is published empty."""
        now_ns = self._runtime.wall_ns()
        if temporary:
            file = self._local.new(key, True, mode, uid, gid, now_ns)
            self._local.temps.opened(key, file)
            return self._hand_out_local(file, file.inode, flags), file
        file = self._local.by_key.get(key) or self._local.new(key, False, mode, uid, gid, now_ns)
        number = file.inode
        self._local.opened(file, number, writes=True)  # from here on it is not swept away
        try:
            await self._create_ordinary(file, exclusive=bool(flags & os.O_EXCL), truncate=bool(flags & os.O_TRUNC))
            return self._add(file, number, flags), file
        except BaseException:
            await self._close(file, number, writes=True)
            raise

    async def open(self, inode: int, flags: int) -> Opened:
        """Raises Stale for what must be looked up again: outdated numbers, and sealed files that are to be written."""
        writes = (flags & _ACCESS) != os.O_RDONLY or bool(flags & os.O_TRUNC)
        if Numbers.is_local(inode):
            return await self._open_local(inode, flags, writes)
        if writes:
            cached = self._tree.cache.by_inode(inode)
            self._local.want(inode, cached.key if cached else None, self._runtime.monotonic_s())
            raise Stale("to be written: look it up again")
        return self._hand_out(await self._open_sealed(await self._entry_to_read(inode)))

    async def read(self, number: int, offset: int, size_bytes: int) -> bytes | memoryview:
        file = self.handles.get(number).file
        if isinstance(file, SealedFile):
            return await self._sealed.read(file, offset, size_bytes)
        return await self._area.read(file, offset, size_bytes)

    async def write(self, number: int, offset: int, data: bytes) -> int:
        file = self._writable(number)
        if file.temporary and file.key is not None and self._local.temps.is_flushed(file.key, file):
            self._local.temps.opened(file.key, file)
        return await self._area.write(file, offset, data)

    async def truncate(self, file: LocalFile, size_bytes: int) -> None:
        await self._area.truncate(file, size_bytes)

    async def flush(self, number: int) -> None:
        """A close(), of this or of a duplicate."""
        handle = self.handles.get(number)
        file = handle.file
        if not handle.writes or isinstance(file, SealedFile):
            return
        if file.temporary:
            await self._area.hash(file)
            if file.key is not None:  # no-op when it was renamed meanwhile
                self._local.temps.flushed(file.key, file)
        else:
            await self._publisher.flush(file)

    async def sync(self, number: int) -> None:
        file = self.handles.get(number).file
        if isinstance(file, LocalFile):
            await (self._area.sync(file) if file.temporary or file.key is None else self._publisher.flush(file))

    async def release(self, number: int) -> None:
        handle = self.handles.pop(number)
        if isinstance(handle.file, SealedFile):
            self._sealed.release(handle.file)
        else:
            await self._close(handle.file, handle.number, handle.writes)

    async def discard(self, file: LocalFile) -> None:
        """A file that nobody has open and no name leads to."""
        self._local.remove(file)
        await self._area.drop(file)

    async def truncate_sealed(self, inode: int, size_bytes: int) -> None:
        """truncate(2) by path of a file that is not open for writing: a new version is published. Raises Stale when
        that is done.

        The kernel then looks the name up again and finds a file that has the length already.
        """
        cached = await self._tree.by_inode(inode)
        if cached.entry.is_dir:
            raise IsDirectory("a directory cannot be truncated")
        if cached.entry.length_bytes == size_bytes:
            return
        if cached.key is None:
            raise Stale("its name is not known: look it up again")
        now_s = self._runtime.monotonic_s()
        self._local.want(inode, cached.key, now_s)
        file = self._local.expected(cached.key, cached.entry, now_s)
        if file is None:
            raise Stale("replaced meanwhile")
        number = file.inode
        self._local.opened(file, number, writes=True)
        try:
            if size_bytes:
                await self._load(file)
            await self._area.truncate(file, size_bytes)
            await self._publisher.flush(file)
        finally:
            await self._close(file, number, writes=True)
        raise Stale("truncated: look it up again")

    def _writable(self, number: int) -> LocalFile:
        handle = self.handles.get(number)
        if not handle.writes or isinstance(handle.file, SealedFile):
            raise pyfuse3.FUSEError(errno.EBADF)
        return handle.file

    async def _create_ordinary(self, file: LocalFile, *, exclusive: bool, truncate: bool) -> None:
        if file.published and exclusive:
            raise AlreadyExists("it exists")
        if file.published:
            there: Entry | None = file.entry
        else:
            there = await self._publisher.create(file, exclusive=exclusive)
        if there is None:
            return
        if exclusive:
            raise AlreadyExists("somebody else made it just now")
        if there.is_dir:
            raise IsDirectory("somebody else made a directory of this name just now")
        if not file.published:
            file.entry, file.published = there, True
            file.mode, file.uid, file.gid = there.mode, there.uid, there.gid
            file.size_bytes = there.length_bytes
        await self._prepare(file, truncate)

    async def _open_local(self, number: int, flags: int, writes: bool) -> Opened:
        file = self._local.to_open(number)
        if file is None:
            raise Stale("this version of the file is gone")
        expected = file.is_expected(self._runtime.monotonic_s())
        if not writes:
            return await self._open_local_to_read(number, flags, expected)
        if file.temp_key is not None and not expected:
            return self._hand_out_local(await self._version_to_write(file, file.temp_key, flags), number, flags)
        self._local.opened(file, number, writes=True)
        try:
            await self._prepare(file, bool(flags & os.O_TRUNC))
            return self._add(file, number, flags)
        except BaseException:
            await self._close(file, number, writes=True)
            raise

    async def _open_local_to_read(self, number: int, flags: int, expected: bool) -> Opened:
        file = self._local.get(number)
        if file is None:
            raise Stale("this version of the file is gone")
        if expected and not file.temporary and file.entry is not None:
            # The look-up came while a writer's number stood for the name: this reader gets what was published last,
            # past the page cache, which is the writer's.
            opened = self._hand_out(await self._open_sealed(await self._tree.by_inode(file.entry.inode)))
            return opened._replace(direct=True, keep_cache=False)
        await self._load(file)
        return self._hand_out_local(file, number, flags)

    async def _version_to_write(self, found: LocalFile, key: Key, flags: int) -> LocalFile:
        """The version that an open of `found`, looked up as temporary `key`, writes: never one that somebody else may
        be writing.
        """
        appends = bool(flags & os.O_APPEND) or (flags & _ACCESS) == os.O_RDWR
        if self._local.temps.is_ready(key, found):
            fresh = self._local.rewrite(found, self._runtime.wall_ns(), self._runtime.monotonic_s())
            if appends and not flags & os.O_TRUNC and found.size_bytes:
                await self._area.copy(found, fresh)
            return fresh
        if self._local.temps.is_open(key, found) and not found.inherited:
            return found  # known to its writer alone, who opens his own descriptor again (/proc/self/fd)
        if appends:
            raise Stale("another writer was quicker: look it up again")
        # Since the look-up another writer has opened or renamed that version. This handle, which goes past the page
        # cache, gets one of its own behind the same number: a new look-up could lose the race again, and the kernel
        # makes only one.
        version = self._local.new(key, True, found.mode, found.uid, found.gid, self._runtime.wall_ns())
        self._local.temps.opened(key, version)
        return version

    async def _prepare(self, file: LocalFile, truncate: bool) -> None:
        """Its bytes are there, or gone."""
        if not truncate:
            await self._load(file)
        elif file.size_bytes:
            await self._area.truncate(file, 0)

    async def _load(self, file: LocalFile) -> None:
        """The block that it begins with, to be read or copied at the first change."""
        async with file.lock:
            if file.fd < 0 and file.size_bytes and file.entry is not None:
                file.set_block(await self._sealed.open_fd(file.entry))

    async def _open_sealed(self, cached: Cached) -> SealedFile:
        try:
            return await self._sealed.open(cached.entry)
        except MISSES as error:
            log.debug("cannot open %s: %s", cached.entry.address, error.message)
        # What was remembered may be out of date: replicas move. One fresh look, then the miss (rule 23).
        fresh = await self._tree.ask_inode(cached.entry.inode)
        try:
            return await self._sealed.open(fresh.entry)
        except MISSES as error:
            if fresh.key is not None:  # what is stored under it next replaces it, even if it is equal
                self._tree.unreadable.add(fresh.key, self._tree.now_s())
            raise NotFound(f"no replica can be read: {error.message}", reason=error.reason) from None

    async def _entry_to_read(self, inode: int) -> Cached:
        """Raises Stale for an outdated number: the kernel looks the name up again, once. A name that is outdated again
        right after that is a miss (its caller would see ESTALE).
        """
        known = self._tree.cache.by_inode(inode)
        try:
            return await self._tree.by_inode(inode)
        except Stale:
            now_s = self._tree.now_s()
            if known is None or known.key is None:
                raise
            if self._outdated.has(known.key, now_s):
                raise NotFound("replaced faster than it can be opened", reason="stale") from None
            self._outdated.add(known.key, now_s)
            raise

    def _hand_out(self, file: SealedFile) -> Opened:
        handle = self.handles.add(Handle(file, file.entry.inode))
        return Opened(handle, direct=self._direct_io, keep_cache=True)

    def _hand_out_local(self, file: LocalFile, number: int, flags: int) -> Opened:
        self._local.opened(file, number, writes=(flags & _ACCESS) != os.O_RDONLY)
        return self._add(file, number, flags)

    def _add(self, file: LocalFile, number: int, flags: int) -> Opened:
        """A handle that only writes goes past the page cache: nobody can map it, and a copy of every byte is saved."""
        access = flags & _ACCESS
        handle = self.handles.add(Handle(file, number, writes=access != os.O_RDONLY))
        return Opened(handle, direct=self._direct_io or access == os.O_WRONLY, keep_cache=False)

    async def _close(self, file: LocalFile, number: int, writes: bool) -> None:
        """A handle is gone; with the last one goes what has no name. Writes through a map may have come after the last
        flush.
        """
        self._local.closed(file, number, writes)
        if file.temporary:
            if writes and file.writers == 0 and file.key is not None and not file.renaming:
                self._local.temps.closed(file.key, file, self._runtime.monotonic_s())
        elif writes and file.is_dirty:
            try:
                await self._publisher.flush(file)
            except KvError as error:
                log.error("a file was closed whose last changes could not be published: %s", error.message)
        if (
            file.handles == 0
            and (file.key is None or not file.temporary)
            and not file.is_expected(self._runtime.monotonic_s())
        ):
            await self.discard(file)
