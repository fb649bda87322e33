"""What is reserved for the next file of a directory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.limits import KIB, MIB
from kvstore.fuse.usual import REMEMBERED, UsualSizes

FIRST = 4 * MIB


def sizes_of(*sizes: int) -> UsualSizes:
    usual = UsualSizes(FIRST)
    for size in sizes:
        usual.add(1, size)
    return usual


def test_where_nothing_is_known_it_is_the_first() -> None:
    assert UsualSizes(FIRST).of(1) == FIRST
    assert sizes_of(14 * MIB).of(2) == FIRST


def test_one_file_has_to_do() -> None:
    assert sizes_of(14 * MIB).of(1) == 14 * MIB


def test_directories_are_apart() -> None:
    usual = UsualSizes(FIRST)
    for _ in range(5):
        usual.add(1, 14 * MIB)
        usual.add(2, 32 * MIB)
    assert (usual.of(1), usual.of(2)) == (14 * MIB, 32 * MIB)


def test_an_outlier_says_nothing() -> None:
    chunks = [14 * MIB] * 3
    assert sizes_of(*chunks, 1024 * MIB).of(1) == 14 * MIB
    assert sizes_of(*chunks, KIB).of(1) == 14 * MIB
    assert sizes_of(*chunks, KIB, *chunks, 1024 * MIB, KIB).of(1) == 14 * MIB


def test_small_files_among_the_chunks_do_not_hide_them() -> None:
    assert sizes_of(14 * MIB, KIB, KIB, 14 * MIB, KIB, KIB).of(1) == 14 * MIB


def test_another_model_in_the_same_directory_counts_soon() -> None:
    assert sizes_of(*[32 * MIB] * 20, *[14 * MIB] * REMEMBERED).of(1) == 14 * MIB
    assert sizes_of(*[14 * MIB] * 20, *[32 * MIB] * 2).of(1) == 32 * MIB


def test_the_table_is_bounded_and_forgets_what_was_written_longest_ago() -> None:
    usual = UsualSizes(FIRST, max_directories=2)
    for directory in (1, 2, 1, 3):
        usual.add(directory, MIB)
    assert len(usual) == 2
    assert [usual.of(directory) for directory in (1, 2, 3)] == [MIB, FIRST, MIB]


@given(st.lists(st.integers(0, 2**30), min_size=3, max_size=40), st.integers(0, 2**40))
def test_one_more_file_never_raises_it_above_what_others_measured(sizes: list[int], outlier: int) -> None:
    assert sizes_of(*sizes, outlier).of(1) <= max(sizes)
