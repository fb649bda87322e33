"""The limits of a hand-over: a file system process that hangs or does not come back, a keeper that dies, and a master
that is away while it happens. Nobody waits longer than the deadline, nobody is told that a directory is gone.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvstore.keeper.admin import NoKeeper
from tests.fuse.calls import error_of
from tests.support.child import in_child
from tests.support.cluster import Cluster, Process, wait_until
from tests.support.crew import Crew, shift
from tests.support.kept import fs_pid, has_ended, kill_fs, status, wait_serving
from tests.support.modes import MODES, mode_options
from tests.support.mounts import Mount, detach, mounted
from tests.support.puts import Put, get
from tests.support.versions import Version

DEADLINE_S: Final = 2.0
SLACK_S: Final = 3.0
"""The keeper looks at its clocks and the process gives signs of life once a second."""
AWAY: Final = {"EIO", "ETIMEDOUT"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("passthrough" not in MODES, reason="without passthrough there is no keeper"),
]


class Place(NamedTuple):
    cluster: Cluster
    mount: Mount
    path: Path
    """A directory with one file in it, ``0.data``."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A mount with a short deadline, and a cache that forgets at once."""
    with (
        Cluster(tmp_path, workers=1) as cluster,
        mounted(
            cluster, tmp_path / "m", cluster.workers[0], *mode_options("passthrough"), "--deadline", f"{DEADLINE_S:g}s"
        ) as mount,
    ):
        path = mount / "d"
        in_child(path.mkdir)
        in_child(lambda: list(Put(path, 1, length_bytes=1 << 20).steps()))
        yield Place(cluster, mount, path)


class Answers(NamedTuple):
    """Of calls that were made one after the other: how each ended, and the longest."""

    ends: Counter[str]
    longest_s: float


def ask(path: Path, stop: Path) -> Answers:
    """Calls of several kinds, each new to the kernel."""
    ends, longest_s = Counter[str](), 0.0
    calls: list[Callable[[int], object]] = [
        lambda turn: os.stat(path / f"new{turn}"),
        lambda turn: os.listdir(path),
        lambda turn: os.statvfs(path),
        lambda turn: get(path, 0),
        lambda turn: (path / f"{turn}.tmp").write_bytes(b"x"),
    ]
    for turn in shift(stop):
        name = ("stat", "list", "statvfs", "get", "write")[turn % len(calls)]
        start_s = time.monotonic()
        ends[f"{name} {error_of(calls[turn % len(calls)], turn)}"] += 1
        longest_s = max(longest_s, time.monotonic() - start_s)
    return Answers(ends, longest_s)


def errors_of(ends: Counter[str]) -> set[str]:
    """Without what is right: an unknown name is not there."""
    return {end.split()[1] for end in ends if end != "stat ENOENT"} - {"ok"}


def test_a_stopped_process_is_answered_for_and_replaced(place: Place, tmp_path: Path) -> None:
    old = fs_pid(place.mount.path)
    with Crew(tmp_path) as crew:
        asking = [crew.start(ask, place.path, crew.stop) for _ in range(3)]
        os.kill(old, signal.SIGSTOP)
        wait_until(lambda: fs_pid(place.mount.path) not in (0, old), "it is replaced")
        wait_serving(place.mount.path)
        crew.call_off()
        for answers in crew.together(asking):
            assert errors_of(answers.ends) <= {"EIO"}
            assert answers.longest_s < DEADLINE_S + SLACK_S
    assert in_child(get, place.path, 0) == Version(0, 1, 0, 1 << 20)


def test_a_process_that_does_not_come_back(place: Place, tmp_path: Path) -> None:
    """EIO at the deadline, then at once; an open file goes on; and when one comes back after all, it works again."""
    with Crew(tmp_path) as crew, killing(place.mount, DEADLINE_S + SLACK_S + 2.0):
        asking = crew.start(ask, place.path, crew.stop)
        wait_until(lambda: status(place.mount.path)["state"] == "failing", "nobody waits any more")
        errors, seconds = in_child(many_stats, place.path)
        assert errors == {"EIO"}
        assert seconds < DEADLINE_S
        crew.call_off()
        answers = asking.join()
    assert errors_of(answers.ends) == {"EIO"}
    assert answers.longest_s < DEADLINE_S + SLACK_S
    wait_serving(place.mount.path)
    assert in_child(get, place.path, 0) == Version(0, 1, 0, 1 << 20)


def many_stats(path: Path) -> tuple[set[str], float]:
    start_s = time.monotonic()
    return {error_of(os.stat, path / f"other{i}") for i in range(100)}, time.monotonic() - start_s


class killing:  # noqa: N801 - reads as a verb
    """Kills every file system process of the mount as soon as there is one, for so long."""

    def __init__(self, mount: Mount, duration_s: float) -> None:
        self._path, self._end_s = mount.path, time.monotonic() + duration_s
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        keeper = int(status(self._path)["pid"])
        while time.monotonic() < self._end_s:
            for pid in children(keeper):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


