"""The mount outlives its file system process: killed, stopped or replaced under load, nobody sees more than a pause."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvstore import Client
from tests.fuse.calls import error_of
from tests.support import load
from tests.support.child import Child, in_child
from tests.support.cluster import Cluster, wait_until
from tests.support.crew import Crew, shift
from tests.support.kept import fs_pid, kill_fs, status
from tests.support.modes import MODES, mode_options
from tests.support.mounts import Mount, mounted
from tests.support.puts import Put, get
from tests.support.versions import Version

LONG: Final = bool(os.environ.get("KVSTORE_LONG"))
KILLS: Final = 200 if LONG else 10
UPGRADES: Final = 50 if LONG else 5
DEADLINE_S: Final = 10.0
"""The default: what nobody answers gets EIO then."""
GAP_S: Final = 0.1
"""How long an open passthrough file may keep its user waiting, beside what a busy machine makes everybody wait: a fifth
of what a file system process takes to start.
"""
MIB: Final = 1 << 20
MASTER_AWAY: Final = {"EIO", "ETIMEDOUT"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("passthrough" not in MODES, reason="without passthrough there is no keeper"),
]


class Place(NamedTuple):
    """A directory of a kept mount."""

    cluster: Cluster
    mount: Mount
    path: Path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Mount]]:
    root = tmp_path_factory.mktemp("kept")
    with (
        Cluster(root, workers=1, capacity="1GiB") as cluster,
        mounted(cluster, root / "m", cluster.workers[0], *mode_options("passthrough")) as mount,
    ):
        yield cluster, mount


@pytest.fixture
def place(kept: tuple[Cluster, Mount], tmp_path: Path) -> Place:
    cluster, mount = kept
    in_child(os.mkdir, mount / tmp_path.name)
    return Place(cluster, mount, mount / tmp_path.name)


def check(tallies: list[load.Tally], longest_s: float) -> None:
    """No call failed, none took longer, and everybody worked."""
    print(*tallies, sep="\n")
    assert {t.name: dict(t.errors) for t in tallies if t.errors} == {}
    assert min(t.turns for t in tallies) > 0
    assert max(t.longest_s for t in tallies) < longest_s


def test_killed_again_and_again_under_load(kept: tuple[Cluster, Mount], tmp_path: Path) -> None:
    _, mount = kept
    directory, luck = mount / tmp_path.name, random.Random(3)
    in_child(load.prepare, directory)
    before = status(mount.path)
    with Crew(tmp_path) as crew:
        workers = load.start_all(crew, directory)
        for _ in range(KILLS):
            time.sleep(luck.uniform(0.0, 0.3))
            kill_fs(mount.path)
        crew.call_off()
        check(crew.together(workers, 30), DEADLINE_S)
    after = status(mount.path)
    assert after["outages"] - before["outages"] == KILLS
    assert after["answered_eio"] == before["answered_eio"]


def test_upgraded_under_load(kept: tuple[Cluster, Mount], tmp_path: Path) -> None:
    _, mount = kept
    directory = mount / tmp_path.name
    in_child(load.prepare, directory)
    before = status(mount.path)
    with Crew(tmp_path) as crew:
        workers = load.start_all(crew, directory)
        for _ in range(UPGRADES):
            old = fs_pid(mount.path)
            done = subprocess.run(
                [sys.executable, "-m", "kvstore", "mount", "--upgrade", str(mount.path)],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert f"took over from {old}" in done.stdout
            assert fs_pid(mount.path) != old
        crew.call_off()
        check(crew.together(workers, 30), 3.0)
    after = status(mount.path)
    assert after["outages"] == before["outages"]
    assert after["answered_eio"] == before["answered_eio"]


# ---- what is open goes on ----


class Reads(NamedTuple):
    """Of an open file, while the file system process was away: how many, all of them right; the longest, and the
    longest of a plain file's beside it.
    """

    number: int
    longest_s: float
    plain_s: float


def read_on(path: Path, plain: Path, data: bytes, stop: Path) -> Reads:
    """Reads an open file and a map of it without a pause; opens nothing."""
    fd, plain_fd, luck = os.open(path, os.O_RDONLY), os.open(plain, os.O_RDONLY), random.Random(4)
    view, number, longest_s, plain_s = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ), 0, 0.0, 0.0
    for _ in shift(stop):
        at, start_s = luck.randrange(len(data) - 4096), time.monotonic()
        os.pread(plain_fd, 4096, at)
        plain_s = max(plain_s, (mid_s := time.monotonic()) - start_s)
        found = os.pread(fd, 4096, at), view[at : at + 4096]
        longest_s = max(longest_s, time.monotonic() - mid_s)
        assert found == (data[at : at + 4096],) * 2
        number += 1
    return Reads(number, longest_s, plain_s)


def write_on(path: Path, stop: Path) -> float:
    """Writes an open temporary file without a pause, ends it when called off; the longest write in seconds."""
    longest_s = 0.0
    with path.open("wb", buffering=0) as out:
        for turn in shift(stop):
            start_s = time.monotonic()
            out.write(turn.to_bytes(8, "little"))
            longest_s = max(longest_s, time.monotonic() - start_s)
            time.sleep(0.0005)
    os.rename(path, path.with_suffix(".data"))
    return longest_s


def test_open_files_are_read_and_written_meanwhile(place: Place, tmp_path: Path) -> None:
    data = os.urandom(4 * MIB)
    in_child((place.path / "sealed").write_bytes, data)
    (tmp_path / "plain").write_bytes(data)
    with Crew(tmp_path) as crew:
        reader = crew.start(read_on, place.path / "sealed", tmp_path / "plain", data, crew.stop)
        writer = crew.start(write_on, place.path / "w.tmp", crew.stop)
        wait_until(lambda: in_child(opens_of, place.mount, 2), "both files are open")
        for _ in range(3):
            kill_fs(place.mount.path)
        crew.call_off()
        reads, longest_write_s = reader.join(), writer.join()
    assert reads.number > 1000
    print(reads, longest_write_s)
    assert max(reads.longest_s, longest_write_s) < GAP_S + 2 * reads.plain_s
    written = in_child((place.path / "w.data").read_bytes)
    assert written == b"".join(turn.to_bytes(8, "little") for turn in range(len(written) // 8))


def opens_of(mount: Mount, count: int) -> bool:
    return bool(status(mount.path)["opens"] >= count)


def test_a_stopped_process_does_not_hold_up_open_files(place: Place, tmp_path: Path) -> None:
    data = os.urandom(MIB)
    in_child((place.path / "sealed").write_bytes, data)
    (tmp_path / "plain").write_bytes(data)
    with Crew(tmp_path) as crew:
        reader = crew.start(read_on, place.path / "sealed", tmp_path / "plain", data, crew.stop)
        wait_until(lambda: opens_of(place.mount, 1), "the file is open")
        pid = fs_pid(place.mount.path)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)  # how long it is stopped
        os.kill(pid, signal.SIGCONT)
        crew.call_off()
        reads = reader.join()
    assert reads.longest_s < GAP_S + 2 * reads.plain_s
    assert fs_pid(place.mount.path) == pid, "so short a pause is no reason to replace it"


# ---- one thing at a time, in a process that kills its mount's ----


def a_put_between_close_and_rename(place: Place) -> None:
    for _ in range(2):
        steps = Put(place.path, 1, length_bytes=3 * MIB).steps()
        while next(steps) != "closed":
            pass
        kill_fs(place.mount.path)
        assert os.listdir(place.path) == ["0.tmp"]
        assert next(steps) == "renamed"
        assert get(place.path, 0) == Version(0, 1, 0, 3 * MIB)
        os.unlink(place.path / "0.data")


def a_put_half_written(place: Place) -> None:
    for _ in range(2):
        steps = Put(place.path, 1, length_bytes=3 * MIB).steps()
        while next(steps) != "half":
            pass
        kill_fs(place.mount.path)
        assert os.listdir(place.path) == [], "half of a file is nobody's"
        assert list(steps) == ["written", "closed", "renamed"]
        assert get(place.path, 0) == Version(0, 1, 0, 3 * MIB)
        os.unlink(place.path / "0.data")


def a_process_killed_at_every_step_of_a_put(place: Place) -> None:
    steps = Put(place.path, 1, length_bytes=100_000).steps()
    for _ in steps:
        kill_fs(place.mount.path)
    assert get(place.path, 0) == Version(0, 1, 0, 100_000)


def a_put_by_way_of_a_temporary_directory(place: Place) -> None:
    """What makes such a name temporary is its directory's name."""
    (place.path / ".tmp").mkdir()
    for stop_at in ("half", "closed"):
        steps = Put(place.path, 1, length_bytes=100_000, temporary=".tmp/0.data").steps()
        while next(steps) != stop_at:
            pass
        kill_fs(place.mount.path)
        assert list(steps)[-1] == "renamed"
        assert get(place.path, 0) == Version(0, 1, 0, 100_000)
        assert os.listdir(place.path / ".tmp") == []
        os.unlink(place.path / "0.data")


