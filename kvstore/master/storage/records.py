"""Stored shapes: a version byte, then one msgpack array. Fields are appended with defaults, never reordered.

The disk format is not the wire format; a test pins the bytes. Keys are made here too, see the table in `db`.
"""

from __future__ import annotations

import struct
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from kvstore.core.errors import Corrupt, Unsupported
from kvstore.core.types import Address, BlockId, Seen

VERSION: Final = 1
FORMAT: Final = b"\x01"
"""Version of the table of keys."""
EMPTY: Final = b"\x01"
"""A row that says everything by being there."""
S_IFDIR: Final = 0o040000
S_IFREG: Final = 0o100000
PERMISSIONS: Final = 0o7777


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    pass


class ClusterRow(Row, frozen=True):
    id: str


class IncarnationsRow(Row, frozen=True):
    starts: list[Seen]
    """Of the last masters, oldest first: each with the sequence that it found."""


class NameRow(Row, frozen=True):
    """What a name stands for. `block` is empty for directories and files without bytes, else the block's id."""

    inode: int
    mode: int
    uid: int
    gid: int
    length_bytes: int
    mtime_ns: int
    ctime_ns: int
    block: bytes = b""
    hash: int = 0

    @property
    def is_dir(self) -> bool:
        return self.mode & 0o170000 == S_IFDIR

    @property
    def address(self) -> Address | None:
        return Address(BlockId.unpack(self.block), self.length_bytes, self.hash) if self.block else None


class InodeRow(Row, frozen=True):
    parent: int
    name: str
    policy: int = 0
    """Of its own; 0 = what holds above it holds for it."""


class BlockRow(Row, frozen=True):
    """`inode` owns the block; 0 = dead. A block is owned once, dies once, and is never owned again."""

    inode: int
    volumes: list[int]
    policy: int = 0
    """That it is counted for, with `length_bytes`; 0 = none."""
    length_bytes: int = 0

    @property
    def dead(self) -> bool:
        return self.inode == 0


class RebuildRow(Row, frozen=True):
    """A rebuild that has begun and has not come to its end: it begins anew at the next start."""

    kind: str
    """rebuild, discard, mend"""
    served: int = 0
    """Incarnation of the last master before it, the last one that clients may have changed anything at; 0: none."""


class ClaimRow(Row, frozen=True):
    """What is noted beside a block, while names are taken back: the entry that it may become."""

    path: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    incarnation: int
    length_bytes: int
    hash: int
    volume: int
    """One that holds it."""


class VolumeRow(Row, frozen=True):
    node: str
    tier: str
    gone_s: float = 0.0
    """How long it has not been live while a master looked (kept to the minute)."""


class NodeRow(Row, frozen=True):
    endpoint: str
    http: str
    bulk: str
    version: str
    boot: int
    next_report: int
    last_report: int
    """Hash of the last report taken: the same number again is the same message, or a gap."""
    fences: dict[int, int]
    volumes: list[int]
    """In service at the last heartbeat."""
    collects: bool = True
    """False: it has seen a later sequence than ours, so we were rolled back, and call nothing of it an orphan (rule
    16)."""
    recovered: list[Seen] = []
    """What it has seen of histories that this database lacks, and that a rebuild has taken in, or an operator has
    discarded: no reason any more to distrust us."""
    over: list[int] = []
    """Boots of it that are over, the last ones: an old image of its disk may bring them back."""


class PolicyRow(Row, frozen=True):
    """What holds below a directory, or the pin of a file; 0 and False = nothing said.

    `inode` 0: it was taken away, and blocks that are still counted for it count for `parent` soon. `used_bytes` and
    `files`: published below it, what counts for the policies below it included.
    """

    inode: int
    parent: int
    quota_bytes: int = 0
    ttl_s: float = 0.0
    pinned: bool = False
    used_bytes: int = 0
    files: int = 0

    @property
    def says_nothing(self) -> bool:
        return not (self.quota_bytes or self.ttl_s or self.pinned)


class JournalRow(Row, frozen=True):
    time_ns: int
    kind: str
    parent: int
    name: str
    inode: int
    entry: NameRow | None = None
    to_parent: int = 0
    to_name: str = ""
    policy: PolicyRow | None = None


class Counters(msgspec.Struct, array_like=True, gc=False):
    """Changed with every batch, and written in it."""

    files: int = 0
    directories: int = 0
    next_inode: int = 2
    sequence: int = 0
    """Of the last change in the journal."""
    journal_first: int = 1
    journal_bytes: int = 0
    policies: int = 0
    """Rows; where there are none nobody pays for them."""
    next_policy: int = 1


class JournalLimits(NamedTuple):
    records: int
    size_bytes: int


T = TypeVar("T", bound=msgspec.Struct)
_encode = msgspec.msgpack.Encoder().encode


class Codec(Generic[T]):
    """Bytes ⇄ one kind of row."""

    def __init__(self, kind: type[T]) -> None:
        self.kind = kind
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def load(self, data: bytes) -> T:
        """Raises Unsupported for a version that this program does not know, Corrupt for what is not a row."""
        if data[:1] != FORMAT:
            raise Unsupported(
                f"a {self.kind.__name__} of version {data[:1].hex()}: written by a newer kvstore; upgrade"
            )
        try:
            return self._decode(data[1:])
        except msgspec.DecodeError as error:
            raise Corrupt(f"a {self.kind.__name__} in the database is damaged: {error}") from None


def dump(row: msgspec.Struct) -> bytes:
    return FORMAT + _encode(row)


CLUSTER = Codec(ClusterRow)
INCARNATIONS = Codec(IncarnationsRow)
NAME = Codec(NameRow)
INODE = Codec(InodeRow)
BLOCK = Codec(BlockRow)
REBUILD = Codec(RebuildRow)
CLAIM = Codec(ClaimRow)
VOLUME = Codec(VolumeRow)
NODE = Codec(NodeRow)
POLICY = Codec(PolicyRow)
JOURNAL = Codec(JournalRow)
COUNTERS = Codec(Counters)

_U64 = struct.Struct(">Q")
pack_u64 = _U64.pack


def unpack_u64(key: bytes, offset: int = 0) -> int:
    number: int = _U64.unpack_from(key, offset)[0]
    return number


def name_key(parent: int, name: str) -> bytes:
    return pack_u64(parent) + name.encode()


def replica_key(volume: int, block: bytes) -> bytes:
    """Of the columns replicas and unlinks."""
    return pack_u64(volume) + block


def prefix_end(volume: int) -> bytes | None:
    """The first key behind all that start with this u64."""
    return pack_u64(volume + 1) if volume < 2**64 - 1 else None


META_FORMAT, META_CLUSTER, META_COUNTERS, META_PULSE = b"format", b"cluster", b"counters", b"pulse"
META_INCARNATIONS, META_REBUILD = b"incarnations", b"rebuild"
