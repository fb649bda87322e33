"""``kvstore worker`` as a process, with a real master: what only a process shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.local import LocalWorker
from kvstore.client.sync import Client
from kvstore.core.errors import NotFound
from tests.support.cluster import Cluster, wait_until

MIB = 1 << 20
SESSION = 77


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, workers=1, session_grace="1s") as cluster:
        yield cluster


def run_worker(config: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.cli.main", "worker", "--config", str(config), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_restart_is_not_an_event(cluster: Cluster) -> None:
    worker, data = cluster.workers[0], os.urandom(3 * MIB)
    with Client(cluster.url, worker_socket=worker.socket) as client:
        client.put("a", data)
        worker.restart()
        assert client.get("a") == data
        assert worker.stop() == 0
        worker.start()
        assert client.get("a") == data
        assert len(worker.block_files) == 1


def test_a_worker_that_stops_is_dead_at_once(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=1, dead_ticks=10_000) as cluster, Client(cluster.url, worker_socket="") as client:
        client.put("a", b"data")
        assert cluster.workers[0].stop() == 0
        assert not cluster.map().nodes[0].live
        assert not client.exists("a")
        cluster.workers[0].start()
        assert client.get("a") == b"data"


def test_a_second_worker_on_the_same_volume_is_refused_in_one_line(cluster: Cluster, tmp_path: Path) -> None:
    ended = run_worker(cluster.workers[0].config, "--socket", str(tmp_path / "other.sock"), "--listen", "127.0.0.1:0")
    assert ended.returncode == 5
    assert "another worker uses this volume" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "other.sock").exists()


def test_a_master_of_another_cluster_is_refused_in_one_line(cluster: Cluster, tmp_path: Path) -> None:
    worker = cluster.workers[0]
    assert worker.stop() == 0
    other = tmp_path / "other"
    other.mkdir()
    with Cluster(other, workers=0) as strangers:
        ended = run_worker(worker.config, "--master", strangers.url)
    assert ended.returncode == 7
    assert "cluster" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_kill_during_staging_leaves_nothing_after_the_grace(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    local = LocalWorker(worker.socket, SESSION)
    staged = local.stage(MIB)
    os.pwrite(staged.fd, bytes(MIB), 0)
    worker.kill()
    local.close()
    staging = worker.volume / "staging"
    assert len(list(staging.iterdir())) == 1
    worker.start()
    wait_until(lambda: not list(staging.iterdir()), "staging is empty")
    os.close(staged.fd)


def test_a_writer_goes_on_over_a_restart_of_the_worker(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    local = LocalWorker(worker.socket, SESSION)
    staged = local.stage(8)
    os.pwrite(staged.fd, b"half", 0)
    worker.restart()
    os.pwrite(staged.fd, b"rest", 4)
    os.close(staged.fd)
    sealed = local.seal(staged.staging, 8)
    [fd] = local.open([(sealed.address, ())])
    assert isinstance(fd, int)
    assert os.pread(fd, 9, 0) == b"halfrest"
    os.close(fd)
    local.close()


def test_unpublished_blocks_go_after_the_grace_and_published_ones_stay(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    with Client(cluster.url, worker_socket=worker.socket) as client:
        client.put("kept", b"kept")
    local = LocalWorker(worker.socket, SESSION)
    staged = local.stage(4)
    os.pwrite(staged.fd, b"lost", 0)
    os.close(staged.fd)
    local.seal(staged.staging, 4)
    assert len(worker.block_files) == 2
    local.close()
    wait_until(lambda: len(worker.block_files) == 1, "the unpublished block is gone")
    with Client(cluster.url, worker_socket=worker.socket) as client:
        assert client.get("kept") == b"kept"


def test_replaced_and_removed_blocks_are_unlinked_within_seconds(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    with Client(cluster.url, worker_socket=worker.socket) as client:
        client.put("a", b"one")
        client.put("a", b"two")
        wait_until(lambda: len(worker.block_files) == 1, "the replaced block is gone")
        assert client.get("a") == b"two"
        client.remove("a")
        wait_until(lambda: not worker.block_files, "the removed block is gone")


def test_a_full_worker_evicts_and_misses_are_clean(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=1, capacity="16MiB") as cluster:
        worker = cluster.workers[0]
        with Client(cluster.url, worker_socket=worker.socket) as client:
            blobs = {f"k{i}": os.urandom(MIB) for i in range(40)}
            for name, data in blobs.items():
                client.put(name, data)
                assert sum(map(size_of, worker.block_files)) <= 16 * MIB
            here = [name for name in blobs if is_here(client, name, blobs[name])]
            assert 8 <= len(here) <= 16
            assert "k39" in here


def size_of(path: Path) -> int:
    """0 for one that was evicted meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def is_here(client: Client, name: str, data: bytes) -> bool:
    try:
        assert client.get(name) == data
    except NotFound:
        return False
    return True


def test_a_conflicting_open_while_a_lease_is_held_does_not_kill_it(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    worker.signal(signal.SIGIO)
    local = LocalWorker(worker.socket, SESSION)
    assert local.stat().node == worker.node
    assert worker.pid is not None
    local.close()


def test_it_waits_for_its_master(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=1) as cluster:
        worker = cluster.workers[0]
        cluster.master.kill()
        worker.restart()
        cluster.master.start()
        cluster.wait_live(worker.node)


@pytest.mark.parametrize("what", ["no volume", "only memory", "socket"])
def test_what_it_cannot_run_with_is_said_in_one_line(tmp_path: Path, what: str) -> None:
    volume = f'[[worker.volumes]]\ntier = "{"mem" if what == "only memory" else "ssd"}"\npath = "{tmp_path}/v"\n'
    volume += 'capacity = "1MiB"\nfree_floor = "0"\n'
    blocked = tmp_path / "file"
    blocked.write_text("")
    place = blocked / "x.sock" if what == "socket" else tmp_path / "x.sock"
    config = tmp_path / "c.toml"
    head = f'[worker]\nlisten = "127.0.0.1:0"\nhttp = ""\nsocket = "{place}"\nmaster = "kvstore://127.0.0.1:1"\n'
    config.write_text(head + ("" if what == "no volume" else volume))
    ended = run_worker(config)
    assert ended.returncode in (2, 5), ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("kvstore: ")
