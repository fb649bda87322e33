"""No call on a mount hangs, whoever is stopped, dead or cut off: about a second for the first one, nothing for the
next, and nobody is left in uninterruptible sleep.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from kvstore.config import MountConfig
from kvstore.core.limits import MOUNT_METADATA_TIMEOUT_S
from kvstore.fuse.mode import _trial_files
from tests.fuse.calls import error_of
from tests.support.child import Child, in_child
from tests.support.cluster import Cluster, Process, wait_until
from tests.support.modes import MODES, mode_options
from tests.support.mounts import Mount, mounted
from tests.support.proxy import Proxy

LATE_S: Final = 2.0
"""A busy machine's, on top of every deadline."""
FIRST_S: Final = MOUNT_METADATA_TIMEOUT_S + LATE_S
AT_ONCE_S: Final = 0.01
"""For the median of many."""
BACK_S: Final = 2.0 + LATE_S
FORGETFUL: Final = '[client]\nmetadata_ttl = "0s"\n'
"""So that every call would like to ask the master."""
DATA: Final = os.urandom(300_000)


@pytest.fixture(scope="module", params=MODES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Mount]]:
    root = tmp_path_factory.mktemp(request.param)
    with (
        Cluster(root, workers=2, dead_ticks=10_000) as cluster,
        mounted(cluster, root / "m", cluster.workers[0], *mode_options(request.param), settings=FORGETFUL) as mount,
    ):
        yield cluster, mount


def stop(process: Process) -> None:
    process.signal(signal.SIGSTOP)


def go_on(process: Process) -> None:
    process.signal(signal.SIGCONT)


AWAY: Final[dict[str, tuple[Callable[[Process], None], Callable[[Process], None]]]] = {
    "stopped": (stop, go_on),
    "killed": (Process.kill, Process.start),
}


@contextmanager
def away(process: Process, how: str) -> Iterator[None]:
    leave, come_back = AWAY[how]
    leave(process)
    try:
        yield
    finally:
        come_back(process)


Timed = tuple[str, str, float]
"""Of a call: which, how it ended, seconds."""


def timed(name: str, call: Callable[[], object]) -> Timed:
    begin = time.monotonic()
    return name, error_of(call), time.monotonic() - begin


def open_write_close(path: Path) -> None:
    path.write_bytes(DATA)


def every_call(root: Path) -> list[tuple[str, Callable[[], object]]]:
    """One of each that a file system has."""
    d = root / "d"
    return [
        ("stat", lambda: os.stat(d / "f")),
        ("stat of an unknown name", lambda: os.stat(d / "unknown")),
        ("stat of a directory", lambda: os.stat(d)),
        ("list", lambda: os.listdir(d)),
        ("statvfs", lambda: os.statvfs(root)),
        ("read", (d / "f").read_bytes),
        ("access", lambda: os.access(d / "f", os.R_OK)),
        ("write", lambda: open_write_close(d / "new")),
        ("overwrite", lambda: open_write_close(d / "f")),
        ("write a temporary file", lambda: open_write_close(d / "t.tmp")),
        ("rename a temporary file", lambda: os.rename(d / "t.tmp", d / "t")),
        ("rename", lambda: os.rename(d / "g", d / "h")),
        ("unlink", lambda: os.unlink(d / "g")),
        ("mkdir", lambda: os.mkdir(d / "e")),
        ("rmdir", lambda: os.rmdir(d / "empty")),
        ("chmod", lambda: os.chmod(d / "f", 0o600)),
        ("utime", lambda: os.utime(d / "f")),
        ("truncate", lambda: os.truncate(d / "f", 10)),
        ("getxattr", lambda: os.getxattr(d / "f", "user.kvstore.tier")),
        ("listxattr", lambda: os.listxattr(d / "f")),
    ]


def prepare(root: Path) -> None:
    (root / "d").mkdir(exist_ok=True)
    (root / "d" / "empty").mkdir(exist_ok=True)
    for name in ("f", "g"):
        (root / "d" / name).write_bytes(DATA)
    os.listdir(root / "d")
    os.statvfs(root)


def all_of(root: Path) -> list[Timed]:
    return [timed(name, call) for name, call in every_call(root)]


def median_of(call: Callable[[], object], count: int = 100) -> float:
    return statistics.median(timed("", call)[2] for _ in range(count))


def in_disk_sleep(pids: list[int]) -> list[str]:
    """Threads of these processes that nothing can interrupt just now."""
    found = []
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            try:
                text = stat.read_text()
            except OSError:
                continue  # it ended
            if text.rpartition(")")[2].split()[0] == "D":
                found.append(f"{pid}: {text[:60]}")
    return found


