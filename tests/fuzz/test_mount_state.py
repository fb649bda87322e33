"""What a mount's processes say to each other: records for a successor, and FUSE messages on their way through."""

from __future__ import annotations

import contextlib
import os
import struct
from typing import Final

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.types import Entry
from kvstore.fuse.saved import DirectoryRecord, Facts, HandleRecord, ListingRecord, SavedState
from kvstore.keeper import wire
from kvstore.keeper.wire import Op
from tests.fuzz.hostile import fuzz, mangled

U64: Final = st.integers(0, 2**64 - 1)
NAME: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ENTRIES: Final = st.builds(
    Entry, U64, st.just(0o040755), st.just(0), st.just(0), st.just(0), st.just(1), st.just(1), st.none(),
    st.just(()), U64,
)  # fmt: skip
CHANGES: Final = st.one_of(
    st.tuples(
        st.just("handle"), U64, st.none() | st.builds(HandleRecord, U64, U64, st.booleans(), st.none() | ENTRIES)
    ),
    st.tuples(st.just("listing"), U64, st.none() | st.builds(ListingRecord, U64, U64, NAME)),
    st.tuples(st.just("directory"), U64, st.none() | st.builds(DirectoryRecord, ENTRIES, st.tuples(U64, NAME))),
    st.tuples(st.just("removed"), U64, st.booleans()),
    st.tuples(st.just("wanted"), U64, st.integers(0, 5)),
)


@fuzz(150)
@given(st.lists(st.lists(CHANGES, min_size=1, max_size=4), max_size=4), st.integers(1, 40))
def test_a_successor_knows_what_was_committed_whatever_was_cut_off(commits: list[list], lost: int) -> None:  # type: ignore[type-arg]
    fd = os.memfd_create("fuzz")
    try:
        saved = SavedState(fd, lambda _: None)
        saved.facts(Facts(Entry(1, 0o040755, 0, 0, 0, 0, 0, None), "c", 5))
        saved.commit()
        for changes in commits:
            for kind, key, value in changes:
                getattr(saved, kind)(key, value)
            whole, recovered = os.fstat(fd).st_size, SavedState(fd, lambda _: None).recover()
            saved.commit()
            more = os.fstat(fd).st_size - whole
            if len(changes) == 1 and 0 < lost < more:  # killed in the middle of the write of one record
                torn = os.memfd_create("torn")
                os.write(torn, os.pread(fd, whole + more - lost, 0))
                assert SavedState(torn, lambda _: None).recover() == recovered
                os.close(torn)
        assert SavedState(fd, lambda _: None).recover() == saved.recover()
    finally:
        os.close(fd)


@fuzz(300)
@given(st.sampled_from(Op), st.binary(max_size=80))
def test_requests_of_the_kernel_are_read_within_their_bounds(op: Op, body: bytes) -> None:
    """Whatever the keeper looks for in a message that is too short is a struct.error or an IndexError, no more."""
    message = wire.IN_HEAD.pack(wire.IN_HEAD.size + len(body), op, 7, 1, 0, 0, 0, 0, 0) + body
    with contextlib.suppress(struct.error, IndexError):
        if op in wire.CHANGES_NAMES:
            assert b"\0" not in wire.names(op, message).name
    with contextlib.suppress(struct.error):
        wire.released_handle(message)
        wire.appends(message)
    assert wire.with_unique(message, 9)[16:] == message[16:]
    assert isinstance(wire.xattr_name(message), bytes)
    reply = wire.init_reply(7)
    wire.patch_init(message, memoryview(reply))
    assert len(reply) == len(wire.init_reply(7))


@fuzz(150)
@given(mangled(st.builds(HandleRecord, U64, U64, st.booleans(), st.none() | ENTRIES).map(msgspec.msgpack.encode)))
def test_a_record_of_another_shape_is_refused(data: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        assert isinstance(msgspec.msgpack.decode(data, type=HandleRecord), HandleRecord)
