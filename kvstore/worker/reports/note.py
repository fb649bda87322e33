"""The name noted beside a block, in an extended attribute of its file (rule 22): what brings names back when the master
has lost them.

On disk: a version byte (1); xxh3_64 of all that follows (8 bytes, little endian), as a bit that flipped in a path would
name the block by another one; then a msgpack array of the fields below; fields are appended with defaults, never
reordered. It carries the block's address, so that a note which came to another file (a copy made by hand) is known for
what it is.

Whatever is out of the range that the master takes makes it no note: one such row would have a whole page refused.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvstore.core import paths
from kvstore.core.errors import InvalidRequest
from kvstore.core.hashing import hash_piece
from kvstore.core.types import U63_MAX, Address, BlockId

ATTRIBUTE: Final = "user.kvstore.name"
VERSION: Final = b"\x01"
HASH_BYTES: Final = 8

U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=U63_MAX)]
U64 = Annotated[int, msgspec.Meta(ge=0)]
"""msgpack has no larger ones."""
Time = Annotated[int, msgspec.Meta(ge=-U63_MAX, le=U63_MAX)]


class Note(msgspec.Struct, array_like=True, frozen=True):
    """At `sequence` of `incarnation`'s history the entry at `path` (from the root) listed this block."""

    path: str
    mode: U32
    uid: U32
    gid: U32
    mtime_ns: Time
    ctime_ns: Time
    incarnation: U64
    sequence: U63
    block: bytes
    length_bytes: U63
    hash: U64

    @property
    def address(self) -> Address:
        """Raises struct.error when `block` has not 16 bytes: see `decode`."""
        return Address(BlockId.unpack(self.block), self.length_bytes, self.hash)

    def says_the_same(self, other: Note) -> bool:
        """But for when it was true."""
        return msgspec.structs.replace(self, incarnation=other.incarnation, sequence=other.sequence) == other


_decode = msgspec.msgpack.Decoder(Note).decode


def encode(note: Note) -> bytes:
    body = msgspec.msgpack.encode(note)
    return VERSION + _hash(body) + body


def decode(data: bytes | None, address: Address) -> Note | None:
    """None for what is not there, is not a whole note of this version, or is one of another block."""
    start = len(VERSION) + HASH_BYTES
    if data is None or data[:start] != VERSION + _hash(data[start:]):
        return None
    try:
        note = _decode(data[start:])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    is_own = (note.block, note.length_bytes, note.hash) == (address.block.pack(), *address[1:])
    return note if is_own and _is_path(note.path) else None


def _hash(body: bytes) -> bytes:
    return hash_piece(body).to_bytes(HASH_BYTES, "little")


def _is_path(path: str) -> bool:
    """Whether a file can be called so."""
    try:
        return bool(paths.split(path))
    except InvalidRequest:
        return False
