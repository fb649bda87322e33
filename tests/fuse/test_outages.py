"""What the mount does while something is away, and after. Nothing hangs: every child has its deadline."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse.calls import error_of
from tests.fuse.conftest import Store
from tests.support.child import Child, in_child
from tests.support.cluster import Cluster, wait_until
from tests.support.mounts import mounted

SHORT_MEMORY = '[mount]\nstale_max = "0s"\n\n[client]\nmetadata_ttl = "0s"\n'


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with (
        Cluster(tmp_path, workers=2) as cluster,
        mounted(cluster, tmp_path / "a", cluster.workers[0]) as a,
        mounted(cluster, tmp_path / "b", cluster.workers[1]) as b,
    ):
        yield Store(cluster, a, b)


def test_the_master_is_killed_and_comes_back_under_use(store: Store) -> None:
    def use(path: Path) -> tuple[int, set[str]]:
        done, failures, end = 0, set(), time.monotonic() + 8
        i = 0
        while time.monotonic() < end:
            i += 1
            name, data = f"{path.parent.name}{i}", os.urandom(100_000)
            try:
                (path / f"{name}.tmp").write_bytes(data)
                os.rename(path / f"{name}.tmp", path / name)
                assert (path / name).read_bytes() == data
                done += 1
            except OSError as error:
                failures.add(errno.errorcode[error.errno or 0])
                time.sleep(0.05)
        return done, failures

    children = []
    for mount in (store.a, store.b):
        in_child((mount / "d").mkdir, exist_ok=True)
        children.append(Child(use, mount / "d"))
    for _ in range(2):
        time.sleep(1.5)  # not a wait for something: load runs meanwhile
        store.cluster.master.restart()
    for child in children:
        done, failures = child.join(40)
        assert done > 10
        assert failures <= {"EIO", "ETIMEDOUT", "ENOENT"}
    assert names_in(store.a / "d") == names_in(store.b / "d")


def names_in(directory: Path) -> set[str]:
    """Without the temporary ones, which a put leaves on its own mount when it fails."""
    return {name for name in in_child(os.listdir, directory) if not name.endswith(".tmp")}


def test_without_the_master(store: Store) -> None:
    in_child((store.a / "d").mkdir)
    in_child((store.a / "d" / "f").write_bytes, b"remembered")
    in_child(os.stat, store.a / "d" / "f")
    store.cluster.master.kill()

    def work() -> None:
        d = store.a / "d"
        # One deadline is paid once; 200 more of them would not fit into this child's.
        assert {error_of(os.stat, d / f"unknown{i}") for i in range(200)} == {"ENOENT"}
        assert d.is_dir()
        assert (d / "f").read_bytes() == b"remembered"
        assert error_of(os.mkdir, d / "new") in ("EIO", "ETIMEDOUT")
        assert error_of(os.unlink, d / "f") in ("EIO", "ETIMEDOUT")
        assert error_of(os.listdir, d) in ("EIO", "ETIMEDOUT")
        fd = os.open(d / "x.tmp", os.O_CREAT | os.O_WRONLY)
        os.write(fd, b"written meanwhile")
        os.close(fd)
        assert error_of(os.rename, d / "x.tmp", d / "x") in ("EIO", "ETIMEDOUT")
        fd = os.open(d / "plain", os.O_CREAT | os.O_WRONLY)
        os.write(fd, b"too")
        assert error_of(os.close, fd) in ("EIO", "ETIMEDOUT")

    in_child(work)
    store.cluster.master.start()
    wait_until(lambda: in_child(error_of, os.mkdir, store.a / "after") in ("ok", "EEXIST"), "the mount works again")
    # What could not be renamed is still there, and can be now.
    in_child(os.rename, store.a / "d" / "x.tmp", store.a / "d" / "x")
    assert in_child((store.b / "d" / "x").read_bytes) == b"written meanwhile"


def test_what_is_forgotten_is_a_miss_without_the_master_but_directories_stay(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path, workers=1) as cluster,
        mounted(cluster, tmp_path / "m", cluster.workers[0], settings=SHORT_MEMORY) as mount,
    ):
        in_child((mount / "d").mkdir)
        in_child((mount / "d" / "f").write_bytes, b"1")
        cluster.master.kill()

        def work() -> None:
            os.chdir(mount / "d")
            assert error_of(os.stat, "f") == "ENOENT"
            assert Path.cwd() == mount / "d"
            assert (mount / "d").is_dir()

        in_child(work)


def test_a_dead_worker_makes_misses_and_its_return_hits(store: Store) -> None:
    data = os.urandom(1 << 20)
    in_child((store.a / "f").write_bytes, data)
    in_child((store.a / "g").write_bytes, data)
    assert in_child((store.b / "f").read_bytes) == data  # node 1 has a replica of f now
    store.cluster.workers[0].kill()

    def on_b() -> str:
        return error_of((store.b / "g").read_bytes)

    assert in_child(on_b) == "ENOENT"
    assert in_child((store.b / "f").read_bytes) == data
    in_child((store.b / "h").write_bytes, data)
    # The mount whose own worker is away reads and writes over the network.
    store.cluster.wait_live("node-1")
    wait_until(lambda: in_child(error_of, (store.a / "f").read_bytes) == "ok", "node 1 reported its replica")
    assert in_child((store.a / "f").read_bytes) == data
    in_child((store.a / "i").write_bytes, data)
    assert in_child((store.b / "i").read_bytes) == data
    store.cluster.workers[0].start()
    store.cluster.wait_live("node-0", "node-1")
    wait_until(lambda: in_child(on_b) == "ok", "the block is found again")
    in_child((store.a / "j").write_bytes, data)
    assert in_child((store.b / "j").read_bytes) == data


def test_staging_survives_the_worker_s_restart(store: Store) -> None:
    pid = store.cluster.workers[0].pid
    assert pid is not None

    def work() -> None:
        fd = os.open(store.a / "k.tmp", os.O_CREAT | os.O_WRONLY)
        os.write(fd, b"x" * 300_000)
        os.kill(pid, signal.SIGKILL)
        os.close(fd)
        os.rename(store.a / "k.tmp", store.a / "k")
        assert (store.a / "k").read_bytes() == b"x" * 300_000

    in_child(work)


SILENCE_S = 4.0
"""Somebody finds out in one second; the rest is for a busy machine, and for those who came meanwhile."""


@pytest.mark.parametrize("passthrough", ["on", "off"])
def test_a_worker_that_is_stopped_costs_one_deadline(tmp_path: Path, passthrough: str) -> None:
    with (
        Cluster(tmp_path, workers=2, dead_ticks=10_000) as cluster,
        mounted(cluster, tmp_path / "m", cluster.workers[0], "--passthrough", passthrough) as mount,
    ):
        data = os.urandom(300_000)

        def put(name: str) -> str:
            def work() -> None:
                (mount / f"{name}.tmp").write_bytes(data)
                os.rename(mount / f"{name}.tmp", mount / name)

            return error_of(work)

        def get(name: str) -> str:
            return error_of((mount / name).read_bytes)

        assert in_child(put, "before") == "ok"
        cluster.workers[0].signal(signal.SIGSTOP)
        try:
            begin = time.monotonic()
            children = [*(Child(put, f"at once {i}") for i in range(6)), *(Child(get, "before") for _ in range(3))]
            assert {child.join() for child in children} <= {"ok", "ENOENT", "ETIMEDOUT"}
            assert time.monotonic() - begin < SILENCE_S
            begin = time.monotonic()
            assert [in_child(put, f"then {i}") for i in range(10)] == ["ok"] * 10
            assert in_child(get, "before") == "ENOENT"
            assert in_child((mount / "then 9").read_bytes) == data
            assert time.monotonic() - begin < 2 * SILENCE_S, "all of them together; mostly starting processes"
        finally:
            cluster.workers[0].signal(signal.SIGCONT)
        wait_until(lambda: in_child(get, "before") == "ok", "the worker is used again")
        assert in_child(put, "after") == "ok"
        names = in_child(os.listdir, mount.path)
        assert all(in_child((mount / name).read_bytes) == data for name in names if not name.endswith(".tmp"))


def test_without_a_local_worker(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    with Cluster(tmp_path, workers=1) as cluster, mounted(cluster, tmp_path / "m", None) as mount:
        in_child((mount / "f").write_bytes, data)
        assert in_child((mount / "f").read_bytes) == data
        in_child((mount / "k.tmp").write_bytes, data)
        in_child(os.rename, mount / "k.tmp", mount / "k")
        assert in_child((mount / "k").read_bytes) == data

        def append() -> bytes:
            with (mount / "f").open("ab") as out:
                out.write(b"end")
            return (mount / "f").read_bytes()

        assert in_child(append) == data + b"end"


FAULTS = """
import asyncio
from kvstore.fuse import files, space, tree

