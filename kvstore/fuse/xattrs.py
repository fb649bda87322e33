"""What the store knows of a file or directory, as extended attributes ``user.kvstore.*``; they can only be read.

::

    tier     file       tier of the nearest replica: mem, ssd, hdd
    node     file       nodes that have a replica, the nearest first
    heat     file       touches just now that it is worth there; "unknown" when its worker does not say
    expiry   file       seconds until it goes unless it is used, "never", or "unknown"
    pin      both       "yes", "no", or "no room": pinned, but the share of the volume for pins is used up
    quota    directory  bytes of the nearest quota above it, or "none"
    used     directory  bytes published below the directory that has this quota, or "none"
    ttl      directory  seconds, or "none"
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final, Protocol

from pyfuse3 import InodeT, RequestContext, XAttrNameT

from kvstore.client.policies import Holding
from kvstore.client.remote import Described
from kvstore.core.errors import KvError
from kvstore.core.types import Entry
from kvstore.fuse.circuit import Master
from kvstore.fuse.inodes import Numbers
from kvstore.fuse.notoffered import NotOffered, refuse
from kvstore.fuse.tree import Tree

PREFIX: Final = b"user.kvstore."
DESCRIBE_TIMEOUT_S: Final = 1.0
UNKNOWN: Final = "unknown"
OF_FILE: Final = ("tier", "node", "heat", "pin", "expiry")
OF_DIRECTORY: Final = ("pin", "quota", "used", "ttl")


class Describer(Protocol):
    """What is needed of an `AsyncClient`."""

    @property
    def node(self) -> str: ...

    async def describe(self, entry: Entry, *, timeout_s: float | None = None) -> Sequence[Described]: ...


class XattrHandlers(NotOffered):
    """The kernel's questions for them."""

    _numbers: Numbers
    _xattrs: ExtendedAttributes

    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        """ENODATA, never ENOSYS: the kernel would not ask again for the life of the mount."""
        value = None
        if not Numbers.is_local(inode):
            value = await self._xattrs.get(self._numbers.to_master(inode), name)
        if value is None:
            refuse(errno.ENODATA)
        return value

    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        if Numbers.is_local(inode):
            return ()
        return [XAttrNameT(name) for name in await self._xattrs.names(self._numbers.to_master(inode))]


class ExtendedAttributes:
    def __init__(self, tree: Tree, master: Master, client: Describer) -> None:
        self._tree, self._master, self._client = tree, master, client

    async def names(self, inode: int) -> list[bytes]:
        """Of an entry, by its number at the master. Raises like `Tree.by_inode`."""
        entry = (await self._tree.by_inode(inode)).entry
        return [PREFIX + name.encode() for name in _names(entry)]

    async def get(self, inode: int, name: bytes) -> bytes | None:
        """The value; None for an attribute that it has not. Raises like `Tree.by_inode`, and what the master says."""
        wanted = name.removeprefix(PREFIX).decode(errors="replace")
        if not name.startswith(PREFIX):  # the kernel asks for its own with every listing: no call for those
            return None
        entry = (await self._tree.by_inode(inode)).entry
        if wanted not in _names(entry):
            return None
        if entry.is_dir:
            return _of_directory(wanted, await self._master.policies(inode)).encode()
        return (await self._of_file(wanted, entry)).encode()

    async def _of_file(self, wanted: str, entry: Entry) -> str:
        replicas = sorted(entry.replicas, key=lambda replica: replica.node != self._client.node)
        if wanted == "node":
            return ",".join(dict.fromkeys(replica.node for replica in replicas))
        if wanted == "pin":
            if (await self._master.policies(entry.inode)).pin is None:
                return "no"
            if entry.address is None:
                return "yes"
        described = await self._describe(entry._replace(replicas=tuple(replicas[:1])))
        match wanted:
            case "tier":
                return described.tier if described else next((replica.tier for replica in replicas), UNKNOWN)
            case "pin":
                return UNKNOWN if described is None else "yes" if described.pinned else "no room"
            case "heat":
                return f"{described.heat:.4g}" if described else UNKNOWN
            case _:
                return _expiry(described)

    async def _describe(self, entry: Entry) -> Described | None:
        try:
            found = await self._client.describe(entry, timeout_s=DESCRIBE_TIMEOUT_S)
        except KvError:
            return None
        return found[0] if found else None


def _names(entry: Entry) -> Sequence[str]:
    if entry.is_dir:
        return OF_DIRECTORY
    return OF_FILE if entry.address else ("pin",)


def _expiry(described: Described | None) -> str:
    if described is None:
        return UNKNOWN
    return "never" if described.expires_s is None else f"{described.expires_s:.1f}"


def _of_directory(wanted: str, holding: Holding) -> str:
    quota = holding.quotas[0] if holding.quotas else None
    match wanted:
        case "pin":
            return "yes" if holding.pin else "no"
        case "ttl":
            return f"{holding.ttl.ttl_s:g}" if holding.ttl else "none"
        case "quota":
            return str(quota.quota_bytes) if quota else "none"
        case _:
            return str(quota.used_bytes) if quota else "none"
