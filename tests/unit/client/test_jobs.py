"""`GetJob` and `PutJob` without I/O: what is asked next after each outcome."""

from __future__ import annotations

import pytest

from kvstore.client.cache import MetadataCache
from kvstore.client.deadline import Deadline
from kvstore.client.jobs import GetJob, Put, PutJob, as_miss, is_race, told, whole
from kvstore.client.lost import LostNames
from kvstore.client.messages import PublishMode, PublishResult
from kvstore.client.sockets import SealedBlock
from kvstore.core.errors import (
    Corrupt,
    InvalidRequest,
    IsDirectory,
    KvError,
    NoSpace,
    NotFound,
    Overloaded,
    Stale,
    Timeout,
    TooLarge,
    Unavailable,
)
from kvstore.core.types import Address, BlockId, Entry, Replica

HERE = Replica(1, "ssd", "a", "a:1")
THERE = Replica(2, "ssd", "b", "b:1")


def address(counter: int, length: int = 3) -> Address:
    return Address(BlockId(9, counter), length, 0)


def file(counter: int, *replicas: Replica, length: int = 3) -> Entry:
    return Entry(counter, 0o100644, 0, 0, length, 0, 0, address(counter, length), replicas or (HERE,))


EMPTY = Entry(2, 0o100644, 0, 0, 0, 0, 0, None)
DIRECTORY = Entry(1, 0o040755, 0, 0, 0, 0, 0, None)


def asked(job: GetJob, cache: MetadataCache, *rows: Entry | KvError) -> None:
    """One lookup that brings these rows."""
    job.looked_up(cache.token(), rows)


# ---- gets ----


def test_what_has_no_block_needs_no_load() -> None:
    cache = MetadataCache(1)
    job = GetJob(["file", "empty", "dir", "none"], cache, LostNames())
    assert job.unknown() == ["file", "empty", "dir", "none"]
    asked(job, cache, file(7), EMPTY, DIRECTORY, NotFound("no_name"))
    (wish,) = job.to_load()
    assert wish.entry == file(7)
    job.loaded([b"abc"])
    assert not job.again()
    assert job.results[:2] == [b"abc", b""]
    assert isinstance(job.results[2], IsDirectory)
    assert str(job.results[3]) == "none: does not exist"
    assert job.values() == [b"abc", b"", None, None]
    assert job.found() == [True, True, True, False]


def test_a_cached_entry_is_not_asked_for() -> None:
    cache = MetadataCache(1)
    cache.put(cache.token(), "a", file(7))
    assert GetJob(["a", "b"], cache, LostNames()).unknown() == ["b"]


@pytest.mark.parametrize("error", [NotFound, Stale, Unavailable, Timeout, Corrupt])
def test_a_block_that_is_gone_is_looked_up_once_more(error: type[KvError]) -> None:
    cache = MetadataCache(1)
    cache.put(cache.token(), "a", file(7))
    job = GetJob(["a"], cache, LostNames())
    job.to_load()
    job.loaded([error("gone")])
    assert job.again()
    assert cache.get("a") is None
    assert job.unknown() == ["a"]
    asked(job, cache, file(8))
    assert [w.entry for w in job.to_load()] == [file(8)]
    job.loaded([b"new"])
    assert not job.again()
    assert job.values() == [b"new"]


def test_the_same_entry_is_not_loaded_twice() -> None:
    cache = MetadataCache(1)
    job = GetJob(["a"], cache, LostNames())
    asked(job, cache, file(7))
    job.to_load()
    job.loaded([Corrupt("bad bytes")])
    asked(job, cache, file(7))
    assert job.to_load() == []
    assert isinstance(job.results[0], Corrupt)


def test_the_same_block_with_other_replicas_is_loaded_again() -> None:
    cache = MetadataCache(1)
    job = GetJob(["a"], cache, LostNames())
    asked(job, cache, file(7, HERE))
    job.to_load()
    job.loaded([Unavailable("dead")])
    asked(job, cache, file(7, THERE))
    assert len(job.to_load()) == 1
    job.loaded([Unavailable("dead too")])
    assert not job.again(), "twice is enough"
    with pytest.raises(NotFound, match="dead too"):
        whole(job.results[0])


def test_a_master_that_is_away_for_the_second_look_leaves_the_first_error() -> None:
    cache = MetadataCache(1)
    job = GetJob(["a"], cache, LostNames())
    asked(job, cache, file(7))
    job.to_load()
    job.loaded([Corrupt("bad bytes")])
    job.lookup_failed(Unavailable("no master"))
    assert job.to_load() == []
    assert isinstance(job.results[0], Corrupt)