# ---- the master is away meanwhile ----


class Absence(NamedTuple):
    """How a child tells this process, the master's parent, to make it go away and come back: by files."""

    leave: Path
    gone: Path
    come_back: Path

    def begin(self) -> None:
        self.leave.touch()
        wait_until(self.gone.exists, "the master is away")


def carry_on(place: Place, absence: Absence) -> None:
    """Works in the directory while the master is away and the file system process is killed."""
    os.chdir(place.path)
    here = Path(".")
    sealed, steps = os.open("0.data", os.O_RDONLY), Put(here, 2, length_bytes=500_000).steps()
    assert [next(steps), next(steps)] == ["open", "half"]
    before = os.pread(sealed, 1 << 20, 0)
    absence.begin()
    try:
        kill_fs(place.mount.path)
        assert os.pread(sealed, 1 << 20, 0) == before
        assert Path.cwd() == place.path
        for directory in (place.mount.path, place.path, here):
            assert error_of(os.stat, directory) in {"ok", *AWAY}
            assert error_of(os.listdir, directory) in AWAY
        assert error_of(os.mkdir, "new") in AWAY
        assert [next(steps), next(steps)] == ["written", "closed"]
        assert error_of(os.rename, "0.tmp", "0.data") in AWAY
    finally:
        absence.come_back.touch()
    wait_until(lambda: error_of(os.rename, "0.tmp", "0.data") == "ok", "the put can be ended")
    assert get(here, 0) == Version(0, 2, 0, 500_000)
    assert os.listdir(".") == ["0.data"]
    assert os.pread(sealed, 1 << 20, 0) == before


@pytest.mark.parametrize("dead", [False, True], ids=["stopped", "dead"])
def test_killed_while_the_master_is_away(place: Place, tmp_path: Path, dead: bool) -> None:
    master, absence = place.cluster.master, Absence(tmp_path / "leave", tmp_path / "gone", tmp_path / "come-back")
    with Crew(tmp_path) as crew:
        working = crew.start(carry_on, place, absence)
        wait_until(absence.leave.exists, "the master is to leave")
        master.kill() if dead else master.signal(signal.SIGSTOP)
        absence.gone.touch()
        wait_until(absence.come_back.exists, "the master is to come back", 40)
        master.start() if dead else master.signal(signal.SIGCONT)
        working.join(40)


# ---- the keeper dies ----


def node(cluster: Cluster, root: Path, directory: Path) -> Process:
    """A node daemon with a worker and a mount."""
    config = root / "node.toml"
    config.write_text(
        f'[worker]\nnode_id = "node-9"\nmaster = "{cluster.url}"\nlisten = "127.0.0.1:0"\nhttp = ""\n'
        f'socket = "{Path(cluster.workers[0].socket).with_name("node.sock")}"\n\n'
        f'[[worker.volumes]]\ntier = "ssd"\npath = "{root / "volume"}"\ncapacity = "64MiB"\nfree_floor = "1MiB"\n\n'
        f'[[node.mounts]]\ndir = "{directory}"\n'
    )
    return cluster.process("node", ["node", "--config", str(config)])


def read_on(path: Path, stop: Path) -> int:
    """Reads of an open file."""
    fd = os.open(path, os.O_RDONLY)
    return sum(len(os.pread(fd, 4096, 0)) == 4096 for _ in shift(stop))


def test_a_keeper_that_dies_is_replaced_by_the_node(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=1) as cluster, Crew(tmp_path) as crew:
        mount = Mount(tmp_path / "mnt", node(cluster, tmp_path, tmp_path / "mnt"))
        try:
            mount.process.start()
            in_child(lambda: list(Put(mount.path, 1, length_bytes=1 << 20).steps()))
            reader = crew.start(read_on, mount / "0.data", crew.stop)
            wait_until(lambda: status(mount.path)["opens"] == 1, "the file is open")
            before = status(mount.path)
            os.kill(before["pid"], signal.SIGKILL)
            wait_until(lambda: keeper(mount.path) not in (0, before["pid"]), "another keeper has mounted anew")
            wait_serving(mount.path)
            assert in_child(get, mount.path, 0) == Version(0, 1, 0, 1 << 20)
            in_child(lambda: list(Put(mount.path, 2).steps()))
            assert in_child(get, mount.path, 0) == Version(0, 2, 0, 19_000)
            assert len(mounts_at(mount.path)) == 1, "the dead mount is gone"
            wait_until(lambda: has_ended(before["fs_pid"]), "its file system process has ended")
            crew.call_off()
            assert reader.join() > 0, "an open passthrough file needs nobody"
            assert mount.process.stop() == 0
            assert mounts_at(mount.path) == []
        finally:
            mount.process.close()
            detach(mount)


def keeper(path: Path) -> int:
    try:
        return int(status(path)["pid"])
    except NoKeeper:
        return 0


def mounts_at(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if line.split(" ")[4] == str(path)]
