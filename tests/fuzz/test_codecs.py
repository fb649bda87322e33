"""What stands on disk: what was written comes back, anything else is refused in the one way that its callers expect."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Final

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import Corrupt, InvalidRequest, Unsupported
from kvstore.core.ghosts import Content
from kvstore.core.heat import Heat
from kvstore.core.types import U63_MAX, U64_MAX, Address, BlockId, Seen
from kvstore.master.storage import records
from kvstore.worker.blocks import heatfile
from kvstore.worker.blocks.heat import Known, Remembered
from kvstore.worker.reports import note
from kvstore.worker.volumes import identity
from tests.fuzz.hostile import fuzz, mangled

U64: Final = st.integers(0, U64_MAX)
U63: Final = st.integers(0, U63_MAX)
U32: Final = st.integers(0, 2**32 - 1)
I64: Final = st.integers(-(2**63), 2**63 - 1)
FINITE: Final = st.floats(allow_nan=False, allow_infinity=False, width=32)
TEXT: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
BOOL: Final = st.booleans()
IDS: Final = st.builds(BlockId, U64, U64)
ADDRESSES: Final = st.builds(Address, IDS, U63, U64)
SEEN: Final = st.builds(Seen, U64, U64)
PACKED: Final = IDS.map(BlockId.pack)


# ---- the master's rows (journal included)

NAME_ROWS: Final = st.builds(records.NameRow, U64, U64, U64, U64, U64, I64, I64, PACKED, U64)
POLICY_ROWS: Final = st.builds(records.PolicyRow, U64, U64, U64, FINITE, BOOL, U64, U64)
ROWS: Final[list[tuple[records.Codec[Any], st.SearchStrategy[Any]]]] = [
    (records.NAME, NAME_ROWS),
    (records.POLICY, POLICY_ROWS),
    (records.CLUSTER, st.builds(records.ClusterRow, TEXT)),
    (records.INCARNATIONS, st.builds(records.IncarnationsRow, st.lists(SEEN, max_size=3))),
    (records.INODE, st.builds(records.InodeRow, U64, TEXT, U64)),
    (records.BLOCK, st.builds(records.BlockRow, U64, st.lists(U64, max_size=3), U64, U64)),
    (records.REBUILD, st.builds(records.RebuildRow, TEXT)),
    (records.CLAIM, st.builds(records.ClaimRow, TEXT, U64, U64, U64, I64, I64, U64, U64, U64, U64)),
    (records.VOLUME, st.builds(records.VolumeRow, TEXT, TEXT, FINITE)),
    (
        records.NODE,
        st.builds(
            records.NodeRow, TEXT, TEXT, TEXT, TEXT, U64, U64, U64, st.dictionaries(U64, U64, max_size=3),
            st.lists(U64, max_size=3), BOOL, st.lists(SEEN, max_size=3),
        ),
    ),
    (
        records.JOURNAL,
        st.builds(
            records.JournalRow, I64, TEXT, U64, TEXT, U64, st.none() | NAME_ROWS, U64, TEXT, st.none() | POLICY_ROWS
        ),
    ),
    (records.COUNTERS, st.builds(records.Counters, U64, U64, U64, U64, U64, U64, U64, U64)),
]  # fmt: skip
ROW: Final = st.one_of([st.tuples(st.just(codec), rows) for codec, rows in ROWS])


def test_every_kind_of_row_is_tried() -> None:
    assert {codec.kind for codec, _ in ROWS} == {*records.Row.__subclasses__(), records.Counters}


@fuzz(300)
@given(ROW)
def test_rows_of_the_master_survive(row: tuple[records.Codec[Any], msgspec.Struct]) -> None:
    codec, value = row
    assert codec.load(records.dump(value)) == value


@fuzz(600)
@given(st.one_of([st.tuples(st.just(codec), mangled(rows.map(records.dump))) for codec, rows in ROWS]))
def test_a_damaged_row_is_corrupt_or_another_row(row: tuple[records.Codec[Any], bytes]) -> None:
    codec, data = row
    with contextlib.suppress(Corrupt, Unsupported):
        assert isinstance(codec.load(data), codec.kind)


# ---- what stands in a volume


@fuzz(200)
@given(ADDRESSES)
def test_names_of_blocks_survive(address: Address) -> None:
    assert Address.parse(address.file_name) == address


@fuzz(400)
@given(st.one_of(st.text(max_size=60), mangled(ADDRESSES.map(lambda a: a.file_name.encode())).map(os.fsdecode)))
def test_a_file_has_the_one_name_of_its_address_or_is_no_block(name: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert Address.parse(name).file_name == name


TIMES: Final = st.integers(-U63_MAX, U63_MAX)
PATHS: Final = TEXT.filter(note._is_path)
NOTES: Final = st.builds(note.Note, PATHS, U32, U32, U32, TIMES, TIMES, U64, U63, PACKED, U63, U64)
IDENTITIES: Final = st.builds(
    identity.Identity, U64, TEXT, U64, BOOL, st.lists(U64, max_size=4).map(tuple), U64
)  # fmt: skip


@fuzz(200)
@given(NOTES)
def test_notes_beside_blocks_survive(noted: note.Note) -> None:
    assert note.decode(note.encode(noted), noted.address) == noted
    assert note.decode(note.encode(noted), noted.address._replace(hash=noted.hash ^ 1)) is None


@fuzz(400)
@given(NOTES.flatmap(lambda n: st.tuples(st.just(n.address), mangled(st.just(note.encode(n))) | st.binary())))
def test_any_attribute_is_a_note_of_its_block_or_none(attribute: tuple[Address, bytes]) -> None:
    address, data = attribute
    found = note.decode(data, address)
    assert found is None or found.address == address


@fuzz(200)
@given(IDENTITIES)
def test_identities_survive(stored: identity.Identity) -> None:
    assert identity.decode(identity.encode(stored), "x") == stored


@fuzz(400)
@given(mangled(IDENTITIES.map(identity.encode)) | st.binary())
def test_a_damaged_identity_is_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest, Unsupported):
        assert isinstance(identity.decode(data, "x"), identity.Identity)


HEATS: Final = st.builds(Heat, FINITE, BOOL)
REMEMBERED: Final = st.builds(
    Remembered,
    st.dictionaries(IDS, st.builds(Known, HEATS, FINITE), max_size=3),
    st.lists(st.tuples(st.builds(Content, U64, U64), HEATS), max_size=3),
    FINITE,
)


@fuzz(200)
@given(REMEMBERED)
def test_heat_survives(remembered: Remembered) -> None:
    assert heatfile.decode(heatfile.encode(remembered)) == remembered


@fuzz(400)
@given(mangled(REMEMBERED.map(heatfile.encode)) | st.binary())
def test_a_damaged_heat_file_is_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(heatfile.decode(data), Remembered)
