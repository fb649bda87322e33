"""Nobody hangs: master, local worker and peers that are stopped, dead, deaf or cut off cost one wait with a deadline,
and nothing after that until they answer again. The SDK in both kinds, against real processes.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from kvstore.client.sync import Client
from kvstore.core.errors import KvError, NotFound, Unavailable
from kvstore.core.limits import METADATA_TIMEOUT_S, PROBE_PAUSE_S, fetch_timeout_s
from tests.support.blocking import BlockingClient, LoopThread
from tests.support.cluster import Cluster, Process, wait_until

LATE_S: Final = 2.0
"""A busy machine's, on top of every deadline."""
AT_ONCE_S: Final = 0.01
"""For the median of many calls: single ones wait for a processor now and then."""
BACK_S: Final = 2.0 + LATE_S
DATA: Final = os.urandom(100_000)
Connect = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Nobody dies for the master within a test: it would tell who may be asked, and hide who waits."""
    with Cluster(tmp_path_factory.mktemp("silence"), workers=2, dead_ticks=10_000) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest, loop: LoopThread) -> Connect:
    return Client if request.param == "sync" else functools.partial(BlockingClient, loop)


@contextmanager
def stopped(process: Process) -> Iterator[None]:
    process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.signal(signal.SIGCONT)


def outcome(call: Callable[[], object]) -> tuple[object, float]:
    """What it returned or raised, and how long it took."""
    begin = time.monotonic()
    try:
        result = call()
    except KvError as error:
        result = error
    return result, time.monotonic() - begin


def calls_of(client: Any, path: Path) -> dict[str, Callable[[], object]]:
    """One of each call of the SDK."""
    return {
        "put": lambda: client.put("v", DATA),
        "put if absent": lambda: client.put("w", DATA, if_absent=True),
        "put_many": lambda: next(e for e in client.put_many({"a": b"1", "b": b"2"}) if isinstance(e, KvError)),
        "get": lambda: client.get("v"),
        "get_into": lambda: client.get_into("v", bytearray(len(DATA))),
        "get_many": lambda: client.get_many(["v", "other"]),
        "get_many_into": lambda: client.get_many_into(["v"], [bytearray(len(DATA))]),
        "exists": lambda: client.exists("v"),
        "exists_many": lambda: client.exists_many(["v", "w"]),
        "stat": lambda: client.stat("v"),
        "list": lambda: list(client.list("")),
        "remove": lambda: client.remove("v"),
        "rename": lambda: client.rename("v", "x"),
        "mkdir": lambda: client.mkdir("d"),
        "statfs": client.statfs,
        "policies": lambda: client.policies(""),
        "all_policies": client.all_policies,
        "set_policy": lambda: client.set_policy("", ttl_s=5.0),
        "cluster_map": client.cluster_map,
        "put_file": lambda: client.put_file("f", path),
        "get_file": lambda: client.get_file("v", path.with_name("out")),
    }


def is_refusal(result: object) -> bool:
    """A miss, or an error that says who is away."""
    if isinstance(result, KvError):
        return result.reason in ("timeout", "unavailable")
    return result in (False, [None], [None, None], [False, False])


# ---- the master ----


def test_every_call_ends_at_once_after_one_that_waited_for_the_master(
    cluster: Cluster, connect: Connect, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(DATA)
    with connect(cluster.url, worker_socket=cluster.workers[0].socket, metadata_ttl_s=0.0) as client:
        client.put("v", DATA)
        with stopped(cluster.master):
            result, took_s = outcome(lambda: client.get("v"))
            assert is_refusal(result), result
            assert METADATA_TIMEOUT_S * 0.8 < took_s < METADATA_TIMEOUT_S + LATE_S
            taken_s = {}
            for name, call in calls_of(client, tmp_path / "in").items():
                result, taken_s[name] = outcome(call)
                assert is_refusal(result), (name, result)
            assert max(taken_s.values()) < METADATA_TIMEOUT_S * 0.8, taken_s
            many = [outcome(lambda: client.get("v"))[1] for _ in range(200)]
            assert statistics.median(many) < AT_ONCE_S
        wait_until(lambda: client.get_many(["v"]) == [DATA], "it is asked again", BACK_S)


@pytest.mark.parametrize("name", ["put", "get", "exists", "list", "remove", "mkdir", "statfs", "put_file", "get_file"])
def test_whichever_call_is_the_first_ends_by_its_deadline(
    cluster: Cluster, connect: Connect, tmp_path: Path, name: str
) -> None:
    (tmp_path / "in").write_bytes(DATA)
    with connect(cluster.url, worker_socket=cluster.workers[0].socket, metadata_ttl_s=0.0) as client:
        client.put("v", DATA)
        with stopped(cluster.master):
            result, took_s = outcome(calls_of(client, tmp_path / "in")[name])
        assert is_refusal(result), result
        assert took_s < METADATA_TIMEOUT_S + LATE_S


def test_a_client_that_never_met_the_master_waits_no_longer(cluster: Cluster, connect: Connect) -> None:
    with stopped(cluster.master), connect(cluster.url, worker_socket=cluster.workers[0].socket) as client:
        assert outcome(lambda: client.exists("v"))[1] < METADATA_TIMEOUT_S + LATE_S
        result, took_s = outcome(lambda: client.put("v", b"1"))
        assert is_refusal(result), result
        assert took_s < METADATA_TIMEOUT_S * 0.8


def test_all_threads_of_a_client_wait_together(cluster: Cluster) -> None:
    with Client(cluster.url, worker_socket=cluster.workers[0].socket, metadata_ttl_s=0.0) as client:
        client.put("v", DATA)
        taken: list[float] = []
        with stopped(cluster.master):
            threads = [
                threading.Thread(target=lambda: taken.append(outcome(lambda: client.get("v"))[1])) for _ in range(16)
            ]
            begin = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert time.monotonic() - begin < METADATA_TIMEOUT_S + LATE_S
        assert len(taken) == 16


def test_a_caller_in_a_hurry_does_not_declare_a_busy_master_dead(cluster: Cluster, connect: Connect) -> None:
    """It was stopped for less than an answer may take; others ask it all the time."""
    with connect(cluster.url, worker_socket=cluster.workers[0].socket, metadata_ttl_s=0.0) as client:
        client.put("v", DATA)
        with stopped(cluster.master):
            assert is_refusal(outcome(lambda: client.get("v", timeout_s=0.05))[0])
            time.sleep(0.2)  # the master is busy for so long
        assert client.get("v") == DATA


def test_who_gives_more_time_waits_for_a_master_that_restarts(cluster: Cluster, connect: Connect) -> None:
    with connect(cluster.url, worker_socket=cluster.workers[0].socket) as client:
        client.put("v", DATA)
        cluster.master.kill()
        assert isinstance(outcome(client.statfs)[0], KvError)
        assert outcome(client.statfs)[1] < METADATA_TIMEOUT_S * 0.8
        cluster.master.start(wait=False)
        client.mkdir(f"d{os.urandom(4).hex()}", parents=True, timeout_s=20.0)
        cluster.master.wait_ready()
        wait_until(lambda: client.get_many(["v"]) == [DATA], "readers find it, too", BACK_S + 5.0)


# ---- the local worker ----


def test_a_stopped_local_worker_is_passed_over_after_one_wait(cluster: Cluster, connect: Connect) -> None:
    first, second = cluster.workers
    with (
        connect(cluster.url, worker_socket=first.socket) as client,
        connect(cluster.url, worker_socket=second.socket) as other,
    ):
        other.put("there", DATA)
        client.put("here", DATA)
        with stopped(first):
            result, took_s = outcome(lambda: client.get("there"))
            assert result == DATA, "the other node's, over the network"
            assert took_s < METADATA_TIMEOUT_S + LATE_S
            many = [outcome(lambda: client.get("there"))[1] for _ in range(30)]
            assert statistics.median(many) < METADATA_TIMEOUT_S / 4
            for i in range(3):
                client.put(f"meanwhile{i}", DATA)
            assert other.get_many([f"meanwhile{i}" for i in range(3)]) == [DATA] * 3
        wait_until(lambda: client.get_many(["here"]) == [DATA], "it is used again", BACK_S)


def test_a_put_that_a_stopped_worker_holds_goes_elsewhere(cluster: Cluster, connect: Connect) -> None:
    first, second = cluster.workers
    with connect(cluster.url, worker_socket=first.socket) as client:
        client.put("v", b"1")
        with stopped(first):
            _, took_s = outcome(lambda: client.put("v", DATA))
            assert took_s < METADATA_TIMEOUT_S + LATE_S
            assert {r.node for r in client.stat("v").replicas} == {second.node}
        assert client.get("v") == DATA


# ---- a peer ----


def test_a_stopped_peer_is_a_miss_by_its_deadline_and_then_at_once(cluster: Cluster, connect: Connect) -> None:
    (first, _), name = cluster.workers, f"peer-{os.urandom(4).hex()}"
    with (
        connect(cluster.url, worker_socket=first.socket) as writer,
        connect(cluster.url, worker_socket="", metadata_ttl_s=60.0) as reader,
    ):
        writer.put(name, DATA)
        assert reader.get(name) == DATA
        with stopped(first):
            result, took_s = outcome(lambda: reader.get(name))
            assert isinstance(result, NotFound)
            assert took_s < METADATA_TIMEOUT_S + fetch_timeout_s(len(DATA)) + LATE_S
            many = [outcome(lambda: reader.get(name, timeout_s=5.0)) for _ in range(100)]
            assert all(isinstance(result, NotFound) for result, _ in many)
            assert statistics.median(s for _, s in many) < 2 * AT_ONCE_S, "a look-up, and no wait"
        wait_until(lambda: reader.get_many([name]) == [DATA], "it is read again", BACK_S)


def test_a_dead_peer_is_a_miss_in_well_under_a_second(cluster: Cluster, connect: Connect) -> None:
    """Its connection is refused: nobody waits for anything."""
    (first, second), name = cluster.workers, f"dead-{os.urandom(4).hex()}"
    with (
        connect(cluster.url, worker_socket=first.socket) as writer,
        connect(cluster.url, worker_socket="", metadata_ttl_s=60.0) as far,
        connect(cluster.url, worker_socket=second.socket, metadata_ttl_s=60.0) as near,
    ):
        writer.put(name, DATA)
        assert far.get(name) == DATA
        assert near.exists(name)
        near.put("warm", b"1")
        first.kill()
        try:
            for reader in (far, near):
                result, took_s = outcome(lambda reader=reader: reader.get(name))  # type: ignore[misc]
                assert isinstance(result, NotFound)
                assert took_s < METADATA_TIMEOUT_S
            many = [outcome(lambda: far.get(name))[1] for _ in range(50)]
            assert statistics.median(many) < 2 * AT_ONCE_S, "a look-up, and no wait"
        finally:
            first.start()
        for reader in (far, near):
            wait_until(
                lambda reader=reader: reader.get_many([name]) == [DATA],  # type: ignore[misc]
                "it came back with its blocks",
            )


# ---- addresses that swallow everything ----


@contextmanager
def deaf(kind: str) -> Iterator[str]:
    """An address where connections are made and nothing is answered, or not even made: its backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0 if kind == "backlog full" else 64)
        address = listener.getsockname()
        fillers = []
        if kind == "backlog full":
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(address)
                fillers.append(filler)
        try:
            yield f"127.0.0.1:{address[1]}"
        finally:
            for filler in fillers:
                filler.close()


