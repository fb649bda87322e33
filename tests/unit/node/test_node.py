from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvstore.cli.main import EXIT_CODES
from kvstore.config import Config, MountPoint, NodeConfig, WorkerConfig, load
from kvstore.core.errors import Denied, InvalidRequest, Timeout, Unavailable
from kvstore.node import box, plan
from kvstore.node.child import DENIED, DENIED_PAUSE_S, Child, ChildEnded, ChildSpec, longer
from kvstore.node.notify import NotifySocket, parse
from kvstore.obs import notify


def options(tmp_path: Path, **changes: object) -> box.Options:
    (tmp_path / "data").mkdir(exist_ok=True)
    base = box.Options(data=tmp_path / "data", capacity="1GiB", workers=2, mounts=(), port=7070)
    return base._replace(**changes)  # type: ignore[arg-type]


def test_a_node_runs_its_worker_and_mounts() -> None:
    config = Config(
        worker=WorkerConfig(master="kvstore://m:1", socket="/run/w.sock"),
        node=NodeConfig(mounts=[MountPoint(dir="/mnt/a"), MountPoint(dir="/mnt/b", path="/models/b")]),
    )
    worker = plan.worker("f.toml", config.worker.socket)
    assert (worker.argv, worker.socket) == (("worker", "--config", "f.toml"), "/run/w.sock")
    assert [spec.argv for spec in plan.mounts(config, None)] == [
        ("mount", "/mnt/a", "--master", "kvstore://m:1", "--worker-socket", "/run/w.sock", "--path", "/"),
        ("mount", "/mnt/b", "--master", "kvstore://m:1", "--worker-socket", "/run/w.sock", "--path", "/models/b"),
    ]


def test_up_writes_configuration_that_loads(tmp_path: Path) -> None:
    laid_out = box.lay_out(options(tmp_path))
    master = load(str(laid_out.master_config), environ={}).config.master
    assert (master.listen, master.http) == ("127.0.0.1:7070", "127.0.0.1:7071")
    workers = [load(str(node.config), environ={}).config.worker for node in laid_out.nodes]
    assert [w.node_id for w in workers] == ["node-1", "node-2"]
    assert [w.listen for w in workers] == ["127.0.0.1:7080", "127.0.0.1:7090"]
    assert {w.master for w in workers} == {laid_out.url} == {"kvstore://127.0.0.1:7070"}
    assert len({w.socket for w in workers}) == 2
    assert workers[0].volumes[0].capacity_bytes == 1 << 30


def test_free_ports_are_chosen_once_and_differ(tmp_path: Path) -> None:
    laid_out = box.lay_out(options(tmp_path, port=0))
    master = load(str(laid_out.master_config), environ={}).config.master
    workers = [load(str(node.config), environ={}).config.worker for node in laid_out.nodes]
    listens = [master.listen, master.http, *(w.listen for w in workers), *(w.http for w in workers)]
    assert len(set(listens)) == 6
    assert not any(listen.endswith(":0") for listen in listens)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"mounts": (Path("/a"), Path("/b"), Path("/c"))}, "--workers 3"),
        ({"mounts": (Path("/a"), Path("/a"))}, "twice"),
        ({"mounts": (Path(__file__),)}, "is a file"),
        ({"data": Path("/" + "x" * 100)}, "too long"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_touched(
    tmp_path: Path, wrong: dict[str, object], text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        box.check(options(tmp_path, **wrong))


def test_values_that_the_processes_would_refuse(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="capacity"):
        box.lay_out(options(tmp_path, capacity="0"))


def test_a_directory_is_for_one_store_at_a_time(tmp_path: Path) -> None:
    second = box.locked(tmp_path / "data")
    with box.locked(tmp_path / "data"), pytest.raises(Unavailable, match="another `kvstore up`"):
        second.__enter__()
    with box.locked(tmp_path / "data"):
        pass


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


BROKEN = ChildSpec("broken", ("config", "show", "--config", os.devnull + "/none"))


async def test_a_child_that_ends_before_it_is_ready_is_not_started_again() -> None:
    child = Child(BROKEN, max_pause_s=60, patient=False)
    child.start()
    with pytest.raises(ChildEnded, match="broken could not start") as caught:
        await child.wait_ready(60)
    assert caught.value.exit_code == child.exit_code != 0
    await asyncio.wait_for(child.stop(), 30)
    assert child.restarts == 0


async def test_a_patient_child_goes_on_trying_and_can_be_stopped_in_its_pause() -> None:
    child = Child(BROKEN, max_pause_s=60, patient=True)
    child.start()
    with pytest.raises(ChildEnded):
        await child.wait_ready(60)
    while child.restarts == 0:  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.02)
    await asyncio.wait_for(child.stop(), 30)


async def test_a_child_that_never_gets_ready_times_out_and_can_be_stopped(tmp_path: Path) -> None:
    fifo = tmp_path / "config.toml"
    os.mkfifo(fifo)  # reading it waits for ever
    child = Child(ChildSpec("slow", ("config", "show", "--config", str(fifo))), max_pause_s=1, patient=True)
    child.start()
    with pytest.raises(Timeout, match="slow was not ready"):
        await child.wait_ready(0.5)
    await asyncio.wait_for(child.stop(), 30)
    assert child.exit_code is not None


def test_a_worker_that_its_master_refuses_comes_back_soon_after_the_right_one_is_there() -> None:
    assert EXIT_CODES[Denied] == DENIED
    pauses = [1.0]
    for _ in range(9):
        pauses.append(longer(pauses[-1], DENIED, 30.0))
    assert max(pauses) == DENIED_PAUSE_S
    assert longer(20.0, 1, 30.0) == 30.0
