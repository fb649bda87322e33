from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.hashing import PIECE_BYTES, BlockHasher, hash_block


def by_definition(data: bytes) -> int:
    pieces = [xxhash.xxh3_64_intdigest(data[i : i + PIECE_BYTES]) for i in range(0, len(data), PIECE_BYTES)]
    return xxhash.xxh3_64_intdigest(b"".join(struct.pack("<Q", p) for p in pieces) + struct.pack("<Q", len(data)))


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 5])
def test_hash_is_as_written_down(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    assert hash_block(data[:size]) == by_definition(data[:size])


def test_the_value_is_pinned() -> None:
    assert hash_block(b"kvstore") == by_definition(b"kvstore") == 0xB06243A5363B5C7D


@given(st.lists(st.integers(0, 3 * PIECE_BYTES // 2), max_size=5))
def test_portions_do_not_matter(sizes: list[int]) -> None:
    data = bytes(range(251)) * (sum(sizes) // 251 + 1)
    hasher, at = BlockHasher(), 0
    for size in sizes:
        hasher.update(data[at : at + size])
        at += size
    assert hasher.length_bytes == at
    assert hasher.digest() == hash_block(data[:at])


def test_length_is_part_of_the_hash() -> None:
    assert hash_block(b"") != hash_block(b"\0")