def test_what_is_no_miss_is_not_asked_again() -> None:
    cache = MetadataCache(1)
    job = GetJob(["a"], cache, LostNames())
    asked(job, cache, file(7))
    job.to_load()
    job.loaded([Overloaded("no fds")])
    assert not job.again()


def test_a_failed_lookup_is_the_result_of_all() -> None:
    job = GetJob(["a", "b"], MetadataCache(1), LostNames())
    job.lookup_failed(Timeout("slow"))
    assert job.to_load() == []
    assert job.values() == [None, None]


def test_a_buffer_is_cut_to_the_value() -> None:
    cache, buffer = MetadataCache(1), bytearray(10)
    job = GetJob(["a"], cache, LostNames(), [memoryview(buffer)])
    asked(job, cache, file(7))
    (wish,) = job.to_load()
    assert wish.view is not None
    assert len(wish.view) == 3
    job.loaded([b""])
    assert job.sizes() == [3]


def test_a_small_buffer_is_refused() -> None:
    cache = MetadataCache(1)
    job = GetJob(["a"], cache, LostNames(), [memoryview(bytearray(2))])
    asked(job, cache, file(7))
    with pytest.raises(InvalidRequest):
        job.to_load()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotFound("not here"), "no_replica"),
        (NotFound("not here", reason="no_replica"), "no_replica"),
        (Corrupt("bad"), "corrupt"),
        (Timeout("slow", fault="w:1"), "timeout"),
        (Unavailable("dead"), "unavailable"),
    ],
)
def test_a_name_whose_block_cannot_be_read_has_a_name(error: KvError, reason: str) -> None:
    cache, lost = MetadataCache(1), LostNames()
    job = GetJob(["a"], cache, lost)
    for _ in range(2):
        asked(job, cache, file(7))
        job.to_load()
        job.loaded([error] * len([r for r in job.results if r is None]))
        if not job.again():
            break
    with pytest.raises(NotFound) as caught:
        whole(job.results[0])
    assert caught.value.reason == reason
    assert "a" in lost


def test_a_name_that_is_read_at_the_second_try_is_not_lost() -> None:
    cache, lost = MetadataCache(1), LostNames()
    job = GetJob(["a", "b"], cache, lost)
    asked(job, cache, file(7), NotFound("no_replica", reason="no_replica"))
    job.to_load()
    job.loaded([Unavailable("dead")])
    assert "a" in lost
    asked(job, cache, file(8))
    job.to_load()
    job.loaded([b"abc"])
    assert "a" not in lost
    assert "b" in lost, "the master has an entry without a replica"


def test_misses_keep_their_reason() -> None:
    miss = as_miss(Corrupt("bad", fault="a:1"))
    assert isinstance(miss, NotFound)
    assert (miss.reason, miss.message, miss.fault) == ("corrupt", "bad", "a:1")
    no_name = NotFound("x")
    assert as_miss(no_name) is no_name
    assert isinstance(as_miss(IsDirectory("d")), IsDirectory)
    assert isinstance(as_miss(Overloaded("busy")), NotFound)


def test_a_message_of_its_own_is_kept() -> None:
    error = NotFound("look elsewhere")
    assert told(error, "a") is error
    assert str(told(NotFound("no_replica", reason="no_replica"), "a")) == "a: no live worker has it"


# ---- puts ----


def sealed(counter: int) -> SealedBlock:
    return SealedBlock(address(counter), 5)


def store(job: PutJob, *outcomes: SealedBlock | KvError) -> None:
    """Of all values that are to be stored, in order."""
    for index, outcome in zip(job.to_store(), outcomes, strict=True):
        job.stored(index, outcome)


def test_a_round_of_puts() -> None:
    job = PutJob(["a", "empty", "b"], [3, 0, 3], LostNames(), if_absent=False)
    assert job.to_store() == [0, 2]
    store(job, sealed(1), NoSpace("full"))
    first, second = job.publications()
    assert (first.mode, first.parents) == (PublishMode.REPLACE, True)
    assert [(n.path, n.address, n.volume) for n in first.names] == [("a", address(1), 5)]
    assert [(n.path, n.address) for n in second.names] == [("empty", None)]
    job.published([PublishResult([file(1)], [True]), PublishResult([EMPTY], [False])])
    assert job.pause(Deadline(5)) is None
    done = job.done()
    assert done[:2] == [Put(file(1), True), Put(EMPTY, False)]
    assert isinstance(done[2], NoSpace)


