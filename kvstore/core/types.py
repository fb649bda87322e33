"""The words of the product as values. Nothing here does I/O; everything is immutable."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from kvstore.core.errors import InvalidRequest

ROOT_INODE = 1
"""Inode number of ``/`` at the master."""
LOCAL_INODE_BIT = 1 << 62
"""Inode numbers with this bit belong to one mount (staging); the master never mints them (rule 23)."""

TIERS = ("mem", "ssd", "hdd")
"""Fast to slow."""

_ID = struct.Struct(">QQ")
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{1,16})\.([0-9]{1,19})\.([0-9a-f]{16})")
U64_MAX = 2**64 - 1
U63_MAX = 2**63 - 1


class BlockId(NamedTuple):
    """64 random bits drawn at a worker's start, and a counter: never the same twice (rule 1)."""

    boot: int
    counter: int

    def pack(self) -> bytes:
        """16 bytes, big-endian: sorts by boot, then counter. A key at the master and a column on the wire."""
        return _ID.pack(self.boot, self.counter)

    @classmethod
    def unpack(cls, data: bytes, offset: int = 0) -> BlockId:
        return cls(*_ID.unpack_from(data, offset))

    def __str__(self) -> str:
        return f"{self.boot:016x}-{self.counter:x}"


class Address(NamedTuple):
    """What every request for a block carries, and the name of its file (rules 1, 2)."""

    block: BlockId
    length_bytes: int
    hash: int

    @property
    def file_name(self) -> str:
        """``<boot>-<counter>.<length>.<hash>``; boot and hash 16 hex digits, counter hex, length decimal."""
        return f"{self.block}.{self.length_bytes}.{self.hash:016x}"

    def __str__(self) -> str:
        return self.file_name

    @classmethod
    def parse(cls, name: str) -> Address:
        """Inverse of `file_name`. Raises InvalidRequest for anything else."""
        match = _NAME.fullmatch(name)
        if not match:
            raise InvalidRequest(f"{name!r} is not the name of a block")
        boot, counter, length, digest = match.groups()
        address = cls(BlockId(int(boot, 16), int(counter, 16)), int(length), int(digest, 16))
        if address.file_name != name or address.length_bytes > U63_MAX:
            raise InvalidRequest(f"{name!r} is not the name of a block in its one spelling")
        return address


class Replica(NamedTuple):
    """One copy of a block, and where to ask for it."""

    volume: int
    tier: str
    node: str
    endpoint: str
    """``host:port`` of the worker's gRPC server."""


class Entry(NamedTuple):
    """What a path names, as the master tells it. `address` is None for directories and empty files."""

    inode: int
    mode: int
    """st_mode: type and permission bits."""
    uid: int
    gid: int
    length_bytes: int
    mtime_ns: int
    ctime_ns: int
    address: Address | None
    replicas: tuple[Replica, ...] = ()
    directory: int = 0
    """Inode of the directory that holds it (later policies hang on it)."""

    @property
    def is_dir(self) -> bool:
        return self.mode & 0o170000 == 0o040000


class Seen(NamedTuple):
    """A point of a cluster's history (rule 16)."""

    incarnation: int
    """64 random bits of one start of a master."""
    sequence: int
