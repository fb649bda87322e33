"""Numbers, remembered entries, handles."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import Overloaded, Stale
from kvstore.core.types import LOCAL_INODE_BIT, Entry
from kvstore.fuse import handles, inodes
from kvstore.fuse.handles import HandleTable
from kvstore.fuse.inodes import EntryCache, Numbers

FILE, DIRECTORY = 0o100644, 0o040755


def entry(inode: int, mode: int = FILE) -> Entry:
    return Entry(inode, mode, 0, 0, 0, 0, 0, None)


def test_the_mounted_directory_is_number_1() -> None:
    numbers = Numbers(77)
    assert (numbers.to_master(1), numbers.to_kernel(77)) == (77, 1)
    assert (numbers.to_master(5), numbers.to_kernel(5)) == (5, 5)


def test_local_numbers_are_never_the_master_s() -> None:
    numbers = Numbers(1)
    made = [numbers.new_local() for _ in range(100)]
    assert len(set(made)) == 100
    assert all(numbers.is_local(n) and n & LOCAL_INODE_BIT and n < 2**63 for n in made)
    assert not numbers.is_local(2**62 - 1)


def test_an_entry_is_used_for_its_time_to_live() -> None:
    cache = EntryCache(1.0, 60.0)
    cached = cache.put(entry(5), (1, "f"), 10.0)
    assert cached.left_s(10.4, 1.0) == pytest.approx(0.6)
    assert cache.fresh(cache.by_name((1, "f")), 10.9) == cached
    assert cache.fresh(cache.by_name((1, "f")), 11.0) is None
    assert cache.fresh(cache.by_inode(5), 10.5) == cached


def test_while_the_master_is_away_files_serve_for_a_while_and_directories_for_ever() -> None:
    cache = EntryCache(1.0, 60.0)
    file, directory = cache.put(entry(5), (1, "f"), 0.0), cache.put(entry(6, DIRECTORY), (1, "d"), 0.0)
    assert cache.usable_without_master(file, 60.9) == file
    assert cache.usable_without_master(file, 61.1) is None
    assert cache.usable_without_master(directory, 1e9) == directory
    assert cache.usable_without_master(None, 0.0) is None


def test_a_new_version_takes_the_name_and_the_old_number_stays_known() -> None:
    cache = EntryCache(1.0, 60.0)
    cache.put(entry(5), (1, "f"), 0.0)
    cache.put(entry(6), (1, "f"), 0.0)
    assert cache.by_name((1, "f")) == cache.by_inode(6)
    old = cache.by_inode(5)
    assert old is not None
    assert old.key is None
    cache.put(entry(6)._replace(uid=3), None, 0.0)  # asked by number: keeps its name
    named = cache.by_name((1, "f"))
    assert named is not None
    assert named.entry.uid == 3
    cache.forget_name((1, "f"))
    assert cache.by_name((1, "f")) is None
    cache.validate()


def test_directories_know_their_names() -> None:
    cache = EntryCache(1.0, 60.0)
    cache.put(entry(6, DIRECTORY), (1, ".tmp"), 0.0)
    assert (cache.directory_name(6), cache.directory_name(7)) == (".tmp", "")
    cache.put(entry(6, DIRECTORY), (1, "other"), 0.0)
    assert cache.directory_name(6) == "other"
    assert cache.by_name((1, ".tmp")) is None


keys = st.tuples(st.integers(1, 3), st.sampled_from("abc"))
steps = st.one_of(
    st.tuples(st.just("put"), st.integers(10, 20), st.none() | keys),
    st.tuples(st.just("forget_name"), keys),
    st.tuples(st.just("forget_inode"), st.integers(10, 20)),
    st.tuples(st.just("touch"), st.integers(10, 20), st.just(7)),
)


@given(st.lists(steps, max_size=60))
def test_names_always_lead_to_entries_that_have_them(story: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inodes, "MAX_FILES", 4)
        patch.setattr(inodes, "MAX_DIRECTORIES", 3)
        cache = EntryCache(1.0, 60.0)
        for name, *args in story:
            if name == "put":
                inode, key = args
                # A number never changes its kind.
                cache.put(entry(inode, DIRECTORY if inode % 2 else FILE), key, 0.0)
            else:
                getattr(cache, name)(*args)
            cache.validate()


def test_handles_are_small_numbers_that_are_not_used_twice() -> None:
    table: HandleTable[str] = HandleTable()
    one, two = table.add("a"), table.add("b")
    assert one != two
    assert 0 < one < 2**32
    assert table.pop(one) == "a"
    with pytest.raises(Stale):
        table.get(one)
    assert table.add("c") not in (one, two)
    assert len(table) == 2


def test_handles_start_again_behind_the_last_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "MAX_HANDLE", 3)
    table: HandleTable[int] = HandleTable()
    first = table.add(0)
    assert sorted([first, table.add(1), table.add(2)]) == [1, 2, 3]
    table.pop(2)
    assert table.add(3) == 2


def test_handles_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "MAX_OPEN", 1)
    table: HandleTable[int] = HandleTable()
    table.add(0)
    with pytest.raises(Overloaded):
        table.add(1)
