"""What stands on disk of a note, and what is taken for one (rule 22)."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.core.types import Address, BlockId
from kvstore.worker.reports import note as notes
from kvstore.worker.reports.note import Note

ADDRESS = Address(BlockId(7, 8), 9, 10)
NOTE = Note("a/é", 0o640, 1, 2, -3, 4, 2**64 - 1, 300, ADDRESS.block.pack(), 9, 10)


def test_the_bytes_on_disk_are_pinned() -> None:
    golden = (
        "01"  # version
        "9f95ba6ad64382be"  # hash
        "9ba4612fc3a9cd01a00102fd04cfffffffffffffffffcd012cc41000000000000000070000000000000008090a"
    )
    assert notes.encode(NOTE).hex() == golden
    assert notes.decode(bytes.fromhex(golden), ADDRESS) == NOTE


def written(body: bytes) -> bytes:
    return notes.VERSION + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body


def body_of(note: Note) -> bytes:
    return msgspec.msgpack.encode(note)


def test_a_note_with_fields_of_a_newer_version_still_loads() -> None:
    longer = bytearray(body_of(NOTE) + b"\x01")
    longer[0] += 1
    assert notes.decode(written(bytes(longer)), ADDRESS) == NOTE


@given(st.binary(max_size=100), st.sampled_from([b"", notes.VERSION, notes.VERSION + b"\x9b\xa1a"]))
@example(b"", b"")
@example(b"\x90", b"\x02")
def test_what_is_no_note_is_none(data: bytes, start: bytes) -> None:
    assert notes.decode(start + data, ADDRESS) is None
    assert notes.decode(written(start[1:] + data), ADDRESS) is None


@given(st.integers(0, 8 * len(notes.encode(NOTE)) - 1))
def test_one_flipped_bit_makes_it_no_note(bit: int) -> None:
    """Else the block would come back under another name."""
    data = bytearray(notes.encode(NOTE))
    data[bit // 8] ^= 1 << bit % 8
    assert notes.decode(bytes(data), ADDRESS) is None


@given(st.integers(0, len(notes.encode(NOTE)) - 1))
def test_half_a_note_is_none(length: int) -> None:
    assert notes.decode(notes.encode(NOTE)[:length], ADDRESS) is None


IN_RANGE: Final[dict[str, tuple[Any, ...]]] = {
    "mode": (0, 2**32 - 1),
    "uid": (0, 2**32 - 1),
    "gid": (0, 2**32 - 1),
    "mtime_ns": (-(2**63) + 1, 2**63 - 1),
    "ctime_ns": (-(2**63) + 1, 2**63 - 1),
    "incarnation": (0, 2**64 - 1),
    "sequence": (0, 2**63 - 1),
    "path": ("a", "a/" * 100 + "b", "/".join(["é" * 127] * 16), "/a//b/"),
}
OUT_OF_RANGE: Final[dict[str, tuple[Any, ...]]] = {
    "mode": (-1, 2**32),
    "uid": (-1, 2**32),
    "gid": (-1, 2**32),
    "mtime_ns": (-(2**63), 2**63),
    "ctime_ns": (-(2**63), 2**63),
    "incarnation": (-1, 1.0),
    "sequence": (-1, 2**63),
    "path": ("", "/", "a/../b", ".", "a\0b", "x" * 256, "a/" * 600, "/".join(["é" * 127] * 17), b"a", None),
    "length_bytes": (-1, 2**63),
    "hash": (-1,),
    "block": (b"", b"x" * 17),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in IN_RANGE for value in IN_RANGE[field]])
def test_what_a_master_takes_is_a_note(field: str, value: Any) -> None:
    note = msgspec.structs.replace(NOTE, **{field: value})
    assert notes.decode(notes.encode(note), ADDRESS) == note


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in OUT_OF_RANGE for value in OUT_OF_RANGE[field]]
)
def test_what_no_master_takes_is_no_note(field: str, value: Any) -> None:
    """One such row would have a whole page refused, again and again."""
    note = msgspec.structs.replace(NOTE, **{field: value})
    assert notes.decode(notes.encode(note), ADDRESS) is None


def test_the_note_of_another_block_is_none() -> None:
    assert notes.decode(notes.encode(NOTE), Address(BlockId(7, 8), 9, 11)) is None
    assert notes.decode(notes.encode(NOTE), Address(BlockId(7, 9), 9, 10)) is None