def two_writers_of_one_temporary_name(place: Place) -> None:
    """Versions keep apart from each other, and keep their order."""
    puts = [Put(place.path, writer, length_bytes=500_000 + writer).steps() for writer in (1, 2)]
    for step in ("open", "half", "written", "closed"):
        assert [next(steps) for steps in puts] == [step] * 2
        kill_fs(place.mount.path)
    shown = set()
    for steps in puts:
        assert next(steps) == "renamed"
        version = get(place.path, 0)
        assert version is not None
        shown.add(version.writer)
    assert shown == {1, 2}
    assert os.listdir(place.path) == ["0.data"]


def an_ordinary_file_open_for_writing(place: Place) -> None:
    path = place.path / "f"
    path.write_bytes(b"0" * 10_000)
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"1" * 1000, 0)
    kill_fs(place.mount.path)
    assert os.pread(fd, 2000, 0) == b"1" * 1000 + b"0" * 1000
    os.pwrite(fd, b"2" * 1000, 9500)
    assert os.fstat(fd).st_size == 10_500
    os.ftruncate(fd, 10_400)
    os.fsync(fd)
    expected = b"1" * 1000 + b"0" * 8500 + b"2" * 900
    assert in_store(place, "f") == expected
    kill_fs(place.mount.path)
    os.pwrite(fd, b"3", 0)
    os.close(fd)
    assert path.read_bytes() == in_store(place, "f") == b"3" + expected[1:]


