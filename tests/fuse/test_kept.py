"""Whoever has a file open keeps its content, whatever becomes of its name and of its block."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.calls import error_of
from tests.support.child import in_child
from tests.support.cluster import wait_until
from tests.support.fsops import Bytes, Map
from tests.support.modes import MODES, Pair, mounted_pair
from tests.support.sealed import FIRST, NEW, SIZE, put


def unlinked(path: Path) -> None:
    path.unlink()


def replaced_by_a_put(path: Path) -> None:
    put(path, NEW)


def replaced_by_a_rename(path: Path) -> None:
    path.with_name("other").write_bytes(NEW)
    path.with_name("other").rename(path)


def written_over(path: Path) -> None:
    path.write_bytes(NEW)


def moved_away(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


GOINGS: Final = [unlinked, replaced_by_a_put, replaced_by_a_rename, written_over, moved_away]
NAMELESS: Final = (unlinked, replaced_by_a_put, replaced_by_a_rename)
"""After these the kernel knows that the open file has no link any more. Of a close that replaces it it is not told."""


@pytest.mark.parametrize("goes", GOINGS, ids=lambda goes: goes.__name__)
def test_an_open_file_keeps_its_content(pair: Pair, place: Path, goes: Callable[[Path], None]) -> None:
    """Open, mapped, and on the other mount, whose reader may have nothing of it in memory yet."""

    def work() -> None:
        path = place / "k"
        put(path, FIRST)
        fds = [os.open(mount / place.name / "k", os.O_RDONLY) for mount in (pair.a, pair.b)]
        views = [Map(fd, SIZE) for fd in fds]
        goes(path)
        for fd, view in zip(fds, views, strict=True):
            assert os.pread(fd, SIZE + 1, 0) == view.read() == FIRST
            assert os.fstat(fd).st_size == SIZE
        assert goes not in NAMELESS or os.fstat(fds[0]).st_nlink == 0

    in_child(work)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_an_open_file_keeps_its_content_through_eviction(tmp_path: Path, mode: str) -> None:
    """The only block there is must make room: its name goes, its bytes stay with who has it open."""
    size = 20 << 20
    data = Bytes(3, size).value

    def work(directory: Path) -> None:
        put(directory / "held", data)
        fd = os.open(directory / "held", os.O_RDONLY)
        view = Map(fd, size)
        assert error_of(lambda: put(directory / "next", data)) == "ENOSPC"  # the held bytes are not free as yet
        wait_until(lambda: not (directory / "held").exists(), "its name went")  # a look-up serves for a second
        assert os.pread(fd, size + 1, 0) == view.read() == data
        view.close()
        os.close(fd)
        put(directory / "next", data)
        assert (directory / "next").read_bytes() == data

    with mounted_pair(tmp_path, mode, capacity="32MiB") as pair:
        in_child(work, pair.a.path)
