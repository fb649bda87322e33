"""A store of real processes: one master, three workers, and clients; processes are killed while all is in use."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore import Client, KvError, NoSpace, NotFound
from kvstore.core.types import Address
from kvstore.pb import master_pb2 as m
from kvstore.pb import worker_pb2 as w
from kvstore.rpc import methods
from kvstore.rpc.link import Link
from kvstore.rpc.metadata import Caller
from tests.support.blocking import BlockingClient, LoopThread
from tests.support.cluster import Cluster, Worker, wait_until

MIB = 1 << 20


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


def client_of(cluster: Cluster, worker: Worker | None = None, ttl_s: float = 0.0) -> Client:
    return Client(cluster.url, worker_socket=worker.socket if worker else "", metadata_ttl_s=ttl_s)


def nodes_of(client: Client, path: str) -> set[str]:
    return {replica.node for replica in client.stat(path).replicas}


# ---- where blocks are ----


def test_what_one_node_put_every_node_reads_and_then_has(cluster: Cluster) -> None:
    data = os.urandom(3 * MIB + 1)
    first, second, _ = cluster.workers
    with client_of(cluster, first) as writer, client_of(cluster, second) as reader:
        writer.put("a/v", data)
        assert nodes_of(writer, "a/v") == {first.node}
        assert reader.get("a/v") == data
        wait_until(lambda: nodes_of(reader, "a/v") == {first.node, second.node}, "the reader's node has a replica")
        assert len(second.block_files) == 1


def test_many_readers_of_one_block_fetch_it_once(cluster: Cluster) -> None:
    data = os.urandom(8 * MIB)
    first, second, _ = cluster.workers
    with client_of(cluster, first) as writer, client_of(cluster, second) as reader:
        writer.put("v", data)
        got: list[bytes] = []
        threads = [threading.Thread(target=lambda: got.append(reader.get("v"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [data] * 8
        assert len(second.block_files) == 1
        counters = {n.id: n.counters for n in reader.cluster_map().nodes}
        wait_until(
            lambda: {n.id: n.counters for n in reader.cluster_map().nodes}[second.node].fetches == 1, f"{counters}"
        )


# ---- the master dies ----


def test_everything_acknowledged_is_there_after_the_master_was_killed(cluster: Cluster) -> None:
    with client_of(cluster, cluster.workers[0]) as client, client_of(cluster, cluster.workers[1]) as other:
        values = {f"d/{i}": os.urandom(1000 + i) for i in range(50)}
        assert all(not isinstance(result, KvError) for result in client.put_many(values))
        client.remove("d/0")
        client.rename("d/1", "e")
        cluster.master.restart()
        assert not client.exists("d/0")
        assert other.get("e") == values["d/1"]
        assert other.get_many(list(values)[2:]) == list(values.values())[2:]


def test_the_master_is_killed_and_started_while_clients_work(cluster: Cluster) -> None:
    """Puts wait for it and succeed; reads are right or a miss; what was acknowledged stays."""
    acknowledged: dict[str, bytes] = {}
    failures: list[Exception] = []
    stop = threading.Event()

    def work(number: int) -> None:
        worker = cluster.workers[number] if number < 3 else None
        with Client(cluster.url, worker_socket=worker.socket if worker else "", timeout_s=20) as client:
            turn = 0
            while not stop.is_set():
                path, data = f"w{number}/{turn}", os.urandom(50_000)
                turn += 1
                try:
                    client.put(path, data)
                    acknowledged[path] = data
                    assert client.get_many([path]) in ([data], [None])
                except Exception as error:  # noqa: BLE001 - judged by the test's own thread
                    failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        seen = len(acknowledged)
        wait_until(lambda seen=seen: len(acknowledged) > seen + 20, "work goes on")  # type: ignore[misc]
        cluster.master.kill()
        cluster.master.start()
    seen = len(acknowledged)
    wait_until(lambda: len(acknowledged) > seen + 20, "work goes on after the last restart")
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    with client_of(cluster) as client:
        paths = list(acknowledged)
        for i in range(0, len(paths), 100):
            part = paths[i : i + 100]
            assert client.get_many(part) == [acknowledged[p] for p in part]


def test_without_a_master_reads_miss_and_puts_say_why(cluster: Cluster) -> None:
    with Client(cluster.url, worker_socket=cluster.workers[0].socket, timeout_s=0.5) as client:
        client.put("v", b"1")
        cluster.master.kill()
        with pytest.raises(NotFound) as caught:
            client.get("none")
        assert caught.value.reason in ("unavailable", "timeout")
        assert client.get_many(["v2"]) == [None]
        with pytest.raises(KvError) as put:
            client.put("w", b"1", timeout_s=0.5)
        assert put.value.reason in ("unavailable", "timeout")
        cluster.master.start()
        # In time: left to itself, grpc's synchronous channel takes another 4 s to find the server again.
        assert client.stat("v", timeout_s=2).length_bytes == 1
        assert client.get("v") == b"1", "and readers, who do not wait for it, know that it is back"


@pytest.mark.parametrize("in_loop", [True, False], ids=["async", "sync"])
def test_callers_of_one_client_do_not_queue_behind_a_master_that_hangs(
    cluster: Cluster, loop: LoopThread, in_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.cluster.MAP_TTL_S", 0.0)
    make = functools.partial(BlockingClient, loop) if in_loop else Client
    with make(cluster.url, worker_socket="") as client:
        client.put("v", b"1")
        cluster.master.signal(signal.SIGSTOP)
        failures: list[KvError] = []

        def put(number: int) -> None:
            try:
                client.put(f"v{number}", b"1", timeout_s=1.0)
            except KvError as error:
                failures.append(error)

        begin = time.monotonic()
        threads = [threading.Thread(target=put, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken_s = time.monotonic() - begin
        cluster.master.signal(signal.SIGCONT)
    assert [error.reason for error in failures] == ["timeout"] * 8
    assert taken_s < 3.0, "one after the other they would take 8 s"


# ---- a worker dies ----


def test_a_dead_worker_makes_misses_and_comes_back_with_its_blocks(cluster: Cluster) -> None:
    first, second, third = cluster.workers
    data = os.urandom(MIB)
    with client_of(cluster, first) as writer, client_of(cluster, second) as reader:
        writer.put("v", data)
        first.kill()
        with pytest.raises(NotFound):
            reader.get("v")
        cluster.wait_live(second.node, third.node)
        assert not reader.exists("v"), "no live replica: it does not exist"
        assert [name for name, _ in reader.list("")] == []
        first.start()
        cluster.wait_live(first.node, second.node, third.node)
        wait_until(lambda: writer.exists("v"), "its blocks are reported")
        assert writer.get("v") == data
        wait_until(lambda: reader.get_many(["v"]) == [data], "the other worker's breaker let a trial through")


def test_the_client_of_a_dead_worker_goes_on_with_the_others(cluster: Cluster) -> None:
    first, second, _ = cluster.workers
    with client_of(cluster, first) as client, client_of(cluster, second) as other:
        other.put("v", b"of the other node")
        client.put("w", b"of this node")
        first.kill()
        assert client.get("v") == b"of the other node"
        client.put("x", b"sent to another worker")
        assert first.node not in nodes_of(other, "x")
        assert other.get("x") == b"sent to another worker"
        first.start()
        wait_until(lambda: client.exists("w"), "the worker is back")
        client.put("y", b"here again")
        wait_until(lambda: _stays_here(client, first.node), "the client uses its worker again")


def _stays_here(client: Client, node: str) -> bool:
    path = f"again-{os.urandom(4).hex()}"
    client.put(path, os.urandom(100))
    return nodes_of(client, path) == {node}


def test_a_worker_that_hangs_does_not_hold_up_every_reader(cluster: Cluster) -> None:
    first, second, third = cluster.workers
    with client_of(cluster, first) as writer, client_of(cluster, ttl_s=60) as reader:
        writer.put("v", b"1")
        assert reader.get("v") == b"1"
        first.signal(signal.SIGSTOP)
        with pytest.raises(NotFound):
            reader.get("v", timeout_s=0.5)
        # The reader was in a hurry, which proves nothing: a probe finds out.
        wait_until(lambda: not reader.cluster.breakers.closed(first.facts["ENDPOINT"]), "no reader waits for it")
        cluster.wait_live(second.node, third.node)
        with pytest.raises(NotFound):
            reader.get("v")
        first.signal(signal.SIGCONT)
        cluster.wait_live(first.node, second.node, third.node)
        wait_until(lambda: reader.get_many(["v"]) == [b"1"], "it is read again")


def test_a_wiped_volume_makes_misses(cluster: Cluster) -> None:
    first, second, _ = cluster.workers
    with client_of(cluster, first) as writer, client_of(cluster, second) as reader:
        writer.put("v", os.urandom(1000))
        for path in first.block_files:
            path.unlink(missing_ok=True)
        with pytest.raises(NotFound):
            reader.get("v")
        with pytest.raises(NotFound):
            writer.get("v")
        wait_until(lambda: not reader.exists("v"), "readers repair the map")
        writer.put("v", b"new")
        assert reader.get("v") == b"new"


def test_a_corrupted_block_is_a_miss_and_another_replica_serves(cluster: Cluster) -> None:
    first, second, third = cluster.workers
    data = os.urandom(MIB)
    with client_of(cluster, first) as a, client_of(cluster, second) as b, client_of(cluster, third) as c:
        a.put("v", data)
        assert b.get("v") == data
        wait_until(lambda: nodes_of(c, "v") == {first.node, second.node}, "both replicas are known")
        first.kill()
        (path,) = first.block_files
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(bytes([data[1000] ^ 1]))
        first.start()
        cluster.wait_live(first.node, second.node, third.node)
        assert a.get("v") == data
        assert c.get("v") == data


# ---- what cannot be read is put again ----


@pytest.fixture
def slow_to_judge(tmp_path: Path) -> Iterator[Cluster]:
    """Its master takes a dead worker for live as long as any test runs."""
    with Cluster(tmp_path, workers=2, dead_ticks=10_000) as cluster:
        yield cluster


@pytest.mark.parametrize("in_loop", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
@pytest.mark.parametrize("ttl_s", [0.0, 60.0])
def test_a_put_after_a_miss_is_kept_though_its_bytes_are_equal(
    slow_to_judge: Cluster, loop: LoopThread, in_loop: bool, local: bool, ttl_s: float
) -> None:
    cluster, data = slow_to_judge, os.urandom(10_000)
    first, second = cluster.workers
    with client_of(cluster, first) as writer:
        writer.put("k", data)
    make = functools.partial(BlockingClient, loop) if in_loop else Client
    with make(cluster.url, worker_socket=second.socket if local else "", metadata_ttl_s=ttl_s) as client:
        first.kill()
        assert client.exists("k"), "the master does not know yet"
        with pytest.raises(NotFound) as caught:
            client.get("k")
        assert caught.value.reason != "no_name"
        assert client.put("k", data).created
        assert client.get("k") == data
        assert client.stat("k").replicas[0].node == second.node
        assert not client.put("k", data).created, "this one can be read: equal content keeps it"


@pytest.mark.parametrize("in_loop", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
def test_puts_go_on_elsewhere_when_the_disk_of_a_worker_is_gone(
    tmp_path: Path, loop: LoopThread, in_loop: bool, local: bool
) -> None:
    make = functools.partial(BlockingClient, loop) if in_loop else Client
    with Cluster(tmp_path, workers=2) as cluster:
        broken, fine = cluster.workers
        with make(cluster.url, worker_socket=broken.socket if local else "") as client:
            client.put("before", b"1")
            shutil.rmtree(broken.volume)
            (tmp_path / "file").write_bytes(b"of a file")
            for turn in range(6):
                client.put(f"v{turn}", b"value %d" % turn)
                client.put_file(f"f{turn}", tmp_path / "file")
        with client_of(cluster, fine) as other:
            assert other.get_many([f"v{turn}" for turn in range(6)]) == [b"value %d" % turn for turn in range(6)]
            assert other.get_many([f"f{turn}" for turn in range(6)]) == [b"of a file"] * 6
            assert nodes_of(other, "v5") >= {fine.node}


# ---- full ----


def test_a_full_worker_evicts_and_puts_never_fail(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=1, capacity="16MiB") as cluster, client_of(cluster, cluster.workers[0]) as client:
        values = {f"v{i}": os.urandom(MIB) for i in range(40)}
        for path, data in values.items():
            client.put(path, data)
        assert sum(Address.parse(p.name).length_bytes for p in cluster.workers[0].block_files) <= 16 * MIB
        got = client.get_many(list(values))
        assert all(data in (None, values[path]) for path, data in zip(values, got, strict=True))
        assert got[-1] == values["v39"], "the newest is there"
        assert got[0] is None, "the oldest went"
        present = [path for path, data in zip(values, got, strict=True) if data is not None]
        assert client.exists_many(list(values)) == [path in present for path in values], (
            "a name that resolves can be read"
        )


def test_a_value_larger_than_the_cluster_is_no_space(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=1, capacity="16MiB") as cluster:
        for worker in (cluster.workers[0], None):
            with client_of(cluster, worker) as client:
                client.put("small", os.urandom(1000))
                with pytest.raises(NoSpace):
                    client.put("v", bytes(17 * MIB))
                assert client.exists("small")


# ---- bad input ----

GARBAGE = [b"", b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", os.urandom(1000)]
MASTER = [
    method
    for method in vars(methods).values()
    if isinstance(method, methods.Method)
    and method.path.startswith("/kvstore.pb.Master/")
    and method is not methods.LIST
]


def every_way(channel: Any, path: str, garbage: bytes) -> Iterator[grpc.StatusCode | None]:
    """Send it as one message, for one and for many answers, and as a stream."""
    yield refused(lambda: channel.unary_unary(path)(garbage, timeout=5))
    yield refused(lambda: list(channel.unary_stream(path)(garbage, timeout=5)))
    yield refused(lambda: channel.stream_unary(path)(iter([garbage] * 3), timeout=5))


def refused(call: Callable[[], object]) -> grpc.StatusCode | None:
    """The status of a failed call; None when it was answered (an empty message may be a fine request)."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return None