def test_what_could_not_be_read_replaces_equal_content_once() -> None:
    lost = LostNames()
    lost.failed("a", Corrupt("bad"))
    job = PutJob(["a", "b"], [3, 3], lost, if_absent=False)
    store(job, sealed(1), sealed(2))
    assert [p.names[0].replace_equal for p in job.publications()] == [True, False]
    job.published([Overloaded("busy"), PublishResult([file(2)], [True])])
    assert "a" in lost, "it is not stored yet"
    assert job.pause(Deadline(5)) is not None
    store(job, sealed(3))
    assert [p.names[0].replace_equal for p in job.publications()] == [True]
    job.published([PublishResult([file(3)], [True])])
    assert "a" not in lost


def test_a_worker_that_misses_its_own_files_may_have_them_the_next_time() -> None:
    job = PutJob(["a"], [3], LostNames(), if_absent=False)
    store(job, NotFound("no staging file 7"))
    assert isinstance(job.done()[0], Unavailable)
    assert job.pause(Deadline(5)) is not None


@pytest.mark.parametrize("error", [Stale("fence"), Unavailable("worker gone"), Overloaded("busy")])
def test_what_may_pass_is_stored_anew(error: KvError) -> None:
    job = PutJob(["a"], [3], LostNames(), if_absent=False)
    store(job, sealed(1))
    job.publications()
    job.published([error])
    assert job.pause(Deadline(5)) is not None
    assert job.to_store() == [0]
    store(job, sealed(2))
    assert job.publications()[0].names[0].address == address(2)
    job.published([PublishResult([file(2)], [True])])
    assert job.done() == [Put(file(2), True)]


def test_the_deadline_ends_the_rounds() -> None:
    job = PutJob(["a"], [3], LostNames(), if_absent=False)
    store(job, Unavailable("gone"))
    assert job.pause(Deadline(0)) is None
    assert isinstance(job.done()[0], Unavailable)


@pytest.mark.parametrize("error", [Timeout("slow"), NoSpace("full"), IsDirectory("d")])
def test_what_does_not_pass_ends_at_once(error: KvError) -> None:
    job = PutJob(["a"], [3], LostNames(), if_absent=False)
    job.failed(error)
    assert job.pause(Deadline(5)) is None
    assert job.done() == [error]


def test_a_failed_publish_leaves_what_failed_before() -> None:
    job = PutJob(["a", "b"], [3, 3], LostNames(), if_absent=False)
    store(job, NoSpace("full"), sealed(1))
    job.failed(Timeout("slow"))
    assert [type(r) for r in job.done()] == [NoSpace, Timeout]
    assert job.publications() == []


def test_a_failed_publish_leaves_its_blocks_to_be_given_up() -> None:
    job = PutJob(["a", "b", "empty"], [3, 3, 0], LostNames(), if_absent=False)
    store(job, sealed(1), sealed(2))
    job.failed(Timeout("slow", fault="master"))
    assert job.unpublished() == [sealed(1), sealed(2)]
    assert job.pause(Deadline(5)) is not None
    store(job, sealed(3), sealed(4))
    job.published([PublishResult([file(3)], [True]), Stale("fence"), PublishResult([EMPTY], [True])])
    assert job.unpublished() == [sealed(4)], "what was published is the master's, what was told of before is told of"
    assert job.unpublished() == []


def test_a_round_that_is_cut_off_gives_up_what_it_stored() -> None:
    job = PutJob(["a", "b"], [3, 3], LostNames(), if_absent=False)
    job.stored(1, sealed(2))
    assert job.unpublished() == [sealed(2)]


def test_if_absent_moves_no_bytes_for_what_is_there() -> None:
    job = PutJob(["there", "dir", "none"], [3, 3, 3], LostNames(), if_absent=True)
    assert job.pending() == ["there", "dir", "none"]
    job.looked_up([file(1), DIRECTORY, NotFound("no_name")])
    assert job.to_store() == [2]
    store(job, sealed(2))
    assert [p.mode for p in job.publications()] == [PublishMode.IF_ABSENT]
    job.published([PublishResult([file(2)], [True])])
    done = job.done()
    assert (done[0], done[2]) == (Put(file(1), False), Put(file(2), True))
    assert isinstance(done[1], IsDirectory)


def test_what_is_too_large_is_not_even_stored() -> None:
    job = PutJob(["a", "b"], [10, 11], LostNames(), if_absent=False)
    job.refuse_larger(10)
    assert job.to_store() == [0]
    store(job, sealed(1))
    assert isinstance(job.done()[1], TooLarge)


def test_a_race_is_tried_a_bounded_number_of_times() -> None:
    assert is_race(NotFound("replaced"), 0)
    assert not is_race(NotFound("replaced"), 2)
    assert not is_race(None, 0)
    assert not is_race(IsDirectory("d"), 0)
