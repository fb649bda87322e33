"""What the kernel asks, translated: numbers, names and attributes here, all decisions in the modules below.

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
from typing import Final, NamedTuple, NoReturn

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
    XAttrNameT,
)

from kvstore.core.errors import NotFound
from kvstore.core.limits import MAX_NAME_BYTES
from kvstore.fuse import attrs
from kvstore.fuse.changes import Attributes, Changes
from kvstore.fuse.files import Files, Opened
from kvstore.fuse.guard import guarded_operations
from kvstore.fuse.handles import HandleTable
from kvstore.fuse.inodes import Cached, Numbers
from kvstore.fuse.listing import Listing
from kvstore.fuse.local import LocalFiles
from kvstore.fuse.localfile import Key, LocalFile
from kvstore.fuse.names import TempPatterns
from kvstore.fuse.sealed import SealedFiles
from kvstore.fuse.space import Space
from kvstore.fuse.tree import AWAY, Tree

_RENAME_FLAGS: Final = int(pyfuse3.RENAME_NOREPLACE)
SETGID: Final = stat.S_ISGID


class Parts(NamedTuple):
    """What a mount is made of."""

    numbers: Numbers
    tree: Tree
    local: LocalFiles
    sealed: SealedFiles
    files: Files
    changes: Changes
    space: Space
    patterns: TempPatterns


@guarded_operations
class Operations(pyfuse3.Operations):
    """The handlers of one mount. `counts`: how often each ended in which way."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self._numbers, self._tree, self._local, self._sealed = parts.numbers, parts.tree, parts.local, parts.sealed
        self._files, self._changes, self._space, self._patterns = (
            parts.files,
            parts.changes,
            parts.space,
            parts.patterns,
        )
        self._directories: HandleTable[Listing] = HandleTable()

    # ---- names ----

    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        key, temporary = self._key(parent_inode, name)
        if temporary:
            version = self._local.temps.lookup(key)
            if version is None:
                raise pyfuse3.FUSEError(errno.ENOENT)
            return attrs.of_local(version)
        writer = self._local.by_key.get(key)
        if writer is not None and (not writer.published or writer.is_expected(self._tree.now_s())):
            return attrs.of_local(writer)
        try:
            cached = await self._tree.by_name(key)
        except NotFound:
            raise pyfuse3.FUSEError(errno.ENOENT) from None
        expected = self._local.expected(key, cached.entry, self._tree.now_s())
        return attrs.of_local(expected) if expected else self._shown(cached)

    async def mkdir(self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        key, temporary = self._key(parent_inode, name)
        if temporary:  # such a name would be no name for anybody else
            _refuse(errno.EPERM)
        gid, setgid = await self._group(key[0], ctx)
        return self._shown(await self._changes.mkdir(key, stat.S_IMODE(mode) | setgid, ctx.uid, gid))

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        key, temporary = self._key(parent_inode, name)
        if temporary:
            _refuse(errno.ENOTDIR if self._local.temps.lookup(key) else errno.ENOENT)
        await self._changes.rmdir(key)

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        key, temporary = self._key(parent_inode, name)
        await (self._changes.unlink_temporary(key) if temporary else self._changes.unlink(key))

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
            _refuse(errno.EINVAL)
        source, from_temporary = self._key(parent_inode_old, name_old)
        target, to_temporary = self._key(parent_inode_new, name_new)
        no_replace = bool(flags & _RENAME_FLAGS)
        if from_temporary:
            await self._changes.rename_temporary(source, target, to_temporary=to_temporary, no_replace=no_replace)
        elif to_temporary:
            # Others would see the name vanish and never come back. EXDEV makes mv(1) copy, which says what happens.
            _refuse(errno.EXDEV)
        else:
            await self._changes.rename(source, target, no_replace=no_replace)

    # ---- attributes ----

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        if Numbers.is_local(inode):
            return attrs.of_local(self._known(inode), inode)
        number = self._numbers.to_master(inode)
        opened = self._sealed.get(number)
        if opened is not None:
            return attrs.of_entry(inode, opened.entry, self._tree.cache.ttl_s, removed=opened.removed)
        return self._shown(await self._tree.by_inode(number))

    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        wanted = Attributes(
            stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
            attr.st_uid if fields.update_uid else None,
            attr.st_gid if fields.update_gid else None,
            attr.st_mtime_ns if fields.update_mtime else None,
        )
        if Numbers.is_local(inode):
            file = self._known(inode)
            if fields.update_size:
                await self._files.truncate(file, attr.st_size)
            if not wanted.is_empty:
                await self._changes.set_local_attributes(file, wanted)
            return attrs.of_local(file, inode)
        number = self._numbers.to_master(inode)
        if fields.update_size:
            await self._files.truncate_sealed(number, attr.st_size)
        return self._shown(await self._changes.set_attributes(number, wanted))

    async def access(self, inode: InodeT, mode: ModeT, ctx: RequestContext) -> bool:
        """Never asked: `default_permissions` lets the kernel decide by the attributes."""
        return True

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        return attrs.of_statfs(await self._space.get())

    # ---- files ----

    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        key, temporary = self._key(parent_inode, name)
        gid, _ = await self._group(key[0], ctx)
        full_mode = stat.S_IFREG | stat.S_IMODE(mode)
        opened, file = await self._files.create(key, temporary, full_mode, flags, ctx.uid, gid)
        return _file_info(opened), attrs.of_local(file)

    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        return _file_info(await self._files.open(self._numbers.to_master(inode), flags))

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        return await self._files.read(fh, off, size)  # type: ignore[return-value]  # any contiguous buffer will do

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        return await self._files.write(fh, off, buf)

    async def flush(self, fh: FileHandleT) -> None:
        await self._files.flush(fh)

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self._files.sync(fh)

    async def release(self, fh: FileHandleT) -> None:
        await self._files.release(fh)

    # ---- directories ----

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        number = self._numbers.to_master(inode)
        name = self._directory_name(number)
        listing = Listing(
            self._tree, number, lambda: self._local.temps.listed(number), lambda n: self._patterns.match(name, n)
        )
        return FileHandleT(self._directories.add(listing))

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        listing, position = self._directories.get(fh), start_id
        while (row := await listing.row(position)) is not None:
            position, name, what = row
            shown = attrs.of_local(what) if isinstance(what, LocalFile) else self._shown_in_listing(listing, name, what)
            if not pyfuse3.readdir_reply(token, FileNameT(name.encode()), shown, position):
                return

    async def releasedir(self, fh: FileHandleT) -> None:
        self._directories.pop(fh).close()

    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """Nothing to do: a change of a name is on the master's disk when its call returns."""

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """Nothing to do: a number that nobody has open and no name leads to is answered ESTALE."""

    # ---- what is not here, with the errno that its manual page names ----

    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        _refuse(errno.EINVAL)

    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        _refuse(errno.EPERM)

    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        _refuse(errno.EPERM)

    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """Regular files only: an empty one, which exists at once."""
        if not stat.S_ISREG(mode):
            _refuse(errno.EPERM)
        key, temporary = self._key(parent_inode, name)
        gid, _ = await self._group(key[0], ctx)
        opened, file = await self._files.create(
            key, temporary, stat.S_IFREG | stat.S_IMODE(mode), os.O_WRONLY | os.O_EXCL, ctx.uid, gid
        )
        entry = file.entry
        await self._files.release(opened.handle)
        return attrs.of_entry(entry.inode, entry, 0) if entry else attrs.of_local(file)

    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        """ENODATA, never ENOSYS: the kernel would not ask again for the life of the mount."""
        _refuse(errno.ENODATA)

    async def setxattr(self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext) -> None:
        _refuse(errno.ENOTSUP)

    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        return ()

    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        _refuse(errno.ENODATA)

    # ---- helpers ----

    def _key(self, parent_inode: int, name: bytes) -> tuple[Key, bool]:
        """The name at the master, and whether it is a temporary one."""
        if len(name) > MAX_NAME_BYTES:
            _refuse(errno.ENAMETOOLONG)
        try:
            text = name.decode()
        except UnicodeDecodeError:
            _refuse(errno.EILSEQ)
        directory = self._numbers.to_master(parent_inode)
        return (directory, text), self._patterns.match(self._directory_name(directory), text)

    def _directory_name(self, directory: int) -> str:
        return self._tree.cache.directory_name(directory)

    def _known(self, inode: int) -> LocalFile:
        file = self._local.get(inode)
        if file is None:
            _refuse(errno.ESTALE)
        return file

    def _shown(self, cached: Cached) -> EntryAttributes:
        inode = self._numbers.to_kernel(cached.entry.inode)
        # A name that is open for writing here is about to change: the kernel asks again each time.
        timeout_s = 0.0 if cached.key in self._local.by_key else self._tree.left_s(cached)
        return attrs.of_entry(inode, cached.entry, timeout_s)

    def _shown_in_listing(self, listing: Listing, name: str, cached: Cached) -> EntryAttributes:
        return self._shown(cached._replace(key=(listing.directory, name)))

    async def _group(self, directory: int, ctx: RequestContext) -> tuple[int, int]:
        """(group of what is made in a directory, the bit that a directory in it inherits).

        A set-group-id directory hands down its group. Remembered of any age: every put changes the directory's times,
        and a call of the master for each CREATE would be dear (rule 25).
        """
        cached = self._tree.cache.by_inode(directory)
        try:
            entry = (cached or await self._tree.by_inode(directory)).entry
        except AWAY:
            return ctx.gid, 0
        return (entry.gid, SETGID) if entry.mode & SETGID else (ctx.gid, 0)


def _file_info(opened: Opened) -> FileInfo:
    return FileInfo(FileHandleT(opened.handle), direct_io=opened.direct, keep_cache=opened.keep_cache)


def _refuse(code: int) -> NoReturn:
    raise pyfuse3.FUSEError(code)
