"""The name noted beside a block, in an extended attribute of its file (rule 22): what brings names back when the master
has lost them.

On disk: a version byte (1), then a msgpack array of the fields below; fields are appended with defaults, never
reordered. It carries the block's address, so that a note which came to another file (a copy made by hand) is known for
what it is.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.core.types import Address, BlockId

ATTRIBUTE: Final = "user.kvstore.name"
VERSION: Final = b"\x01"


class Note(msgspec.Struct, array_like=True, frozen=True):
    """At `sequence` of `incarnation`'s history the entry at `path` (from the root) listed this block."""

    path: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    incarnation: int
    sequence: int
    block: bytes
    length_bytes: int
    hash: int

    @property
    def address(self) -> Address:
        """Raises struct.error when `block` has not 16 bytes: see `decode`."""
        return Address(BlockId.unpack(self.block), self.length_bytes, self.hash)

    def says_the_same(self, other: Note) -> bool:
        """But for when it was true."""
        return msgspec.structs.replace(self, incarnation=other.incarnation, sequence=other.sequence) == other


_decode = msgspec.msgpack.Decoder(Note).decode


def encode(note: Note) -> bytes:
    return VERSION + msgspec.msgpack.encode(note)


def decode(data: bytes | None, address: Address) -> Note | None:
    """None for what is not there, is not a note of this version, or is one of another block."""
    if data is None or data[:1] != VERSION:
        return None
    try:
        note = _decode(data[1:])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    is_own = (note.block, note.length_bytes, note.hash) == (address.block.pack(), *address[1:])
    return note if is_own else None