@pytest.fixture(scope="module")
def quiet_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), workers=1) as cluster:
        yield cluster


@pytest.fixture
def survivor(quiet_cluster: Cluster) -> Iterator[Cluster]:
    """After the test the same processes run, and work."""
    pids = [p.pid for p in (quiet_cluster.master, *quiet_cluster.workers)]
    yield quiet_cluster
    with client_of(quiet_cluster, quiet_cluster.workers[0]) as client:
        data = os.urandom(10_000)
        client.put("still/works", data)
        assert client.get("still/works") == data
    assert [p.pid for p in (quiet_cluster.master, *quiet_cluster.workers)] == pids


@pytest.mark.parametrize("garbage", GARBAGE, ids=["empty", "ff", "endless", "random"])
def test_garbage_on_every_rpc_is_refused_and_the_processes_live(survivor: Cluster, garbage: bytes) -> None:
    endpoints = [survivor.master.facts["ENDPOINT"], survivor.workers[0].facts["ENDPOINT"]]
    paths = [method.path for method in MASTER]
    paths += [
        methods.LIST.path,
        methods.WORKER_STAT.path,
        methods.READ_PATH,
        methods.WRITE_PATH,
        "/kvstore.pb.Master/Nothing",
    ]
    for endpoint in endpoints:
        with grpc.insecure_channel(endpoint) as channel:
            for path in paths:
                for status in every_way(channel, path, garbage):
                    assert status is not grpc.StatusCode.DEADLINE_EXCEEDED, f"{path} hangs"


