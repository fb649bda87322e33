"""A change over a database behaves like the database with the change written into it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, MemoryDb, Op
from kvstore.master.storage.records import Counters, JournalLimits

N = Cf.NAMES
KEYS = st.binary(max_size=2)
OPS = st.lists(st.tuples(KEYS, st.none() | st.binary(max_size=1)), max_size=12)
LIMITS = JournalLimits(10, 1000)


def change_on(db: MemoryDb) -> Change:
    return Change(db, 0, LIMITS, Counters())


def apply(change: Change, ops: list[tuple[bytes, bytes | None]]) -> None:
    for key, value in ops:
        if value is None:
            change.delete(N, key)
        else:
            change.put(N, key, value)


@settings(max_examples=150, deadline=None)
@given(OPS, OPS, OPS, KEYS, st.none() | KEYS, st.integers(0, 5))
def test_reads_see_what_was_written(
    below: list[tuple[bytes, bytes | None]], outer: list[tuple[bytes, bytes | None]],
    inner: list[tuple[bytes, bytes | None]], start: bytes, end: bytes | None, limit: int,
) -> None:  # fmt: skip
    db, model = MemoryDb(), MemoryDb()
    db.write([Op(N, *op) for op in below])
    model.write([Op(N, *op) for op in [*below, *outer, *inner]])
    change = change_on(db)
    apply(change, outer)
    part = change.nested()
    apply(part, inner)
    keys = [key for key, _ in [*below, *outer, *inner]]
    assert part.scan(N, start, end, limit) == model.scan(N, start, end, limit)
    assert list(part.get_many(N, keys)) == list(model.get_many(N, keys)) == [part.get(N, key) for key in keys]
    part.merge()
    db.write(change.ops())
    assert db.scan(N, b"", None, 100) == model.scan(N, b"", None, 100)


def test_a_part_that_is_not_merged_leaves_nothing() -> None:
    db = MemoryDb()
    change = change_on(db)
    part = change.nested()
    part.put(N, b"k", b"v")
    part.mint()
    part.counters.files += 1
    part.touched.add(1)
    assert not change
    assert change.get(N, b"k") is None
    assert (change.counters, change.touched) == (Counters(), set())


def test_counters_are_written_with_the_rows() -> None:
    db = MemoryDb()
    change = Change.begin(db, 0, LIMITS)
    first = change.mint()
    change.put(N, b"k", b"v")
    db.write(change.ops())
    assert Change.begin(db, 0, LIMITS).mint() == first + 1
