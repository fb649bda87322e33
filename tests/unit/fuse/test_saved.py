"""What a successor finds: the last record of each thing, whatever was written before and however often."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.client.sockets import SealedBlock
from kvstore.core.errors import NoSpace
from kvstore.core.types import Address, BlockId, Entry, Replica
from kvstore.fuse import saved as saved_module
from kvstore.fuse.localfile import Hashed, LocalFile
from kvstore.fuse.names import State
from kvstore.fuse.saved import Facts, FileRecord, HandleRecord, ListingRecord, SavedState, record_of

ADDRESS = Address(BlockId(2**63 + 5, 7), 4096, 2**64 - 1)
ENTRY = Entry(5, 0o100644, 0, 0, 4096, 1, 2, ADDRESS, (Replica(9, "ssd", "n", "127.0.0.1:1"),), 1)


def file(id_: int) -> LocalFile:
    made = LocalFile(id_, id_ + 100, (1, "ü.tmp"), True, 0o100600, 1, 2, 3, 4, 5, temp_key=(1, "ü.tmp"), process=2**22)
    made.sealed, made.hashed, made.entry = SealedBlock(ADDRESS, 9), Hashed(3, 5, 6, 2**64 - 1), ENTRY
    made.seen = (5, 6)
    made.failed = NoSpace("emptied")
    return made


@pytest.fixture
def memfd() -> int:
    return os.memfd_create("state")


def new(fd: int) -> SavedState:
    state = SavedState(fd, lambda fd: None)
    state.state_of = lambda file: State("closed", 1.5)
    return state


def test_everything_comes_back(memfd: int) -> None:
    state, one = new(memfd), file(1)
    state.facts(Facts(ENTRY, "cluster", 1 << 30))
    state.touch(one)
    state.handle(3, HandleRecord(7, 0, False, ENTRY))
    state.handle(4, HandleRecord(101, 1, True, None))
    state.listing(5, ListingRecord(1, 20, "x"))
    state.commit()
    found = new(memfd).recover()
    assert found.facts == Facts(ENTRY, "cluster", 1 << 30)
    assert found.files == [record_of(one, State("closed", 1.5))]
    assert found.files[0].sealed == one.sealed
    assert found.files[0].failed == (NoSpace.code, "emptied")
    assert isinstance(found.files[0].sealed, SealedBlock)
    assert found.handles == {3: HandleRecord(7, 0, False, ENTRY), 4: HandleRecord(101, 1, True, None)}
    assert found.listings == {5: ListingRecord(1, 20, "x")}


def test_the_last_record_counts_and_what_ended_is_gone(memfd: int) -> None:
    state, one = new(memfd), file(1)
    state.touch(one)
    state.handle(3, HandleRecord(7, 0, False, ENTRY))
    state.commit()
    one.mode = 0o100644
    state.touch(one)
    state.handle(3, None)
    state.commit()
    found = new(memfd).recover()
    assert [f.mode for f in found.files] == [0o100644]
    assert found.handles == {}
    state.remove(one)
    state.commit()
    assert new(memfd).recover().files == []


def test_nothing_is_written_for_what_did_not_change(memfd: int) -> None:
    state, one = new(memfd), file(1)
    state.touch(one)
    state.commit()
    size = os.fstat(memfd).st_size
    state.touch(one)
    state.handle(8, None)
    state.commit()
    assert os.fstat(memfd).st_size == size


def test_a_renaming_version_can_be_renamed_by_a_successor(memfd: int) -> None:
    one = file(1)
    one.renaming = True
    assert record_of(one, State("", 0.0)).state.name == "closed"


def test_a_record_of_an_older_version_knows_no_process() -> None:
    record = record_of(file(1), State("closed", 1.5))
    *older, process, failed = msgspec.to_builtins(record)
    assert (process, failed) == (2**22, (NoSpace.code, "emptied"))
    assert msgspec.convert(older, FileRecord) == msgspec.structs.replace(record, process=0, failed=None)


@given(st.integers(0, 200))
@settings(max_examples=30)
def test_a_torn_end_is_what_was_not_written(cut: int) -> None:
    fd = os.memfd_create("state")
    state = new(fd)
    state.handle(1, HandleRecord(7, 0, False, None))
    state.commit()
    whole = os.fstat(fd).st_size
    state.handle(2, HandleRecord(8, 0, False, ENTRY))
    state.commit()
    os.ftruncate(fd, min(whole + cut, os.fstat(fd).st_size - 1))
    assert set(new(fd).recover().handles) == {1}
    os.close(fd)


def test_it_is_compacted_before_it_grows(memfd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_module, "COMPACT_BYTES", 2000)
    fds: list[int] = []
    state = SavedState(memfd, lambda fd: fds.append(os.dup(fd)))
    state.handle(1, HandleRecord(7, 0, False, ENTRY))
    for i in range(500):
        state.handle(2, HandleRecord(i, 0, False, None))
        state.commit()
    assert fds
    assert os.fstat(fds[-1]).st_size < 4000
    assert new(fds[-1]).recover().handles == {1: HandleRecord(7, 0, False, ENTRY), 2: HandleRecord(499, 0, False, None)}