def a_new_file_open_for_writing(place: Place) -> None:
    fd = os.open(place.path / "f", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, b"one")
    kill_fs(place.mount.path)
    os.write(fd, b"two")
    os.close(fd)
    assert in_store(place, "f") == b"onetwo"


def an_appending_writer(place: Place) -> None:
    with (place.path / "f").open("ab", buffering=0) as out:
        out.write(b"one")
        kill_fs(place.mount.path)
        out.write(b"two")
    assert in_store(place, "f") == b"onetwo"


def a_file_without_a_name(place: Place) -> None:
    path = place.path / "f"
    path.write_bytes(b"kept" * 1000)
    fd = os.open(path, os.O_RDONLY)
    path.unlink()
    kill_fs(place.mount.path)
    assert os.pread(fd, 4000, 0) == b"kept" * 1000
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
    assert os.listdir(place.path) == []


def shared_maps_that_are_written(place: Place) -> None:
    fd = os.open(place.path / "0.tmp", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, MIB)
    view = mmap.mmap(fd, MIB)
    view[:4] = b"head"
    kill_fs(place.mount.path)
    view[-4:] = b"tail"
    view.flush()
    view.close()
    os.close(fd)
    os.rename(place.path / "0.tmp", place.path / "m")
    data = (place.path / "m").read_bytes()
    assert (data[:4], data[-4:], len(data)) == (b"head", b"tail", MIB)


def a_listing_half_read(place: Place) -> None:
    """Names that stay are listed once, whatever comes and goes meanwhile."""
    stay = {f"{i:03}-{'x' * 200}" for i in range(400)}
    for name in stay:
        (place.path / name).touch()
    with os.scandir(place.path) as entries:
        seen = [next(entries).name for _ in range(50)]
        kill_fs(place.mount.path)
        (place.path / "000-new").touch()
        (place.path / "999-new").touch()
        seen += [next(entries).name for _ in range(150)]
        kill_fs(place.mount.path)
        seen += [entry.name for entry in entries]
    assert len(seen) == len(set(seen))
    assert set(seen) - stay <= {"000-new", "999-new"}
    assert stay <= set(seen)


def locks(place: Place) -> None:
    path = place.path / "f"
    path.touch()
    with path.open("r+b") as mine:
        fcntl.lockf(mine, fcntl.LOCK_EX)
        fcntl.flock(mine, fcntl.LOCK_EX)
        for _ in range(2):
            assert in_child(lock_errors, path) == ["EAGAIN", "EAGAIN"]
            kill_fs(place.mount.path)
        fcntl.lockf(mine, fcntl.LOCK_UN)
        fcntl.flock(mine, fcntl.LOCK_UN)
        assert in_child(lock_errors, path) == ["ok", "ok"]


def lock_errors(path: Path) -> list[str]:
    with path.open("r+b") as file:
        return [error_of(lock, file, fcntl.LOCK_EX | fcntl.LOCK_NB) for lock in (fcntl.lockf, fcntl.flock)]


def in_store(place: Place, name: str) -> bytes:
    """What the store has under a name of the place's directory, past the mount."""
    with Client(place.cluster.url) as client:
        return bytes(client.get(f"{place.path.name}/{name}"))


CASES: Final[list[Callable[[Place], None]]] = [
    a_put_between_close_and_rename, a_put_half_written, a_process_killed_at_every_step_of_a_put,
    a_put_by_way_of_a_temporary_directory, two_writers_of_one_temporary_name, an_ordinary_file_open_for_writing,
    a_new_file_open_for_writing, an_appending_writer, a_file_without_a_name, shared_maps_that_are_written,
    a_listing_half_read, locks,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_survives(case: Callable[[Place], None], place: Place) -> None:
    Child(case, place).join(40)
