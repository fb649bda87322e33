"""What `tests.fuse.test_dual` found once, in its shortest form: the mount and the plain side stay alike."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests.fuse.test_dual import DIFFERENCES, Dual
from tests.support import fsops
from tests.support.dual import ACTORS, Handle, SideBySide, World, attribute_setter, shared_world
from tests.support.fsops import call
from tests.support.modes import MODES


def opened(both: SideBySide, actor: int, path: str, flags: int) -> Handle:
    handle = both.open(actor, path, flags, 0o644)
    assert handle is not None
    return handle


def a_read_only_create_of_a_temporary_file(both: SideBySide) -> None:
    both.close(opened(both, 0, "y.tmp", os.O_RDONLY | os.O_CREAT))


def a_read_only_open_truncates(both: SideBySide) -> None:
    both.close(opened(both, 0, "a", os.O_RDONLY | os.O_TRUNC))
    both.close(opened(both, 0, "x.tmp", os.O_RDONLY | os.O_TRUNC))


def a_reader_that_made_the_file_sees_no_half_of_it(both: SideBySide) -> None:
    reader, writer = opened(both, 0, "b", os.O_RDONLY | os.O_CREAT), opened(both, 1, "b", os.O_WRONLY)
    both.step(1, call(fsops.write, writer.number, both.data(100)))
    both.step(0, call(fsops.read, reader.number, 100))


def a_temporary_file_that_is_written_on(both: SideBySide) -> None:
    """Its second version is longer than the first."""
    writer = opened(both, 0, "x.tmp", os.O_RDWR)
    both.step(0, call(fsops.pwrite, writer.number, 5000, both.data(100)))
    both.close(writer)
    both.step(1, call(fsops.stat_path, "x.tmp"))


def a_lock_file(both: SideBySide) -> None:
    """As flock(1) opens it."""
    for actor in range(ACTORS):
        handle = opened(both, actor, "b", os.O_RDONLY | os.O_CREAT)
        both.step(actor, call(fsops.flock, handle.number, fcntl.LOCK_EX))


def attributes_change_while_it_is_written(both: SideBySide) -> None:
    writer = opened(both, 0, "a", os.O_WRONLY)
    both.step(1, call(fsops.chmod, "a", 0o600))
    both.promise.attributes_changed("a", attribute_setter(0o600, 0, False))
    both.step(0, call(fsops.stat_open, writer.number))


def attributes_change_while_it_is_open_elsewhere(both: SideBySide) -> None:
    both.step(0, call(fsops.open_file, 99, "a", os.O_RDONLY), side="other")
    both.step(0, call(fsops.chmod, "a", 0o600))
    both.step(0, call(fsops.stat_path, "a"), side="other")


def a_directory_over_one_with_a_temporary_file(both: SideBySide) -> None:
    both.step(0, call(fsops.make_directory, "e"))
    both.close(opened(both, 0, "e/x.tmp", os.O_WRONLY | os.O_CREAT))
    both.step(0, call(fsops.rename, "d", "e"))


def a_truncation_to_the_length_that_is_published(both: SideBySide) -> None:
    writer = opened(both, 0, "b", os.O_WRONLY | os.O_CREAT)
    both.step(0, call(fsops.write, writer.number, both.data(100)))
    both.cut(0, "b", 0)


def a_truncation_by_name_under_a_writer(both: SideBySide) -> None:
    """Whoever truncates by name has no close that could publish it."""
    opened(both, 0, "a", os.O_WRONLY)
    both.cut(1, "a", 0)
    for side in ("mount", "other"):
        both.step(1, call(fsops.read_file, "a"), side=side)


def a_second_writer_of_a_file_that_was_made_just_now(both: SideBySide) -> None:
    for actor in range(ACTORS):
        opened(both, actor, "b", os.O_RDWR | os.O_CREAT)


def a_truncation_after_the_close_of_a_duplicate(both: SideBySide) -> None:
    writer = opened(both, 0, "b", os.O_WRONLY | os.O_CREAT)
    both.step(0, call(fsops.write, writer.number, both.data(100)))
    both.close(both.duplicate(writer))
    both.step(0, call(fsops.truncate_open, writer.number, 10))


FOUND: Final = [
    a_read_only_create_of_a_temporary_file, a_read_only_open_truncates, a_reader_that_made_the_file_sees_no_half_of_it,
    a_temporary_file_that_is_written_on, a_lock_file, attributes_change_while_it_is_written,
    attributes_change_while_it_is_open_elsewhere, a_directory_over_one_with_a_temporary_file,
    a_truncation_to_the_length_that_is_published, a_truncation_by_name_under_a_writer,
    a_second_writer_of_a_file_that_was_made_just_now, a_truncation_after_the_close_of_a_duplicate,
]  # fmt: skip


@pytest.fixture(scope="module", params=MODES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with shared_world(tmp_path_factory.mktemp("found"), request.param, DIFFERENCES) as world:
        yield world


@pytest.mark.parametrize("found", FOUND, ids=lambda found: found.__name__)
def test_both_sides_agree(world: World, found: Callable[[SideBySide], None]) -> None:
    Dual.world = world
    both = Dual()
    found(both)
    both.teardown()
