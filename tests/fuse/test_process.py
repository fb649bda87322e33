"""The mount's process: starts, stops, is killed; and the mount point it leaves."""

from __future__ import annotations

import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import connect
from tests.fuse.calls import error_of
from tests.support.child import in_child
from tests.support.cluster import Cluster, Process, ProcessFailed, wait_until
from tests.support.mounts import mounted


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("store"), workers=1) as cluster:
        yield cluster


def failure(process: Process) -> str:
    with pytest.raises(ProcessFailed) as caught:
        process.start()
    lines = process.log.read_text().strip().splitlines()
    assert not any("Traceback" in line for line in lines), lines
    assert caught.value is not None
    return lines[-1]


def test_sigterm_unmounts(cluster: Cluster, tmp_path: Path) -> None:
    with mounted(cluster, tmp_path / "m", cluster.workers[0]) as mount:
        assert mount.is_mounted()
        in_child((mount / "f").write_bytes, b"1")
        assert mount.process.stop() == 0
        assert not mount.is_mounted()
        assert "mounted / of" in mount.process.log.read_text()
        mount.process.start()
        assert in_child((mount / "f").read_bytes) == b"1"


def test_metrics_and_health(cluster: Cluster, tmp_path: Path) -> None:
    port = free_port()
    with mounted(cluster, tmp_path / "m", cluster.workers[0], "--http", f"127.0.0.1:{port}") as mount:
        in_child((mount / "counted").write_bytes, b"1")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        assert 'kvstore_mount_operations_total{operation="create",result="ok"} 1.0' in text
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as reply:
            assert reply.status == 200


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_umount_ends_the_process(cluster: Cluster, tmp_path: Path) -> None:
    with mounted(cluster, tmp_path / "m", cluster.workers[0]) as mount:
        subprocess.run(["umount", str(mount.path)], check=True, timeout=10)
        wait_until(lambda: mount.process.pid is None, "the process ended")


def test_a_busy_mount_is_detached_after_a_while(cluster: Cluster, tmp_path: Path) -> None:
    with mounted(cluster, tmp_path / "m", cluster.workers[0]) as mount:
        in_child((mount / "f").write_bytes, b"1")
        user = subprocess.Popen(["sleep", "60"], cwd=mount.path)
        try:
            assert mount.process.stop() == 0
        finally:
            user.kill()
            user.wait()
        assert not mount.is_mounted()
        assert "busy" in mount.process.log_tail()


def test_a_killed_mount_s_mount_point_is_cleaned_at_the_next_start(cluster: Cluster, tmp_path: Path) -> None:
    with mounted(cluster, tmp_path / "m", cluster.workers[0]) as mount:
        in_child((mount / "f").write_bytes, b"1")
        mount.process.kill()
        assert mount.is_mounted()
        assert in_child(error_of, os.stat, mount / "f") == "ENOTCONN"
        mount.process.start()
        assert in_child((mount / "f").read_bytes) == b"1"
        assert "cleaned up" in mount.process.log_tail()


def test_a_living_mount_is_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    with mounted(cluster, tmp_path / "m", cluster.workers[0]) as mount:
        second = cluster.process("second", ["mount", str(mount.path), "--master", cluster.url])
        assert "is a mount point already" in failure(second)
        in_child((mount / "f").write_bytes, b"1")


def test_paths_below_the_store_s_root(cluster: Cluster, tmp_path: Path) -> None:
    with (
        mounted(cluster, tmp_path / "all", cluster.workers[0]) as everything,
        mounted(cluster, tmp_path / "made" / "below", cluster.workers[0], "--path", "/models/a") as below,
    ):
        in_child((below / "f").write_bytes, b"1")
        assert in_child((everything / "models" / "a" / "f").read_bytes) == b"1"
        assert in_child(lambda: below.path.stat().st_ino) == 1
        in_child((below / "sub").mkdir)
        in_child(os.rename, below / "f", below / "sub" / "f")
        assert in_child(os.listdir, everything / "models" / "a") == ["sub"]


def test_what_is_missing_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nobody = "kvstore://127.0.0.1:1"
    cases = {
        "not a directory": ["mount", str(tmp_path / "file"), "--master", cluster.url],
        "127.0.0.1:1": ["mount", str(tmp_path / "m"), "--master", nobody],
        "mount.dir": ["mount", "--master", cluster.url],
        "mount.path: /file is a file of the store": [
            "mount", str(tmp_path / "m"), "--master", cluster.url, "--path", "/file",
        ],
        "leave out --umask": ["mount", str(tmp_path / "m"), "--upgrade", "--umask", "000"],
        "is no kvstore mount": ["mount", str(tmp_path / "m"), "--upgrade"],
    }  # fmt: skip
    with connect(cluster.url) as client:
        client.put("file", b"content")
    for i, (word, argv) in enumerate(cases.items()):
        assert word in failure(cluster.process(f"bad{i}", argv))


def test_large_reads_ask_for_a_mebibyte(cluster: Cluster, tmp_path: Path) -> None:
    with mounted(cluster, tmp_path / "m", cluster.workers[0]) as mount:
        text = Path("/proc/self/mountinfo").read_text().splitlines()
        device = next(line.split(" ")[2] for line in text if line.split(" ")[4] == str(mount.path))
        assert Path(f"/sys/class/bdi/{device}/read_ahead_kb").read_text().strip() == "1024"


def test_direct_io(cluster: Cluster, tmp_path: Path) -> None:
    with mounted(cluster, tmp_path / "m", cluster.workers[0], "--direct-io") as mount:
        data = os.urandom(3 << 20)
        in_child((mount / "f").write_bytes, data)
        assert in_child((mount / "f").read_bytes) == data
