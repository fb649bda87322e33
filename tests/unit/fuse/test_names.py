"""Temporary names: the patterns, and the table of versions (rule 24)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.fuse.names import SUPERSEDED_TTL_S, TempNames, TempPatterns

KEY = (1, "k.tmp")


@dataclass(eq=False)
class Version:
    inode: int
    process: int = 0


@pytest.mark.parametrize(
    ("directory", "name", "temporary"),
    [
        ("", "k.tmp", True),
        ("d", "-1a@half.tmp", True),
        ("d", "k.data", False),
        ("d", "k.tmp.data", False),
        ("d", ".tmp", False),
        (".tmp", "k.data", True),
        (".tmp", "x", True),
        ("a.tmp", "x", False),
        ("d", "a\n.tmp", True),
        ("d", "K.TMP", False),
    ],
)
def test_default_patterns(directory: str, name: str, temporary: bool) -> None:
    assert TempPatterns(["*.tmp", ".tmp/*"]).match(directory, name) is temporary


def test_no_patterns_no_temporary_names() -> None:
    assert not TempPatterns([]).match(".tmp", "k.tmp")


def test_a_pattern_may_name_a_prefix_or_a_character() -> None:
    patterns = TempPatterns(["~?*", "in/part-*"])
    assert patterns.match("", "~x")
    assert not patterns.match("", "~")
    assert patterns.match("in", "part-1")
    assert not patterns.match("out", "part-1")


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        (".tmp", "post", True),
        ("pre", ".tmp", True),
        (".tmp", ".tmp", False),
        ("pre", "post", False),
        ("in", "out", True),
        ("in", "inside", False),
        ("a.tmp", "a", False),
        ("all", "post", False),  # *.tmp holds everywhere
    ],
)
def test_whether_a_directory_s_name_decides(one: str, other: str, differ: bool) -> None:
    patterns = TempPatterns(["*.tmp", ".tmp/*", "in*/part-*", "all/*.tmp"])
    assert patterns.differ(one, other) is patterns.differ(other, one) is differ


def names(*versions: Version) -> TempNames[Version]:
    table: TempNames[Version] = TempNames()
    for version in versions:
        table.opened(KEY, version)
    return table


def test_only_open_versions() -> None:
    one, two = Version(1), Version(2)
    table = names(one, two)
    assert table.lookup(KEY) is None
    assert table.listed(1) == []
    assert table.to_rename(KEY) is one
    assert table.unlink(KEY) == []


def test_none() -> None:
    table = names()
    assert table.lookup(KEY) is None
    assert table.to_rename(KEY) is None
    assert table.unlink(KEY) == []


def test_what_was_flushed_last_is_shown_and_renamed() -> None:
    """A writer that died in the middle of its put left something older."""
    torn, whole = Version(1), Version(2)
    table = names(torn, whole)
    table.closed(KEY, torn, 0.0)
    table.flushed(KEY, whole)
    table.closed(KEY, whole, 1.0)
    assert table.lookup(KEY) is whole
    assert table.to_rename(KEY) is whole
    table.remove(KEY, whole)
    assert table.to_rename(KEY) is torn
    table.remove(KEY, torn)
    assert len(table) == 0


def test_under_constant_use_no_version_expires_before_its_rename() -> None:
    """The newest bytes go first; the oldest would grow old beside them."""
    table, first = names(), Version(1)
    table.opened(KEY, first)
    table.closed(KEY, first, 0.0)
    for i in range(100):
        version = Version(i + 2)
        table.opened(KEY, version)
        table.closed(KEY, version, float(i))
        taken = table.to_rename(KEY)
        assert taken is version
        table.remove(KEY, version)
        assert table.expire(float(i), 10.0) == []
    assert table.all() == [first]


def test_rename_takes_what_the_last_lookup_answered() -> None:
    one, two = Version(1), Version(2)
    table = names(one, two)
    table.closed(KEY, two, 0.0)
    assert table.lookup(KEY) is two
    table.flushed(KEY, one)
    table.remove(KEY, two)
    table.closed(KEY, one, 0.0)
    table.opened(KEY, Version(3))
    assert table.to_rename(KEY) is one


def test_released_before_only_flushed() -> None:
    """A flush also comes when a forked child closes what it inherited in the middle of a write."""
    half, whole = Version(1), Version(2)
    table = names(half, whole)
    table.flushed(KEY, half)
    table.closed(KEY, whole, 0.0)
    assert table.lookup(KEY) is whole
    table.opened(KEY, half)  # and it goes on writing
    table.remove(KEY, whole)
    assert table.lookup(KEY) is None


def test_a_process_means_its_own_version() -> None:
    """Of those that are ready, whichever was flushed last, and whatever a look-up answered."""
    half, whole, unknown = Version(1, 10), Version(2, 20), Version(3)
    table = names(half, whole, unknown)
    for version in (whole, unknown, half):
        table.flushed(KEY, version)
    assert table.lookup(KEY) is half
    assert table.to_rename(KEY, 20) is whole
    assert table.to_rename(KEY, 10) is half
    assert table.to_rename(KEY, 30) is half, "mv has none"
    assert table.to_rename(KEY, 0) is half, "unknown is nobody"
    assert table.unlink(KEY, 20) == [whole]
    assert table.to_rename(KEY, 20) is half
    table.opened(KEY, half)
    assert table.to_rename(KEY, 10) is unknown, "its own is still being written"


def test_of_its_own_versions_a_process_means_the_newest() -> None:
    superseded, again, older, other = Version(1, 10), Version(1, 10), Version(2, 10), Version(3, 20)
    table = names(superseded, older, other)
    table.closed(KEY, superseded, 0.0)
    superseded.inode = 4
    table.rewritten(KEY, superseded, again, 0.0)
    for version in (older, again, other):
        table.closed(KEY, version, 0.0)
    taken = []
    while (renamed := table.to_rename(KEY, 10)) is not None:
        table.remove(KEY, renamed)
        taken.append(renamed)
    assert taken == [again, older, superseded, other]


def test_rewritten_bytes_come_last() -> None:
    torn, again = Version(1), Version(1)
    table = names(torn)
    table.closed(KEY, torn, 0.0)
    torn.inode = 2
    table.rewritten(KEY, torn, again, 1.0)
    assert table.lookup(KEY) is torn  # until the new one is closed
    table.closed(KEY, torn, 1.0)  # its late release does not make it first again
    table.closed(KEY, again, 2.0)
    assert table.lookup(KEY) is again
    table.remove(KEY, again)
    assert table.to_rename(KEY) is torn


def test_unlink_takes_what_is_shown_and_what_is_superseded() -> None:
    old, new, other = Version(1), Version(1), Version(3)
    table = names(old, other)
    table.closed(KEY, old, 0.0)
    table.rewritten(KEY, old, new, 0.0)
    table.closed(KEY, new, 0.0)
    assert table.unlink(KEY) == [new, old]
    assert table.all() == [other]


def test_who_unlinks_a_name_that_another_process_has_written_anew_does_not_leave_it_there() -> None:
    mine, fresh, other = Version(1, process=10), Version(2, process=20), Version(3)
    table = names(mine, other)
    table.closed(KEY, mine, 0.0)
    table.rewritten(KEY, mine, fresh, 0.0)
    table.closed(KEY, fresh, 0.0)
    assert table.unlink(KEY, 10) == [fresh, mine]
    assert table.lookup(KEY) is None


def test_closed_versions_expire_and_superseded_ones_sooner() -> None:
    old, new, writing = Version(1), Version(1), Version(3)
    table = names(old, writing)
    table.closed(KEY, old, 0.0)
    table.rewritten(KEY, old, new, 0.0)
    table.closed(KEY, new, 0.0)
    assert table.expire(SUPERSEDED_TTL_S - 1, 600) == []
    assert table.expire(SUPERSEDED_TTL_S, 600) == [old]
    assert table.expire(600, 600) == [new]
    assert table.all() == [writing]


class Writers(RuleBasedStateMachine):
    """Any number of writers of one name, in any order: every closed version can be renamed once, none twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table: TempNames[Version] = TempNames()
        self.writing: list[Version] = []
        self.renames_due = 0
        self.taken: list[Version] = []
        self.numbers = 0

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers

    @rule(process=st.integers(0, 2))
    def open_to_write(self, process: int) -> None:
        shown = self.table.lookup(KEY)
        if shown is None:
            version = Version(self._number(), process)
            self.table.opened(KEY, version)
        else:
            version = Version(shown.inode, process)
            shown.inode = self._number()
            self.table.rewritten(KEY, shown, version, 0.0)
        self.writing.append(version)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), flush=st.booleans())
    def close(self, data: st.DataObject, flush: bool) -> None:
        version = data.draw(st.sampled_from(self.writing))
        self.writing.remove(version)
        if flush:
            self.table.flushed(KEY, version)
        self.table.closed(KEY, version, 0.0)
        self.renames_due += 1

    @precondition(lambda self: self.renames_due)
    @rule(looked_up=st.booleans(), process=st.integers(0, 2))
    def rename(self, looked_up: bool, process: int) -> None:
        shown = self.table.lookup(KEY) if looked_up else None
        version = self.table.to_rename(KEY, process)
        assert version is not None
        own = [v for v in self.table.all() if v not in self.writing and process and v.process == process]
        assert version in own if own else (shown is None or version is shown)
        assert version not in self.taken
        assert version not in self.writing
        self.table.remove(KEY, version)
        self.taken.append(version)
        self.renames_due -= 1

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.table) == len(self.writing) + self.renames_due
        assert (self.table.lookup(KEY) is not None) == (self.renames_due > 0)


Writers.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestWriters = Writers.TestCase
