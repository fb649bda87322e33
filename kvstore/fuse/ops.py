"""What the kernel asks, translated: one handler an operation, all decisions in the modules below.

Concurrency contract: everything runs on one loop. What stands between two awaits is atomic; whoever awaits while it
changes a local file holds that file's lock (`LocalFile.lock`), and two locks are taken in order of inode number.
Nothing blocks the loop: bytes that may wait for a disk move in threads.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import pyfuse3
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FlagT,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
)

from kvstore.core.errors import AlreadyExists, NotFound
from kvstore.fuse.attrs import Attributes, of_statfs
from kvstore.fuse.changes import Changes, Wanted
from kvstore.fuse.files import Files
from kvstore.fuse.guard import guarded_operations
from kvstore.fuse.handles import DIRECTORY_BIT, MAX_HANDLE, HandleTable
from kvstore.fuse.inodes import Numbers
from kvstore.fuse.listing import Listing
from kvstore.fuse.local import LocalFiles
from kvstore.fuse.localfile import LocalFile
from kvstore.fuse.names import TempPatterns
from kvstore.fuse.notoffered import refuse
from kvstore.fuse.readopens import ReadOpens
from kvstore.fuse.repeats import Repeats
from kvstore.fuse.saved import ListingRecord, Saved
from kvstore.fuse.sealed import SealedFiles
from kvstore.fuse.space import Space
from kvstore.fuse.staging import StagingArea
from kvstore.fuse.translation import Translator, file_info, thread_group
from kvstore.fuse.tree import Tree
from kvstore.fuse.xattrs import ExtendedAttributes, XattrHandlers

_RENAME_FLAGS: Final = int(pyfuse3.RENAME_NOREPLACE)


class Parts(NamedTuple):
    """What a mount is made of."""

    numbers: Numbers
    tree: Tree
    local: LocalFiles
    sealed: SealedFiles
    readopens: ReadOpens
    files: Files
    changes: Changes
    space: Space
    patterns: TempPatterns
    attributes: Attributes
    saved: Saved
    area: StagingArea
    xattrs: ExtendedAttributes


@guarded_operations
class Operations(XattrHandlers):
    """The handlers of one mount. `counts`: how often each ended in which way."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.repeats = Repeats()
        self._numbers, self._tree, self._local, self._sealed = parts.numbers, parts.tree, parts.local, parts.sealed
        self._readopens, self._files, self._changes = parts.readopens, parts.files, parts.changes
        self._space, self._patterns = parts.space, parts.patterns
        self._attributes, self._saved, self._xattrs = parts.attributes, parts.saved, parts.xattrs
        self._translator = Translator(
            parts.numbers, parts.tree, parts.local, parts.sealed, parts.patterns, parts.attributes
        )
        self.directories: HandleTable[Listing] = HandleTable()

    def commit(self) -> None:
        """Called by the guard before each reply: from here on a successor knows what this operation did."""
        self._saved.commit()

    # ---- names ----

    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        key, temporary = self._translator.key(parent_inode, name)
        if temporary:
            shown = self._local.shown(key, self._tree.now_s())
            if shown is None:
                raise pyfuse3.FUSEError(errno.ENOENT)
            return self._attributes.of_local(*shown)
        writer = self._local.by_key.get(key)
        if writer is not None and (not writer.published or writer.is_expected(self._tree.now_s())):
            writer.looked_up = True
            return self._attributes.of_local(writer)
        try:
            cached = await self._tree.by_name(key)
            if not cached.entry.is_dir and self._readopens.is_contended(key):
                cached = await self._readopens.pin(key, cached)
        except NotFound:
            raise pyfuse3.FUSEError(errno.ENOENT) from None
        expected = self._local.expected(key, cached.entry, self._tree.now_s())
        return self._attributes.of_local(expected) if expected else self._translator.shown(cached)

    async def mkdir(self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        key, temporary = self._translator.key(parent_inode, name)
        if temporary:  # such a name would be no name for anybody else
            refuse(errno.EPERM)
        gid, setgid = await self._translator.group(key[0], ctx)
        try:
            made = await self._changes.mkdir(key, stat.S_IMODE(mode) | setgid, self._translator.uid(ctx), gid)
        except AlreadyExists:
            if not self.repeats.mkdir(parent_inode, name):
                raise
            made = await self._tree.by_name(key)
        return self._translator.shown(made)

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        key, temporary = self._translator.key(parent_inode, name)
        if temporary:
            refuse(errno.ENOTDIR if self._local.temps.lookup(key) else errno.ENOENT)
        try:
            await self._changes.rmdir(key)
        except NotFound:
            if not self.repeats.rmdir(parent_inode, name):
                raise

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        key, temporary = self._translator.key(parent_inode, name)
        try:
            if temporary:
                await self._changes.unlink_temporary(key, thread_group(ctx.pid))
            else:
                await self._changes.unlink(key)
        except NotFound:
            if not self.repeats.unlink(parent_inode, name):
                raise

    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        if flags & ~_RENAME_FLAGS:
            refuse(errno.EINVAL)
        source, from_temporary = self._translator.key(parent_inode_old, name_old)
        target, to_temporary = self._translator.key(parent_inode_new, name_new)
        if to_temporary and not from_temporary:
            # Others would see the name vanish and never come back. EXDEV makes mv(1) copy, which says what happens.
            refuse(errno.EXDEV)
        repeated = self.repeats.rename(parent_inode_old, name_old, parent_inode_new, name_new)
        no_replace = bool(flags & _RENAME_FLAGS)
        try:
            if from_temporary:
                await self._changes.rename_temporary(
                    source, target, thread_group(ctx.pid), to_temporary=to_temporary, no_replace=no_replace
                )
            else:
                # A directory's name decides which names in it are temporary: they cannot change their nature.
                only_files = self._patterns.differ(source[1], target[1])
                await self._changes.rename(source, target, no_replace=no_replace, only_files=only_files)
        except NotFound:
            if not repeated and not self.repeats.was_taken(source, self._tree.now_s()):
                raise
        else:
            if repeated:
                self.repeats.took(source, self._tree.now_s())

    # ---- attributes ----

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        if Numbers.is_local(inode):
            return self._attributes.of_local(self._translator.known(inode), inode)
        number = self._numbers.to_master(inode)
        opened = self._sealed.get(number)
        if opened is not None:
            ttl_s = self._tree.cache.ttl_s
            return self._attributes.of_entry(inode, opened.entry, ttl_s, removed=opened.removed)
        return self._translator.shown(await self._tree.by_inode(number))

    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        self._translator.check_owner(attr, fields)
        wanted = Wanted(
            stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
            attr.st_uid if fields.update_uid else None,
            attr.st_gid if fields.update_gid else None,
            attr.st_mtime_ns if fields.update_mtime else None,
        )
        if Numbers.is_local(inode):
            file = self._translator.known(inode)
            if fields.update_size:
                await self._files.truncate(file, attr.st_size, by_path=fh is None)
            if not wanted.is_empty:
                await self._changes.set_local_attributes(file, wanted)
            return self._attributes.of_local(file, inode)
        number = self._numbers.to_master(inode)
        if fields.update_size:
            await self._files.truncate_sealed(number, attr.st_size)
        return self._translator.shown(await self._changes.set_attributes(number, wanted))

    async def access(self, inode: InodeT, mode: ModeT, ctx: RequestContext) -> bool:
        """Never asked: `default_permissions` lets the kernel decide by the attributes."""
        return True

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        return of_statfs(await self._space.get())

    # ---- files ----

    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        key, temporary = self._translator.key(parent_inode, name)
        gid, _ = await self._translator.group(key[0], ctx)
        full_mode = stat.S_IFREG | stat.S_IMODE(mode)
        if self.repeats.create(parent_inode, name):
            flags = FlagT(flags & ~os.O_EXCL)
        process = thread_group(ctx.pid)
        opened, made = await self._files.create(
            key, temporary, full_mode, flags, self._translator.uid(ctx), gid, process
        )
        shown = self._attributes.of_local(made) if isinstance(made, LocalFile) else self._translator.shown(made)
        return file_info(opened), shown

    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        process = thread_group(ctx.pid) if Numbers.is_local(inode) else 0
        return file_info(await self._files.open(self._numbers.to_master(inode), flags, process))

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        return await self._files.read(fh & MAX_HANDLE, off, size)  # type: ignore[return-value]  # any contiguous buffer will do

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        return await self._files.write(fh & MAX_HANDLE, off, buf)

    async def flush(self, fh: FileHandleT) -> None:
        await self._files.flush(fh & MAX_HANDLE)

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self._files.sync(fh & MAX_HANDLE)

    async def release(self, fh: FileHandleT) -> None:
        await self._files.release(fh & MAX_HANDLE)

    # ---- directories ----

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        number = self._numbers.to_master(inode)
        handle = self.directories.add(self.listing(number))
        self._saved.listing(handle, ListingRecord(number, 0, ""))
        return FileHandleT(handle | DIRECTORY_BIT)

    def listing(self, directory: int) -> Listing:
        """Of a directory (number of the master)."""
        name = self._translator.directory_name(directory)
        return Listing(
            self._tree, directory, lambda: self._local.temps.listed(directory), lambda n: self._patterns.match(name, n)
        )

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        handle = fh & MAX_HANDLE
        listing, position = self.directories.get(handle), start_id
        while (row := await listing.row(position)) is not None:
            behind, name, what = row
            if isinstance(what, LocalFile):
                shown = self._attributes.of_local(what)
            else:
                shown = self._translator.shown(what._replace(key=(listing.directory, name)))
            if not pyfuse3.readdir_reply(token, FileNameT(name.encode()), shown, behind):
                break
            position = behind
        self._saved.listing(handle, ListingRecord(listing.directory, *listing.mark(position)))

    async def releasedir(self, fh: FileHandleT) -> None:
        handle = fh & MAX_HANDLE
        self._saved.listing(handle, None)
        self.directories.pop(handle).close()

    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """Nothing to do: a change of a name is on the master's disk when its call returns."""

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """Nothing to do: a number that nobody has open and no name leads to is answered ESTALE."""

    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """Regular files only: an empty one, which exists at once."""
        if not stat.S_ISREG(mode):
            refuse(errno.EPERM)
        key, temporary = self._translator.key(parent_inode, name)
        gid, _ = await self._translator.group(key[0], ctx)
        full_mode, flags = stat.S_IFREG | stat.S_IMODE(mode), os.O_WRONLY | os.O_EXCL
        process = thread_group(ctx.pid)
        opened, made = await self._files.create(
            key, temporary, full_mode, flags, self._translator.uid(ctx), gid, process
        )
        entry = made.entry
        await self._files.release(opened.handle)
        if entry is not None:
            return self._attributes.of_entry(entry.inode, entry, 0)
        assert isinstance(made, LocalFile)
        return self._attributes.of_local(made)
