"""Entries and local files as what pyfuse3 replies."""

from __future__ import annotations

import stat
from typing import Final, NamedTuple

import pyfuse3
from pyfuse3 import EntryAttributes, InodeT, ModeT

from kvstore.client.messages import Statfs
from kvstore.core.limits import MAX_NAME_BYTES
from kvstore.core.types import Entry
from kvstore.fuse.localfile import LocalFile

BLOCK_BYTES: Final = 4096
"""LMCache uses O_DIRECT when the size divides by statfs's block size: 4096 is what its arena is aligned to."""
_SECTOR_BYTES: Final = 512
_ALL: Final = 0o777


class Owner(NamedTuple):
    """To whom everything on this mount belongs; None: as the store says. `umask`: everything has all permissions but
    these, as libfuse's option of that name means it.
    """

    uid: int | None = None
    gid: int | None = None
    umask: int | None = None

    def uid_of(self, uid: int) -> int:
        return uid if self.uid is None else self.uid

    def gid_of(self, gid: int) -> int:
        return gid if self.gid is None else self.gid

    def mode_of(self, mode: int) -> int:
        return mode if self.umask is None else stat.S_IFMT(mode) | (_ALL & ~self.umask)


class Attributes:
    """What the kernel is shown."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def of_entry(self, inode: int, entry: Entry, timeout_s: float, *, removed: bool = False) -> EntryAttributes:
        """`inode` is the kernel's number. The kernel keeps name and attributes for `timeout_s`."""
        attributes = self._new(inode, entry.mode, entry.uid, entry.gid, entry.length_bytes)
        attributes.st_atime_ns = attributes.st_mtime_ns = entry.mtime_ns
        attributes.st_ctime_ns = entry.ctime_ns
        attributes.st_nlink = 0 if removed else 2 if entry.is_dir else 1
        attributes.entry_timeout = attributes.attr_timeout = timeout_s
        return attributes

    def of_local(self, file: LocalFile, inode: int | None = None) -> EntryAttributes:
        """As it is now. Never kept by the kernel: the next look-up of the name may lead elsewhere (rule 23). `inode` is
        the number it asked for.
        """
        file.observe()
        attributes = self._new(inode or file.inode, file.mode, file.uid, file.gid, file.size_bytes)
        attributes.st_atime_ns = attributes.st_mtime_ns = file.mtime_ns
        attributes.st_ctime_ns = file.ctime_ns
        attributes.st_nlink = 0 if file.key is None else 1
        attributes.entry_timeout = attributes.attr_timeout = 0
        return attributes

    def _new(self, inode: int, mode: int, uid: int, gid: int, size_bytes: int) -> EntryAttributes:
        attributes = EntryAttributes()
        attributes.st_ino = InodeT(inode)
        attributes.st_mode = ModeT(self.owner.mode_of(mode))
        attributes.st_uid, attributes.st_gid = self.owner.uid_of(uid), self.owner.gid_of(gid)
        attributes.st_size = BLOCK_BYTES if stat.S_ISDIR(mode) else size_bytes
        attributes.st_blksize = BLOCK_BYTES
        attributes.st_blocks = -(-attributes.st_size // _SECTOR_BYTES)
        return attributes


def of_statfs(space: Statfs) -> pyfuse3.StatvfsData:
    data = pyfuse3.StatvfsData()
    data.f_bsize = data.f_frsize = BLOCK_BYTES
    data.f_blocks = space.capacity_bytes // BLOCK_BYTES
    data.f_bfree = data.f_bavail = space.free_bytes // BLOCK_BYTES
    data.f_files = space.files + space.directories + data.f_bfree
    data.f_ffree = data.f_favail = data.f_bfree
    data.f_namemax = MAX_NAME_BYTES
    return data
