"""What a mount does not have, each refused with the errno that its manual page names."""

from __future__ import annotations

import errno
from typing import NoReturn

import pyfuse3
from pyfuse3 import EntryAttributes, FileNameT, InodeT, RequestContext, XAttrNameT


def refuse(code: int) -> NoReturn:
    raise pyfuse3.FUSEError(code)


class NotOffered(pyfuse3.Operations):
    """Links, and setting extended attributes."""

    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        refuse(errno.EINVAL)

    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        refuse(errno.EPERM)

    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        refuse(errno.EPERM)

    async def setxattr(self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext) -> None:
        refuse(errno.ENOTSUP)

    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        refuse(errno.ENODATA)
