"""What was asked twice because its first answer was lost."""

from __future__ import annotations

from kvstore.fuse.repeats import TAKEN_FOR_S, Repeats
from kvstore.keeper.channel import Again


def test_each_repetition_counts_once() -> None:
    repeats = Repeats([Again(10, 1, b"a", 0, b""), Again(10, 1, b"a", 0, b""), Again(9, 1, b"d", 0, b"")])
    assert [repeats.unlink(1, b"a") for _ in range(3)] == [True, True, False]
    assert not repeats.rmdir(1, b"d")
    assert repeats.mkdir(1, b"d")
    assert not repeats.mkdir(1, b"d")


def test_rename_with_flags_is_a_rename() -> None:
    repeats = Repeats([Again(45, 1, b"a", 2, b"b"), Again(12, 1, b"x", 2, b"y")])
    assert not repeats.rename(1, b"a", 2, b"c")
    assert repeats.rename(1, b"a", 2, b"b")
    assert repeats.rename(1, b"x", 2, b"y")


def test_a_rename_whose_version_a_repeated_one_took() -> None:
    repeats, source = Repeats(), (1, "k.tmp")
    assert not repeats.was_taken(source, 0.0)
    repeats.took(source, 0.0)
    assert repeats.was_taken(source, 1.0)
    assert not repeats.was_taken(source, 1.0)
    repeats.took(source, 0.0)
    assert not repeats.was_taken(source, TAKEN_FOR_S)
