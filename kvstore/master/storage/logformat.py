"""The format of RocksDB's logs and manifests (that of LevelDB), read-only.

Blocks of 32 KiB, in each fragments of {masked crc32c u32, length u16, kind u8, bytes}, none across a block's end. A
record is one FULL fragment or FIRST, MIDDLE…, LAST; that of a log is a batch: {sequence u64, count u32, …}, that of a
manifest an edit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvstore.core.limits import KIB

BLOCK: Final = 32 * KIB
HEADER: Final = struct.Struct("<IHB")
BATCH: Final = struct.Struct("<QI")
FULL, FIRST, MIDDLE, LAST = range(1, 5)


class Record(NamedTuple):
    head: bytes
    """Its first bytes: sequence and count."""
    end: int
    is_whole: bool


def records(data: bytes, checked_from: int, head_bytes: int = BATCH.size) -> Iterator[Record]:
    """Records in order; the last one may be torn: its `end` is where it could not be followed any further."""
    head, inside, at = b"", False, 0
    while at < len(data):
        piece = fragment(data, at)
        begins = piece is not None and piece.kind in (FULL, FIRST)
        if piece is None or begins == inside or (piece.end > checked_from and not is_intact(data, piece)):
            yield Record(head, at, is_whole=False)
            return
        if begins:
            head = b""
        if len(head) < head_bytes:
            head += data[piece.start : min(piece.end, piece.start + head_bytes - len(head))]
        inside = piece.kind in (FIRST, MIDDLE)
        if not inside:
            yield Record(head, piece.end, is_whole=True)
        at = after(piece.end)
    if inside:
        yield Record(head, len(data), is_whole=False)


class Fragment(NamedTuple):
    """`start`, `end`: of its bytes, behind the header."""

    kind: int
    start: int
    end: int
    crc: int


def fragment(data: bytes, at: int) -> Fragment | None:
    """The fragment with its header at `at`; None where there can be none."""
    start = at + HEADER.size
    if start > len(data):
        return None
    crc, length, kind = HEADER.unpack_from(data, at)
    end = start + length
    if not FULL <= kind <= LAST or end > len(data) or end > at - at % BLOCK + BLOCK:
        return None
    return Fragment(kind, start, end, crc)


def after(end: int) -> int:
    """Where the next header begins: what is left of a block may be too short for one."""
    left = BLOCK - end % BLOCK
    return end + left if left < HEADER.size else end


def is_intact(data: bytes, piece: Fragment) -> bool:
    crc = _crc32c(data[piece.start - 1 : piece.end])  # of the kind, and what follows it
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF == piece.crc


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC_TABLE: Final = _crc_table()


def _crc32c(data: bytes) -> int:
    """By hand, 10 MB/s: the standard library has only the other polynomial, and little but unsynced tails is read."""
    crc, table = 0xFFFFFFFF, _CRC_TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF
