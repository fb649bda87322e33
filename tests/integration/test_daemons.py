"""`kvstore up` and `kvstore node` as processes: what they start, what they start again, what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore import connect
from tests.support.cluster import Cluster, Process, wait_until
from tests.support.mounts import can_mount

STOP_TIMEOUT_S = 60
needs_mount = pytest.mark.skipif(not can_mount(), reason="mounting needs root and /dev/fuse")


@contextmanager
def up(root: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`kvstore up --json` with its data below `root`; ended by SIGINT unless the test did."""
    command = [sys.executable, "-m", "kvstore", "up", "--data", str(root / "data"), "--port", "0", "--json"]
    with (
        (root / "up.log").open("ab") as log,
        subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (root / "up.log").read_text()
            yield process, json.loads(line)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(STOP_TIMEOUT_S)


def children(parent: int) -> dict[str, int]:
    """What a process runs: first word behind ``kvstore`` → pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                found[words[words.index("kvstore") + 1]] = int(entry.name)
        except (OSError, ValueError):
            continue
    return found


def is_mounted(path: Path) -> bool:
    return any(line.split(" ")[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines())


@needs_mount
def test_up_runs_a_whole_store_and_leaves_nothing_behind(tmp_path: Path) -> None:
    mounts = [tmp_path / "a", tmp_path / "b"]
    options = ["--workers", "2", *(part for path in mounts for part in ("--mount", str(path)))]
    with up(tmp_path, *options) as (process, facts):
        assert facts["mounts"] == [str(path) for path in mounts]
        assert facts["lmcache"][0] == f"LMCACHE_REMOTE_URL=fs://localhost:0{mounts[0]}/lmcache PYTHONHASHSEED=0"
        assert set(children(process.pid)) == {"master", "worker", "mount"}
        (mounts[0] / "greeting").write_text("hello")
        assert (mounts[1] / "greeting").read_text() == "hello"
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_TIMEOUT_S) == 0
    assert not any(is_mounted(path) for path in mounts)
    assert children(process.pid) == {}
    with up(tmp_path, *options):  # what was stored is there again
        assert (mounts[1] / "greeting").read_text() == "hello"


@needs_mount
def test_up_starts_again_what_dies(tmp_path: Path) -> None:
    mount = tmp_path / "a"
    with up(tmp_path, "--mount", str(mount)) as (process, _):
        (mount / "greeting").write_text("hello")
        for name in ("mount", "worker", "master"):
            before = children(process.pid)[name]
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: children(process.pid).get(name, before) != before, f"{name} runs again")  # noqa: B023
            wait_until(lambda: reads(mount / "greeting", "hello"), f"the file is back after {name} was killed")


def reads(path: Path, expected: str) -> bool:
    """In a child: a mount point whose process is dead must not hang the test."""
    done = subprocess.run(["cat", str(path)], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout == expected


def test_up_says_in_one_line_why_it_cannot_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "kvstore", "up", "--data", str(tmp_path / "data")]
        done = subprocess.run(
            [*command, "--port", str(taken.getsockname()[1])],
            capture_output=True, text=True, timeout=STOP_TIMEOUT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 5
    assert "cannot listen on" in done.stderr
    assert "Traceback" not in done.stderr
    assert "started again" not in done.stderr


def test_a_second_up_on_the_same_directory_changes_nothing(tmp_path: Path) -> None:
    with up(tmp_path):
        before = (tmp_path / "data" / "master.toml").read_text()
        command = [sys.executable, "-m", "kvstore", "up", "--data", str(tmp_path / "data"), "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=STOP_TIMEOUT_S, check=False)
        assert done.returncode == 5
        assert "another `kvstore up` runs on" in done.stderr
        assert (tmp_path / "data" / "master.toml").read_text() == before


def test_ctrl_c_during_the_start_is_obeyed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore", "up", "--data", str(tmp_path / "data"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: "master" in children(process.pid), "the master was started")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=STOP_TIMEOUT_S)
    assert (process.returncode, out) == (0, "")


@needs_mount
def test_a_node_runs_its_worker_and_its_mounts(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=1) as cluster:
        mount = tmp_path / "node" / "mnt"
        node = cluster.process("daemon", ["node", "--config", str(node_config(tmp_path, cluster, mount))])
        node.start()
        assert set(children(node.pid or 0)) == {"worker", "mount"}
        cluster.wait_live("node-0", "gpu-7")
        with connect(cluster.url, worker_socket=cluster.workers[0].socket) as client:
            client.put("from-elsewhere", b"hello")
        assert (mount / "from-elsewhere").read_text() == "hello"
        for name in ("mount", "worker"):
            survives_the_death_of(node, name, mount)
        assert node.stop() == 0
        assert not is_mounted(mount)


def survives_the_death_of(node: Process, name: str, mount: Path) -> None:
    before = children(node.pid or 0)
    os.kill(before[name], signal.SIGKILL)
    wait_until(lambda: children(node.pid or 0).get(name, before[name]) != before[name], f"{name} runs again")
    wait_until(lambda: reads(mount / "from-elsewhere", "hello"), f"the mount works after {name} was killed")
    other = ({"mount", "worker"} - {name}).pop()
    assert children(node.pid or 0)[other] == before[other]  # each restarts alone


def node_config(root: Path, cluster: Cluster, mount: Path) -> Path:
    home = root / "node"
    home.mkdir()
    file = home / "kvstore.toml"
    file.write_text(
        f'[worker]\nnode_id = "gpu-7"\nmaster = "{cluster.url}"\nlisten = "127.0.0.1:0"\nhttp = ""\n'
        f'socket = "{Path(cluster.workers[0].socket).with_name("node.sock")}"\n\n'
        f'[[worker.volumes]]\ntier = "ssd"\npath = "{home / "volume"}"\ncapacity = "64MiB"\nfree_floor = "1MiB"\n\n'
        f'[[node.mounts]]\ndir = "{mount}"\n'
    )
    return file