WRONG = [
    (methods.LOOKUP, m.LookupRequest(paths=["../x"])),
    (methods.LOOKUP, m.LookupRequest(paths=["x"] * 5000)),
    (methods.LOOKUP, m.LookupRequest(base=999_999_999, paths=["x"])),
    (methods.PUBLISH, m.PublishRequest(transactions=[m.Transaction(names=[m.PublishName(path="")])])),
    (methods.PUBLISH, m.PublishRequest(transactions=[m.Transaction(names=[m.PublishName(path="a/" * 300 + "b")])])),
    (methods.PUBLISH, m.PublishRequest(transactions=[m.Transaction(names=[m.PublishName(path="a", mode=0o170000)])])),
    (methods.MKDIR, m.MkdirRequest(paths=["n" * 256])),
    (methods.REMOVE, m.RemoveRequest(names=[m.RemoveName(path="")])),
    (methods.RENAME, m.RenameRequest(names=[m.RenameName(from_path="", to_path="x")])),
    (methods.SET_ATTR, m.SetAttrRequest(path="none", mode=2**32 - 1)),
    (methods.EVENTS, m.EventsRequest(after=2**64 - 1, limit=2**32 - 1)),
    (methods.REGISTER, m.RegisterRequest()),
    (methods.HEARTBEAT, m.HeartbeatRequest(node="nobody")),
    (methods.REPORT, m.ReportRequest(node="nobody", held_ids=b"123")),
]


