"""Contents that say what they are: whoever reads one can tell whether it is a whole version, of which key, by whom."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

_HEAD: Final = struct.Struct("<16sQQQQ")
_PATTERN_BYTES: Final = 4096
MIN_BYTES: Final = _HEAD.size


class Torn(AssertionError):
    """What was read is nothing that anybody wrote."""


class Version(NamedTuple):
    """What a content says of itself."""

    key: int
    writer: int
    turn: int
    length_bytes: int


def content(key: int, writer: int, turn: int, length_bytes: int) -> bytes:
    """`length_bytes` of bytes that differ everywhere between any two versions."""
    seed = xxhash.xxh3_128_digest(struct.pack("<QQQ", key, writer, turn))
    pattern = b"".join(xxhash.xxh3_128_digest(seed, i) for i in range(_PATTERN_BYTES // len(seed)))
    body = (pattern * (length_bytes // len(pattern) + 1))[: length_bytes - _HEAD.size]
    facts = struct.pack("<QQQQ", key, writer, turn, length_bytes)
    return xxhash.xxh3_128_digest(facts + body) + facts + body


def checked(data: bytes | memoryview, key: int) -> Version:
    """The version that `data` is. Raises Torn when it is none, or one of another key."""
    if len(data) < _HEAD.size:
        raise Torn(f"key {key}: {len(data)} bytes are no version")
    digest, of_key, writer, turn, length_bytes = _HEAD.unpack_from(data)
    version = Version(of_key, writer, turn, length_bytes)
    if length_bytes != len(data):
        raise Torn(f"key {key}: {len(data)} bytes of {version}")
    if xxhash.xxh3_128_digest(memoryview(data)[len(digest) :]) != digest:
        raise Torn(f"key {key}: wrong bytes in {version}")
    if of_key != key:
        raise Torn(f"key {key}: holds {version}")
    return version
