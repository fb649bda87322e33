"""A passthrough writer that never stops, on a small volume: the kernel asks nobody, and the cap holds all the same.

What was reported as failed is never published, nor is anything else in its place.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvstore.core.limits import MIB
from tests.fuse.calls import error_of
from tests.support.child import Child, in_child
from tests.support.cluster import Cluster, wait_until
from tests.support.fsops import Bytes
from tests.support.kept import kill_fs
from tests.support.modes import DEAD_TICKS, mode_options
from tests.support.mounts import Mount, mounted
from tests.support.sealed import put
from tests.support.small_fs import Filler
from tests.support.small_fs import mounted as mounted_fs

CAPACITY: Final = 64 * MIB
STEP: Final = 1 * MIB
RATE: Final = 100 * MIB
"""Bytes per second, so that the bound says something on any machine."""
TOTAL: Final = 400 * MIB
LATE_S: Final = 1.0
"""0.1 between two looks, 0.25 where the file has no name any more, up to 0.5 for eviction; machines are busy, too."""
BOUND: Final = int(RATE * LATE_S)
SMALL: Final = Bytes(5, 1 * MIB).value
OVER_S: Final = 60.0


class Small(NamedTuple):
    """A store with one worker of `CAPACITY`, and its mount."""

    cluster: Cluster
    mount: Mount

    def taken_bytes(self) -> int:
        """On the disk, by all files of the volume: also by one without a name, which the worker watches."""
        worker = self.cluster.workers[0]
        fds = Path(f"/proc/{worker.pid}/fd")
        gone = [fd for fd in fds.iterdir() if _is_unlinked(fd, worker.volume)]
        return sum(map(_taken, [*worker.volume.rglob("*"), *gone]))

    def used_bytes(self) -> int:
        """As the worker's books say."""
        return sum(volume.used_bytes for node in self.cluster.map().nodes for volume in node.volumes)

    def check_books(self) -> None:
        def are_exact() -> bool:
            return self.used_bytes() == sum(map(_taken, self.cluster.workers[0].block_files))

        wait_until(are_exact, "the books have the blocks on the disk, and nothing else")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Small]:
    with (
        Cluster(tmp_path, workers=1, capacity="64MiB", dead_ticks=DEAD_TICKS) as cluster,
        mounted(cluster, tmp_path / "m", cluster.workers[0], *mode_options("passthrough")) as mount,
    ):
        yield Small(cluster, mount)


def write_on(path: Path, half_way: Callable[[], None] = lambda: None) -> str:
    """Write `TOTAL` bytes at `RATE`, and never look back: what the close says."""
    fd, chunk, start = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), b"z" * STEP, time.monotonic()
    for done in range(STEP, TOTAL + 1, STEP):
        os.write(fd, chunk)
        if done == TOTAL // 2:
            half_way()
        time.sleep(max(0.0, start + done / RATE - time.monotonic()))
    return error_of(os.close, fd)


def fork_and_close() -> None:
    """The child of a fork closes what it inherited: the mount hears a close, and gives the file up."""
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def most_taken(small: Small, half_way: Callable[[], None]) -> int:
    """The most bytes that the disk had to hold while somebody wrote `TOTAL`."""
    writer, most, end = Child(write_on, small.mount / "endless.tmp", half_way), 0, time.monotonic() + TOTAL / RATE
    try:
        while time.monotonic() < end:
            most = max(most, small.taken_bytes())
            time.sleep(0.005)
    finally:
        assert writer.join(OVER_S) == "ENOSPC"
    return most


@pytest.mark.parametrize("half_way", [lambda: None, fork_and_close], ids=["one_close", "closed_by_a_fork"])
def test_a_writer_without_end_does_not_pass_the_cap(small: Small, half_way: Callable[[], None]) -> None:
    """Its close gives ENOSPC, others read and store, and in the end nothing of it is left."""
    directory = small.mount.path

    def put_some() -> None:
        for i in range(8):
            put(directory / f"block{i}", Bytes(i, 4 * MIB).value)
        put(directory / "read", SMALL)

    def read(fd: int) -> bytes:
        return os.pread(fd, len(SMALL) + 1, 0)

    in_child(put_some)
    reader = os.open(directory / "read", os.O_RDONLY)
    try:
        most = most_taken(small, half_way)
        assert CAPACITY // 2 < most <= CAPACITY + BOUND
        assert in_child(read, reader) == SMALL
    finally:
        os.close(reader)
    in_child(put, directory / "later", SMALL)
    assert in_child((directory / "later").read_bytes) == SMALL
    assert in_child(error_of, os.rename, directory / "endless.tmp", directory / "endless") == "ENOSPC"
    assert in_child(error_of, os.stat, directory / "endless") == "ENOENT"
    small.check_books()


def test_an_ordinary_name_never_shows_what_was_cut(small: Small) -> None:
    """It keeps what was published before, or is a miss where that had to make room."""
    path = small.mount / "name"

    def read() -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return path.read_bytes()
        return None

    in_child(put, path, SMALL)
    assert Child(write_on, path).join(OVER_S) == "ENOSPC"
    assert in_child(read) in (SMALL, None)
    small.check_books()


