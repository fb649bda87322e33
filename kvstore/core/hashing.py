"""The hash of a block (rule 3): xxh3_64 over the xxh3_64 of its 1 MiB pieces, and the length.

Exactly: ``xxh3_64(le64(h_0) ‖ … ‖ le64(h_n-1) ‖ le64(length))``, h_i the hash of piece i, the last one short.
Pieces hash in any order, in threads (xxhash releases the GIL), and a piece that is wrong can be named.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

PIECE_BYTES = 1 << 20


def hash_piece(piece: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(piece)


def combine(pieces: Sequence[int], length_bytes: int) -> int:
    """The block's hash from the hashes of its pieces in order."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(pieces) + 1}Q", *pieces, length_bytes))


def hash_block(data: bytes | bytearray | memoryview) -> int:
    """The hash of a whole block that lies in memory (14 MiB: about 1.4 ms)."""
    view = memoryview(data).cast("B")
    pieces = [hash_piece(view[i : i + PIECE_BYTES]) for i in range(0, len(view), PIECE_BYTES)]
    return combine(pieces, len(view))


class BlockHasher:
    """The same hash for bytes that come in order and in any portions; `digest` is of those so far."""

    def __init__(self) -> None:
        self._pieces: list[int] = []
        self._piece = xxhash.xxh3_64()
        self._in_piece = 0
        self.length_bytes = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self.length_bytes += len(view)
        while len(view):
            part = view[: PIECE_BYTES - self._in_piece]
            self._piece.update(part)
            self._in_piece += len(part)
            view = view[len(part) :]
            if self._in_piece == PIECE_BYTES:
                self._close_piece()

    def digest(self) -> int:
        last = [self._piece.intdigest()] if self._in_piece else []
        return combine([*self._pieces, *last], self.length_bytes)

    def _close_piece(self) -> None:
        self._pieces.append(self._piece.intdigest())
        self._piece.reset()
        self._in_piece = 0