@pytest.mark.parametrize(("method", "request_"), WRONG, ids=lambda value: getattr(value, "path", "")[-12:])
def test_a_wrong_request_gets_its_typed_error(
    survivor: Cluster, method: methods.Method[m.LookupRequest, m.LookupReply], request_: m.LookupRequest
) -> None:
    link = Link(survivor.master.facts["ENDPOINT"], Caller())
    failure: KvError | None = None
    try:
        link.call(method, request_, 5.0)  # inside a batch the error stands in the reply
    except KvError as error:
        failure = error
    finally:
        link.close()
    assert failure is None or (failure.code != KvError.code and failure.message), f"an internal error: {failure}"


def test_wrong_reads_and_writes_get_their_typed_errors(survivor: Cluster) -> None:
    link = Link(survivor.workers[0].facts["ENDPOINT"], Caller())
    try:
        for request in (w.ReadRequest(), w.ReadRequest(offset_bytes=2**63, size_bytes=2**63)):
            with pytest.raises(KvError) as read:
                list(link.read_frames(request, 5.0))
            assert read.value.code != KvError.code
        for head, frames in (
            (w.WriteRequest(length_bytes=3, hash=1), [b"abc"]),
            (w.WriteRequest(length_bytes=3), [b"ab"]),
            (w.WriteRequest(length_bytes=3), [b"abcd"]),
            (w.WriteRequest(length_bytes=0), []),
            (w.WriteRequest(length_bytes=2**62), [b"abc"]),
        ):
            with pytest.raises(KvError) as write:
                link.write_frames(head, frames, 5.0)
            assert write.value.code != KvError.code, f"an internal error: {write.value}"
    finally:
        link.close()


def test_garbage_on_the_unix_socket_ends_that_connection_only(survivor: Cluster) -> None:
    for garbage in (b"\xc1", os.urandom(500), b"\x93\x01\xa4open\x90"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(5)
            sock.connect(survivor.workers[0].socket)
            sock.send(garbage)
            sock.recv(65536)  # an error or the end, but not silence