def overgrown(path: Path) -> int:
    """An fd of a file that was cut."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for _ in range(100):
        os.write(fd, b"z" * STEP)
    wait_until(lambda: os.fstat(fd).st_size == 0, "the file is cut")
    return fd


def test_fsync_says_it_too(small: Small) -> None:
    def write_and_sync() -> tuple[str, str]:
        fd = overgrown(small.mount / "x.tmp")
        return error_of(os.fsync, fd), error_of(os.close, fd)

    assert in_child(write_and_sync) == ("ENOSPC", "ENOSPC")


def _ftruncate(fd: int, path: Path) -> None:
    os.ftruncate(fd, 0)


def _truncate_by_path(fd: int, path: Path) -> None:
    os.truncate(path, 0)


def _open_truncating(fd: int, path: Path) -> None:
    """Its own descriptor: by its temporary name it would get a version of its own."""
    os.close(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_TRUNC))


NAMES: Final = pytest.mark.parametrize("name", ["x.tmp", "x"], ids=["temporary", "ordinary"])


@pytest.mark.parametrize(
    ("name", "emptied"),
    [
        ("x.tmp", _ftruncate),
        ("x.tmp", _open_truncating),
        ("x", _ftruncate),
        ("x", _open_truncating),
        ("x", _truncate_by_path),  # no path leads to a temporary version that is open
    ],
)
def test_it_does_not_begin_anew_under_an_open_handle(
    small: Small, name: str, emptied: Callable[[int, Path], None]
) -> None:
    """The kernel would go on writing to the file that was dropped, and an empty one would be published for it."""
    path, whole = small.mount / name, small.mount / "x"

    def write_anew() -> list[str]:
        fd = overgrown(path)
        answers = [error_of(os.fsync, fd), error_of(emptied, fd, path)]
        os.pwrite(fd, SMALL, 0)
        answers += [error_of(os.fsync, fd), error_of(os.close, fd)]
        return answers if path == whole else [*answers, error_of(os.rename, path, whole)]

    def read() -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return whole.read_bytes()
        return None

    in_child(put, whole, SMALL[::-1])
    assert set(in_child(write_anew)) == {"ENOSPC"}
    assert in_child(read) in (SMALL[::-1], None), "what was published before, if it did not have to make room"


@NAMES
def test_it_begins_anew_once_it_is_closed(small: Small, name: str) -> None:
    path, whole = small.mount / name, small.mount / "x"

    def write_anew() -> bytes:
        fd = overgrown(path)
        assert error_of(os.close, fd) == "ENOSPC"
        path.write_bytes(SMALL)
        if path != whole:
            path.rename(whole)
        return whole.read_bytes()

    assert in_child(write_anew) == SMALL


@NAMES
def test_a_write_that_found_the_disk_full_adds_nothing(tmp_path: Path, name: str) -> None:
    """Plain mode: what follows once there is room again stands right behind what was written before."""
    before, after = b"A" * 200_000, b"C" * 10

    def write_past_a_full_disk(path: Path, whole: Path, others: Filler) -> bytes:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        assert os.write(fd, before) == len(before)
        others.fill()
        answers = {error_of(os.write, fd, b"B" * MIB) for _ in range(2)}
        others.remove()
        assert answers == {"ENOSPC"}
        wait_until(lambda: error_of(os.write, fd, after) == "ok", "there is room again")
        os.close(fd)
        if path != whole:
            path.rename(whole)
        return whole.read_bytes()

    cluster = Cluster(tmp_path, workers=1, capacity="64MiB", dead_ticks=DEAD_TICKS)
    worker = cluster.workers[0]
    with (
        mounted_fs(worker.volume, "-t", "tmpfs", "-o", "size=12m", "kvstore-test"),
        cluster,
        mounted(cluster, tmp_path / "m", worker, *mode_options("plain")) as mount,
    ):
        written = in_child(write_past_a_full_disk, mount / name, mount / "x", Filler(worker.volume))
    assert written == before + after


@pytest.mark.parametrize("written_on", [0, 1 * MIB, 16 * MIB, 100 * MIB])
def test_a_successor_does_not_publish_it_either(small: Small, written_on: int) -> None:
    """The file system process dies after the file was cut and before anybody closed it."""
    path = small.mount / "x.tmp"

    def write_through_a_kill() -> tuple[str, str]:
        fd = overgrown(path)
        kill_fs(small.mount.path)
        if written_on:
            os.pwrite(fd, b"z" * STEP, written_on - STEP)  # behind a hole
        return error_of(os.close, fd), error_of(os.rename, path, path.with_name("x"))

    assert in_child(write_through_a_kill) == ("ENOSPC", "ENOSPC")
    assert in_child(error_of, os.stat, path.with_name("x")) == "ENOENT"


@pytest.mark.parametrize("comes_back", [False, True])
def test_without_the_worker_that_cut_it_it_is_not_published_either(
    small: Small, tmp_path: Path, comes_back: bool
) -> None:
    """What was staged is staged again then, from the bytes behind the mount's own fd: they are a hole."""
    path, worker, cut, go_on = small.mount / "x.tmp", small.cluster.workers[0], tmp_path / "cut", tmp_path / "go_on"

    def write_through_a_restart() -> tuple[str, str]:
        fd = overgrown(path)
        cut.touch()
        wait_until(go_on.exists, "the worker is gone")
        os.pwrite(fd, b"z" * STEP, 8 * MIB)
        return error_of(os.close, fd), error_of(os.rename, path, path.with_name("x"))

    writer = Child(write_through_a_restart)
    wait_until(cut.exists, "the file is cut")
    worker.kill()
    if comes_back:
        worker.start()
    go_on.touch()
    assert writer.join(OVER_S) == ("ENOSPC", "ENOSPC")
    assert in_child(error_of, os.stat, path.with_name("x")) == "ENOENT"


def _is_unlinked(fd: Path, volume: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        target = os.readlink(fd)
        return target.startswith(str(volume)) and target.endswith("(deleted)")
    return False


def _taken(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.stat().st_blocks * 512 if path.is_file() else 0
    return 0
