from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvstore.config import Config, MountPoint, NodeConfig, WorkerConfig, load
from kvstore.core.errors import InvalidRequest, Timeout, Unavailable
from kvstore.node import plan, up
from kvstore.node.child import Child, ChildSpec
from kvstore.node.notify import NotifySocket, parse
from kvstore.obs import notify


def options(tmp_path: Path, **changes: object) -> up.Options:
    base = up.Options(data=tmp_path / "data", capacity="1GiB", workers=2, mounts=(), port=7070)
    return base._replace(**changes)  # type: ignore[arg-type]


def test_a_node_runs_its_worker_and_mounts() -> None:
    config = Config(
        worker=WorkerConfig(master="kvstore://m:1", socket="/run/w.sock"),
        node=NodeConfig(mounts=[MountPoint(dir="/mnt/a"), MountPoint(dir="/mnt/b", path="/models/b")]),
    )
    assert plan.worker("f.toml").argv == ("worker", "--config", "f.toml")
    assert [spec.argv for spec in plan.mounts(config, None)] == [
        ("mount", "/mnt/a", "--master", "kvstore://m:1", "--worker-socket", "/run/w.sock", "--path", "/"),
        ("mount", "/mnt/b", "--master", "kvstore://m:1", "--worker-socket", "/run/w.sock", "--path", "/models/b"),
    ]


def test_up_writes_configuration_that_loads(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    master = load(str(up.prepare(chosen).master), environ={}).config.master
    assert (master.listen, master.http) == ("127.0.0.1:7070", "127.0.0.1:7071")
    workers = [
        load(str(up.write_worker(chosen, i, "kvstore://127.0.0.1:7070")), environ={}).config.worker for i in (0, 1)
    ]
    assert [w.node_id for w in workers] == ["node-1", "node-2"]
    assert [w.listen for w in workers] == ["127.0.0.1:7080", "127.0.0.1:7090"]
    assert len({w.socket for w in workers}) == 2
    assert workers[0].volumes[0].capacity_bytes == 1 << 30


def test_any_free_ports(tmp_path: Path) -> None:
    chosen = options(tmp_path, port=0)
    assert load(str(up.prepare(chosen).master), environ={}).config.master.http == "127.0.0.1:0"
    worker = load(str(up.write_worker(chosen, 0, "kvstore://127.0.0.1:1")), environ={}).config.worker
    assert (worker.listen, worker.http) == ("127.0.0.1:0", "127.0.0.1:0")


def test_more_mounts_than_nodes_and_long_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="--workers 3"):
        up.prepare(options(tmp_path, mounts=(Path("/a"), Path("/b"), Path("/c"))))
    with pytest.raises(InvalidRequest, match="too long"):
        up.prepare(options(tmp_path, data=tmp_path / ("x" * 100)))


def test_notify_messages() -> None:
    assert parse(b"READY=1\nX_ENDPOINT=h:1=2\nnonsense\n\xff") == {"READY": "1", "X_ENDPOINT": "h:1=2"}


async def test_what_a_process_says_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    socket = NotifySocket(lambda facts: heard.set_result(dict(facts)))
    monkeypatch.setenv("NOTIFY_SOCKET", socket.address)
    notify.stopping()  # not READY: passed over
    notify.ready(endpoint="127.0.0.1:7070")
    assert await asyncio.wait_for(heard, 10) == {"endpoint": "127.0.0.1:7070"}
    socket.close()
    notify.ready()  # nobody listens any more: a warning, no exception


async def test_a_child_that_ends_before_it_is_ready() -> None:
    child = Child(ChildSpec("broken", ("config", "show", "--config", os.devnull + "/none")), max_pause_s=60)
    child.start()
    with pytest.raises(Unavailable, match="broken ended with code"):
        await child.wait_ready(60)
    await asyncio.wait_for(child.stop(), 30)  # in the middle of its pause


async def test_a_child_that_never_gets_ready_times_out_and_can_be_stopped(tmp_path: Path) -> None:
    fifo = tmp_path / "config.toml"
    os.mkfifo(fifo)  # reading it waits for ever
    child = Child(ChildSpec("slow", ("config", "show", "--config", str(fifo))), max_pause_s=1)
    child.start()
    with pytest.raises(Timeout, match="slow was not ready"):
        await child.wait_ready(0.5)
    await asyncio.wait_for(child.stop(), 30)
    assert child.exit_code is not None
