"""The worker's decisions, without a disk, a loop or a clock."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidRequest, Unsupported
from kvstore.core.types import BlockId
from kvstore.worker.blocks.fences import Fences
from kvstore.worker.capacity.evict import Candidate, choose
from kvstore.worker.volumes import identity
from kvstore.worker.volumes.books import Books
from kvstore.worker.volumes.identity import Identity
from kvstore.worker.writes.sessions import Sessions

candidates = st.lists(st.builds(Candidate, st.integers(1, 100), st.booleans()))


def test_victims_are_the_coldest() -> None:
    assert choose([Candidate(10, False)] * 5, 20, 0) == [0, 1]


def test_victims_that_nobody_holds_go_first() -> None:
    assert choose([Candidate(10, True), Candidate(10, False), Candidate(10, True)], 10, 0) == [1]
    assert choose([Candidate(10, True), Candidate(10, False), Candidate(10, True)], 20, 0) == [1, 0]


def test_more_than_needed_goes_only_within_the_extra_and_never_while_held() -> None:
    assert choose([Candidate(10, False)] * 5, 10, 20) == [0, 1, 2]
    assert choose([Candidate(10, False)] * 5, 10, 19) == [0, 1]
    assert choose([Candidate(10, False), Candidate(1, True)], 10, 20) == [0]


@given(candidates, st.integers(1, 300), st.integers(0, 50))
def test_victims_suffice_or_are_all(found: list[Candidate], need: int, extra: int) -> None:
    victims = choose(found, need, extra)
    total = sum(found[i].size_bytes for i in victims)
    assert len(set(victims)) == len(victims)
    assert total >= need or len(victims) == len(found)
    last = found[victims[-1]].size_bytes if victims else 0
    assert total - last < need + extra, "the last one was needed, or fits the extra"


def test_fence_is_the_lowest_unpublished_and_passes_only_settled_ids() -> None:
    fences = Fences(boot=7)
    assert list(fences) == [(7, 1)]
    a, b, c = fences.mint(), fences.mint(), fences.mint()
    assert (a, b, c) == (BlockId(7, 1), BlockId(7, 2), BlockId(7, 3))
    fences.settle(b)
    assert list(fences) == [(7, 1)]
    fences.settle(a)
    assert list(fences) == [(7, 3)]
    fences.settle(c)
    assert list(fences) == [(7, 4)]


def test_an_earlier_boot_is_over_when_all_its_blocks_are_settled() -> None:
    fences = Fences(boot=7)
    fences.add_found([BlockId(5, 9), BlockId(5, 3), BlockId(7, 1)])
    assert list(fences) == [(7, 1), (5, 3)]
    assert fences.is_mine(BlockId(5, 3))
    assert not fences.is_mine(BlockId(5, 100))
    fences.settle(BlockId(5, 3))
    assert not fences.is_mine(BlockId(5, 3))
    assert dict(fences)[5] == 9
    fences.settle(BlockId(5, 9))
    assert list(fences) == [(7, 1)]
    assert not fences.is_mine(BlockId(5, 9))


def test_a_session_is_over_a_grace_after_its_last_connection() -> None:
    sessions = Sessions(grace_s=10, started_s=100)
    sessions.enter(1)
    sessions.enter(1)
    sessions.leave(1, 105)
    assert not sessions.is_over(1, 1000)
    sessions.leave(1, 200)
    assert not sessions.is_over(1, 209)
    assert sessions.is_over(1, 210)
    sessions.enter(1)
    assert not sessions.is_over(1, 1000), "it came back"


def test_a_session_nobody_saw_began_its_grace_with_the_worker() -> None:
    sessions = Sessions(grace_s=10, started_s=100)
    assert not sessions.is_over(5, 109)
    assert sessions.is_over(5, 110)


def test_sessions_that_are_over_take_no_memory() -> None:
    sessions = Sessions(grace_s=10, started_s=0)
    for session in range(1, 100):
        sessions.enter(session)
        sessions.leave(session, 20)
    sessions.enter(500)
    sessions.forget_over(29)
    assert not sessions.is_over(1, 29)
    sessions.forget_over(30)
    assert len(sessions._known) == 1
    assert len(sessions) == 1


def test_books_give_no_more_than_the_disk_has_above_the_floor() -> None:
    books = Books(capacity=1000, floor=100)
    books.look(disk_free=400, unwritten=50)
    assert books.free == 250
    books.take(250)
    assert books.free == 0
    assert books.missing(100) == 100
    books.look(disk_free=150, unwritten=250)
    assert books.missing(100) == 300, "other programs took what we were promised"


def test_held_bytes_are_used_until_they_are_let_go() -> None:
    books = Books(capacity=1000, floor=0, blocks=600, slack=10_000)
    books.hold(blocks=600)
    assert (books.used, books.free) == (600, 400)
    books.let_go(600)
    assert (books.used, books.free) == (0, 1000)


GOLDEN = Identity(0x1122334455667788, "c", 7, True, (1, 2**64 - 1), 9)
GOLDEN_BYTES = bytes.fromhex("0196cf1122334455667788a16307c39201cfffffffffffffffff09")
BEFORE_INCARNATIONS = bytes.fromhex("0195cf1122334455667788a16307c39201cfffffffffffffffff")


def test_identity_on_disk_never_changes_its_shape() -> None:
    assert identity.encode(GOLDEN) == GOLDEN_BYTES
    assert identity.decode(GOLDEN_BYTES, "p") == GOLDEN


def test_identity_of_an_older_writer_gets_defaults() -> None:
    assert identity.decode(bytes.fromhex("019105"), "p") == Identity(5)
    assert identity.decode(BEFORE_INCARNATIONS, "p") == msgspec.structs.replace(GOLDEN, incarnation=0)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x00\x91\x05", b"\x01\xc1", b"\x01\x91\xa1x"])
def test_damaged_identity_is_refused_with_a_remedy(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="move the directory away"):
        identity.decode(data, "/volume/identity")


def test_identity_of_a_newer_version_is_refused() -> None:
    with pytest.raises(Unsupported, match="newer"):
        identity.decode(b"\x02\x91\x05", "p")