async def bug(*args, **kwargs):
    raise ZeroDivisionError("injected")

async def cancelled(*args, **kwargs):
    raise asyncio.CancelledError

files.Files.read = bug
files.Files.sync = cancelled
space.Space.get = bug
"""


def test_a_handler_that_raises_is_an_errno_not_a_hang(tmp_path: Path) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(FAULTS)
    environ = {"PYTHONPATH": f"{hooks}{os.pathsep}{Path(__file__).parents[2]}"}
    with (
        Cluster(tmp_path, workers=1) as cluster,
        mounted(cluster, tmp_path / "m", cluster.workers[0], "--passthrough", "off", environ=environ) as mount,
    ):

        def work() -> None:
            (mount / "f").write_bytes(b"x")
            assert error_of((mount / "f").read_bytes) == "EIO"
            assert error_of(os.statvfs, mount.path) == "EIO"
            fd = os.open(mount / "g", os.O_CREAT | os.O_WRONLY)
            assert error_of(os.fsync, fd) == "EIO"
            os.close(fd)
            assert sorted(os.listdir(mount.path)) == ["f", "g"]

        in_child(work)
        assert "internal error in read" in mount.process.log_tail()
        assert "injected" in mount.process.log_tail()


def test_what_could_not_be_read_is_stored_again_even_if_it_is_equal(tmp_path: Path) -> None:
    """A node dies, and the master has not noticed: LMCache misses, computes the chunk again and stores it."""
    data = os.urandom(300_000)
    with (
        Cluster(tmp_path, workers=2, dead_ticks=10_000) as cluster,
        mounted(cluster, tmp_path / "a", cluster.workers[0]) as a,
        mounted(cluster, tmp_path / "b", cluster.workers[1]) as b,
    ):
        in_child(put_and_rename, a.path, data)
        cluster.workers[0].kill()
        assert in_child(error_of, (b / "chunk.data").read_bytes) == "ENOENT"
        in_child(put_and_rename, b.path, data)
        assert in_child((b / "chunk.data").read_bytes) == data


def put_and_rename(directory: Path, data: bytes) -> None:
    (directory / "chunk.tmp").write_bytes(data)
    os.rename(directory / "chunk.tmp", directory / "chunk.data")


def test_small_temporary_files_take_little_room(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path, workers=1, capacity="32MiB") as cluster,
        mounted(cluster, tmp_path / "m", cluster.workers[0]) as mount,
    ):
        in_child(put_and_rename, mount.path, os.urandom(20_000_000))

        def leave_many() -> None:
            for i in range(200):
                (mount / f"t{i}.tmp").write_bytes(b"x" * 1000)

        in_child(leave_many)
        assert len(in_child((mount / "chunk.data").read_bytes)) == 20_000_000, "nothing was evicted for them"
