"""The kernel's words and ours: names to keys, entries to attributes, callers to owners and processes."""

from __future__ import annotations

import errno
import stat
from typing import Final

from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, RequestContext, SetattrFields

from kvstore.core.limits import MAX_NAME_BYTES
from kvstore.fuse.attrs import Attributes
from kvstore.fuse.files import Opened
from kvstore.fuse.inodes import Cached, Numbers
from kvstore.fuse.local import LocalFiles
from kvstore.fuse.localfile import Key, LocalFile
from kvstore.fuse.names import TempPatterns
from kvstore.fuse.notoffered import refuse
from kvstore.fuse.sealed import SealedFiles
from kvstore.fuse.tree import AWAY, Tree
from kvstore.keeper.channel import PASSTHROUGH_BIT

SETGID: Final = stat.S_ISGID


class Translator:
    """What a request means on this mount, and how what was found is shown."""

    def __init__(
        self,
        numbers: Numbers,
        tree: Tree,
        local: LocalFiles,
        sealed: SealedFiles,
        patterns: TempPatterns,
        attributes: Attributes,
    ) -> None:
        self._numbers, self._tree, self._local, self._sealed = numbers, tree, local, sealed
        self._patterns, self._attributes = patterns, attributes

    def key(self, parent_inode: int, name: bytes) -> tuple[Key, bool]:
        """The name at the master, and whether it is a temporary one. Raises FUSEError for what is no name."""
        if len(name) > MAX_NAME_BYTES:
            refuse(errno.ENAMETOOLONG)
        try:
            text = name.decode()
        except UnicodeDecodeError:
            refuse(errno.EILSEQ)
        directory = self._numbers.to_master(parent_inode)
        return (directory, text), self._patterns.match(self.directory_name(directory), text)

    def directory_name(self, directory: int) -> str:
        """Of its number at the master."""
        return self._tree.cache.directory_name(directory)

    def known(self, inode: int) -> LocalFile:
        """Of the kernel's number. Raises FUSEError (ESTALE) when there is none any more."""
        file = self._local.get(inode)
        if file is None:
            refuse(errno.ESTALE)
        return file

    def shown(self, cached: Cached) -> EntryAttributes:
        inode = self._numbers.to_kernel(cached.entry.inode)
        opened = self._sealed.get(cached.entry.inode)
        if opened is not None:  # its attributes may have changed on another mount
            opened.entry = cached.entry._replace(replicas=opened.entry.replicas)
        # A name that is open for writing here is about to change: the kernel asks again each time.
        timeout_s = 0.0 if cached.key in self._local.by_key else self._tree.left_s(cached)
        return self._attributes.of_entry(inode, cached.entry, timeout_s)

    async def group(self, directory: int, ctx: RequestContext) -> tuple[int, int]:
        """(group of what is made in a directory, the bit that a directory in it inherits).

        A set-group-id directory hands down its group. Remembered of any age: every put changes the directory's times,
        and a call of the master for each CREATE would be dear (rule 25).
        """
        gid = self._attributes.owner.gid_of(ctx.gid)
        cached = self._tree.cache.by_inode(directory)
        try:
            entry = (cached or await self._tree.by_inode(directory)).entry
        except AWAY:
            return gid, 0
        return (entry.gid, SETGID) if entry.mode & SETGID else (gid, 0)

    def uid(self, ctx: RequestContext) -> int:
        """Owner of what its caller makes."""
        return self._attributes.owner.uid_of(ctx.uid)

    def check_owner(self, attr: EntryAttributes, fields: SetattrFields) -> None:
        """With --uid or --gid the owner is the mount's, not the file's. Raises FUSEError (EPERM)."""
        uid, gid, _ = self._attributes.owner
        if (fields.update_uid and uid not in (None, attr.st_uid)) or (
            fields.update_gid and gid not in (None, attr.st_gid)
        ):
            refuse(errno.EPERM)


def thread_group(thread: int) -> int:
    """The process of a thread that calls (10 µs); 0 where that cannot be told: the thread has gone, or is 0 itself, as
    the kernel names one in a namespace that is not visible.
    """
    try:
        with open(f"/proc/{thread}/status", "rb") as status:
            return next((int(line[5:]) for line in status if line.startswith(b"Tgid:")), 0)
    except (OSError, ValueError):
        return 0


def file_info(opened: Opened) -> FileInfo:
    """The reply to an open."""
    handle = opened.handle | PASSTHROUGH_BIT if opened.passthrough else opened.handle
    return FileInfo(FileHandleT(handle), direct_io=opened.direct, keep_cache=opened.keep_cache)