def everybody(cluster: Cluster, mount: Mount) -> list[int]:
    """Our processes and their children."""
    ours = [p.pid for p in (cluster.master, *cluster.workers, mount.process) if p.pid is not None]
    return [*ours, *(int(child) for pid in ours for child in children_of(pid))]


def children_of(pid: int) -> list[str]:
    return [c for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()]


@pytest.mark.parametrize("how", AWAY)
def test_every_call_while_the_master_is_away(place: tuple[Cluster, Mount], how: str) -> None:
    cluster, mount = place
    in_child(prepare, mount.path)
    with away(cluster.master, how):
        calls = in_child(all_of, mount.path)
        assert calls[0][2] < FIRST_S
        slow = [call for call in calls[1:] if call[2] > MOUNT_METADATA_TIMEOUT_S * 0.8]
        assert not slow, "one wait is enough"
        errors = {name: error for name, error, _ in calls}
        assert errors["stat"] == errors["statvfs"] == errors["stat of a directory"] == "ok", "from memory"
        assert errors["stat of an unknown name"] == "ENOENT"
        assert errors["list"] in ("ok", "EIO", "ETIMEDOUT")
        assert errors["mkdir"] in ("EIO", "ETIMEDOUT")
        d = mount / "d"
        assert in_child(median_of, lambda: error_of(os.stat, d / "unknown")) < AT_ONCE_S
        assert in_child(median_of, lambda: error_of(os.listdir, d)) < AT_ONCE_S
        assert in_child(median_of, lambda: os.statvfs(mount.path)) < AT_ONCE_S
        wait_until(lambda: not in_disk_sleep(everybody(cluster, mount)), "nobody sleeps for ever")
    wait_until(lambda: in_child(error_of, os.listdir, mount / "d") == "ok", "the mount works again", BACK_S)


def test_a_master_that_is_cut_off(place: tuple[Cluster, Mount], tmp_path: Path) -> None:
    """As by a partition: connections stay, new ones are made, and nothing comes through."""
    cluster, _ = place
    with (
        Proxy(cluster.master.facts["ENDPOINT"]) as proxy,
        mounted(cluster, tmp_path / "far", cluster.workers[0], "--master", f"kvstore://{proxy.endpoint}") as mount,
    ):
        in_child(prepare, mount.path)
        proxy.cut()
        for command in (["ls", "-l"], ["stat"], ["df"]):
            begin = time.monotonic()
            subprocess.run([*command, str(mount / "d")], check=False, timeout=FIRST_S + 5.0, capture_output=True)
            assert time.monotonic() - begin < FIRST_S, command
        assert in_child(median_of, lambda: error_of(os.stat, mount / "d" / "unknown")) < AT_ONCE_S
        proxy.mend()
        wait_until(lambda: in_child(error_of, os.listdir, mount / "d") == "ok", "it is found again", BACK_S)


@pytest.mark.parametrize("how", AWAY)
def test_every_call_while_the_local_worker_is_away(place: tuple[Cluster, Mount], how: str) -> None:
    """One wait for its silence, then all goes over the network."""
    cluster, mount = place
    in_child(prepare, mount.path)
    with away(cluster.workers[0], how):
        children = [Child(all_of, mount.path), Child(all_of, mount.path)]
        for child in children:
            calls = child.join(60.0)
            waited = [call for call in calls if call[2] > MOUNT_METADATA_TIMEOUT_S * 0.8]
            assert sum(s for *_, s in waited) < FIRST_S + LATE_S, waited
        assert in_child(error_of, open_write_close, mount / "d" / "meanwhile") == "ok"
        assert in_child((mount / "d" / "meanwhile").read_bytes) == DATA
        wait_until(lambda: not in_disk_sleep(everybody(cluster, mount)), "nobody sleeps for ever")
    in_child(prepare, mount.path)
    wait_until(lambda: in_child(error_of, (mount / "d" / "g").read_bytes) == "ok", "its blocks are back")


def test_a_mount_is_made_while_the_worker_is_silent(place: tuple[Cluster, Mount], tmp_path: Path) -> None:
    """The probe for passthrough does not wait for it long, nor does the first call."""
    cluster, _ = place
    with away(cluster.workers[1], "stopped"):
        begin = time.monotonic()
        with _trial_files(MountConfig(worker_socket=cluster.workers[1].socket)) as files:
            assert files == []
        assert time.monotonic() - begin < FIRST_S
        with mounted(cluster, tmp_path / "late", cluster.workers[1]) as mount:
            name, error, took_s = in_child(timed, "write", lambda: open_write_close(mount / "made"))
            assert (error, took_s < FIRST_S) == ("ok", True), (name, error, took_s)