@pytest.mark.parametrize("kind", ["never accepts", "backlog full"])
def test_a_master_that_is_a_black_hole(connect: Connect, kind: str) -> None:
    with deaf(kind) as endpoint, connect(f"kvstore://{endpoint}", worker_socket="") as client:
        result, took_s = outcome(lambda: client.stat("v"))
        assert is_refusal(result), result
        assert took_s < METADATA_TIMEOUT_S + LATE_S
        many = [outcome(lambda: client.exists("v")) for _ in range(100)]
        assert not any(result for result, _ in many)
        assert statistics.median(s for _, s in many) < AT_ONCE_S


@pytest.mark.parametrize("kind", ["never accepts", "backlog full"])
def test_a_second_address_serves_while_the_first_is_a_black_hole(cluster: Cluster, connect: Connect, kind: str) -> None:
    with deaf(kind) as endpoint:
        url = f"kvstore://{endpoint},{cluster.master.facts['ENDPOINT']}"
        with connect(url, worker_socket=cluster.workers[0].socket) as client:
            wait_until(lambda: outcome(client.statfs)[1] < METADATA_TIMEOUT_S / 2 and _works(client), "the second one")


def _works(client: Any) -> bool:
    return not isinstance(outcome(client.statfs)[0], KvError)


def test_probes_stop_with_the_client(cluster: Cluster) -> None:
    """Nothing is left behind: no thread, and no question to the master."""
    with Client("kvstore://127.0.0.1:1", worker_socket="") as client:
        with pytest.raises(Unavailable):
            client.statfs()
        assert "kvstore-probe" in {thread.name for thread in threading.enumerate()}
    wait_until(
        lambda: "kvstore-probe" not in {thread.name for thread in threading.enumerate()},
        "the probe ended",
        METADATA_TIMEOUT_S + max(PROBE_PAUSE_S) + LATE_S,
    )
