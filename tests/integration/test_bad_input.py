"""Any bytes on any port of real processes: a typed error, the process lives, and it holds no more than before."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from kvstore import Client
from kvstore.core import sockproto as sp
from kvstore.core.errors import InvalidRequest, KvError, NameTooLong, TooLarge, Unsupported
from kvstore.core.hashing import hash_block
from kvstore.core.limits import HANDSHAKE_TIMEOUT_S, MAX_BATCH, MIB, STALL_TIMEOUT_S
from kvstore.pb import master_pb2 as m
from kvstore.pb import worker_pb2 as w
from kvstore.rpc import methods
from kvstore.rpc.link import Link
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import READ_PATH, WRITE_PATH, Method
from kvstore.rpc.status import from_rpc_error
from tests.support import worker_kit as kit
from tests.support.cluster import Cluster, Process, wait_until

MAX_GROWTH_BYTES: Final = 160 * MIB
"""Of a process, however much is thrown at it: buffers that the allocators keep."""
MAX_MORE_FDS: Final = 24
"""Connections of the test itself, which may still be open."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("bad"), workers=1) as cluster:
        with Client(cluster.url, worker_socket=cluster.workers[0].socket) as client:
            client.put("warm", bytes(MIB))
        yield cluster


@pytest.fixture(autouse=True)
def _lives_on(cluster: Cluster) -> Iterator[None]:
    """Around each test: the same processes serve, with about the memory and the fds that they had."""
    processes = (cluster.master, cluster.workers[0])
    before = [(p.pid, rss(p), fds(p)) for p in processes]
    yield
    with Client(cluster.url, worker_socket=cluster.workers[0].socket) as client:
        client.put("after", b"served")
        assert client.get("after") == b"served"
    for process, (pid, memory, files) in zip(processes, before, strict=True):
        assert process.pid == pid, process.log_tail()
        assert rss(process) < memory + MAX_GROWTH_BYTES
        wait_until(closed(process, files), f"{process.name} closes what it was sent")
    assert not re.search("internal error|never retrieved", cluster.logs())


def rss(process: Process) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def fds(process: Process) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def closed(process: Process, before: int) -> Callable[[], bool]:
    return lambda: fds(process) <= before + MAX_MORE_FDS


def endpoints(cluster: Cluster) -> list[str]:
    return [cluster.master.facts["ENDPOINT"], cluster.workers[0].facts["ENDPOINT"]]


def connected(endpoint: str) -> socket.socket:
    host, _, port = endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


# ---- bytes on the gRPC ports

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, body: bytes, length: int | None = None) -> bytes:
    """Of HTTP/2; `length`: what its head says, if that is not true."""
    size = len(body) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


SETTINGS: Final = frame(4, 0, 0, b"")
NOISE: Final = random.Random(5)
RAW: Final[dict[str, bytes]] = {
    "nothing": b"",
    "noise": NOISE.randbytes(4096),
    "a megabyte of noise": NOISE.randbytes(MIB),
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + NOISE.randbytes(160),
    "half a preface": PREFACE[:10],
    "noise behind the preface": PREFACE + NOISE.randbytes(4096),
    "half a frame": PREFACE + SETTINGS + frame(1, 4, 1, b"abc", length=16_000),
    "a frame that is too large": PREFACE + SETTINGS + frame(0, 0, 1, b"", length=2**24 - 1),
    "data for no stream": PREFACE + SETTINGS + frame(0, 0, 7, bytes(100)),
    "header noise": PREFACE + SETTINGS + frame(1, 4, 1, NOISE.randbytes(200)),
    "headers without an end": PREFACE + SETTINGS + frame(1, 0, 1, b"") + 2000 * frame(9, 0, 1, bytes(100)),
    "frames of no kind": PREFACE + SETTINGS + b"".join(frame(kind, 255, 1, bytes(8)) for kind in range(10, 250)),
    "settings and pings": PREFACE + 5000 * SETTINGS + 5000 * frame(6, 0, 0, bytes(8)),
    "resets": PREFACE + SETTINGS + b"".join(frame(3, 0, stream, bytes(4)) for stream in range(1, 9999, 2)),
}


@pytest.mark.parametrize("data", RAW.values(), ids=RAW.keys())
def test_bytes_that_are_no_call(cluster: Cluster, data: bytes) -> None:
    for endpoint in endpoints(cluster):
        for _ in range(3):
            with connected(endpoint) as sock, contextlib.suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass


def test_who_connects_and_says_nothing_is_hung_up_on_and_others_are_served(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(e)) for e in endpoints(cluster) for _ in range(200)]
        local = [stack.enter_context(kit.connect(cluster.workers[0].socket)) for _ in range(100)]
        with Client(cluster.url, worker_socket=cluster.workers[0].socket) as client:
            assert client.get("warm") == bytes(MIB)
        begin = time.monotonic()
        for sock in (*silent, *local):
            sock.settimeout(3 * HANDSHAKE_TIMEOUT_S)
            with contextlib.suppress(ConnectionError):
                while sock.recv(65536):  # the server's settings, then the end
                    pass
        assert time.monotonic() - begin < 2 * HANDSHAKE_TIMEOUT_S


# ---- calls

ALL: Final = [method for method in vars(methods).values() if isinstance(method, Method)]


def served_at(cluster: Cluster, path: str) -> str:
    return endpoints(cluster)[0 if "Master" in path else 1]


def ask(endpoint: str, path: str, data: bytes, *, stream: bool = False) -> KvError | None:
    """Send bytes as the request of a call; the error that our own clients would make of the answer."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(endpoint, options=options) as channel:
        call: Any = (channel.unary_stream if stream else channel.unary_unary)(path)
        try:
            reply = call(data, timeout=10)
            if stream:
                list(reply)
        except grpc.RpcError as error:
            return from_rpc_error(error, endpoint)
    return None


@pytest.mark.parametrize("method", ALL, ids=lambda method: method.path.rpartition("/")[2])
def test_requests_that_cannot_be_parsed(cluster: Cluster, method: Method[Any, Any]) -> None:
    stream = method is methods.LIST
    for data in (b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x02\xff\xfe", NOISE.randbytes(2000)):
        error = ask(served_at(cluster, method.path), method.path, data, stream=stream)
        assert error is None or isinstance(error, InvalidRequest | Unsupported), repr(error)


def test_calls_that_do_not_exist(cluster: Cluster) -> None:
    for endpoint, path in itertools.product(endpoints(cluster), ("/x", "/kvstore.pb.Master/Nope", "/" + "x" * 4000)):
        assert isinstance(ask(endpoint, path, b""), Unsupported)


def test_a_message_that_is_too_large_is_not_tried_again_and_again(cluster: Cluster) -> None:
    assert isinstance(ask(endpoints(cluster)[0], methods.LOOKUP.path, bytes(17 * MIB)), TooLarge)
    with linked(cluster) as link:
        error = refused(lambda: link.call(methods.LOOKUP, m.LookupRequest(paths=["x" * 17 * MIB]), 10))
        assert isinstance(error, TooLarge), "the sender's own side says it first"


@contextlib.contextmanager
def linked(cluster: Cluster, caller: Caller = Caller(1)) -> Iterator[Link]:  # noqa: B008 - a tuple
    link = Link(endpoints(cluster)[0], caller)
    yield link
    link.close()


def refused(call: Callable[[], object]) -> KvError:
    with pytest.raises(KvError) as caught:
        call()
    return caught.value


def test_batches_and_names_beyond_their_bounds(cluster: Cluster) -> None:
    with linked(cluster) as link:
        too_many = ["x"] * (MAX_BATCH + 1)
        for method, request, kind in (
            (methods.LOOKUP, m.LookupRequest(paths=too_many), InvalidRequest),
            (methods.MKDIR, m.MkdirRequest(paths=too_many), InvalidRequest),
            (methods.STATFS, m.StatfsRequest(path="é" * 2048), NameTooLong),
            (methods.STATFS, m.StatfsRequest(path="é" * 127 + "/x\0"), InvalidRequest),
            (methods.STATFS, m.StatfsRequest(path="é/" * 100 + ".."), InvalidRequest),
            (methods.REGISTER, m.RegisterRequest(node="\n" * 10**6, boot=1, endpoint="h:1"), InvalidRequest),
            (methods.REGISTER, m.RegisterRequest(node="n", boot=1, endpoint="h:1", http="x" * 10**6), InvalidRequest),
        ):
            error = refused(lambda a=method, b=request: link.call(a, b, 10))  # type: ignore[misc]
            assert type(error) is kind, repr(error)
            assert len(error.message) < 3000


def test_a_deep_path_that_does_not_exist_is_named_in_the_error(cluster: Cluster) -> None:
    """Its text travels in a header, which has a bound: beyond it gRPC would refuse the whole answer."""
    with linked(cluster) as link:
        path = "/".join(["é" * 120] * 16)
        error = refused(lambda: link.call(methods.GET_POLICY, m.GetPolicyRequest(path=path), 10))
    assert error.code == 3, repr(error)


@pytest.mark.parametrize(
    "metadata",
    [
        (("kvstore-session", "-1"),),
        (("kvstore-session", "f" * 4000),),
        (("kvstore-protocol", "99"),),
        (("kvstore-node-bin", b"\xff\0"),),
        (("kvstore-cluster", "x" * 5000),),
    ],
)
def test_metadata(cluster: Cluster, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    with grpc.insecure_channel(endpoints(cluster)[0]) as channel:
        call: Any = channel.unary_unary(
            methods.LOOKUP.path, m.LookupRequest.SerializeToString, m.LookupReply.FromString
        )
        with contextlib.suppress(grpc.RpcError):
            call(m.LookupRequest(paths=["warm"]), timeout=10, metadata=metadata)


# ---- frames of blocks


def test_a_write_that_stops_in_the_middle_is_dropped_in_time(cluster: Cluster) -> None:
    """Without a deadline of its own: nothing but the worker ends it."""
    endpoint = endpoints(cluster)[1]
    head = w.WriteRequest(session=9, length_bytes=4 * MIB, hash=1).SerializeToString()
    stop = [False]

    def frames() -> Iterator[bytes]:
        yield head
        yield bytes(MIB)
        while not stop[0]:
            time.sleep(0.05)

    staging = cluster.workers[0].volume / "staging"
    with grpc.insecure_channel(endpoint) as channel:
        call: Any = channel.stream_unary(WRITE_PATH)
        calls = [call.future(frames()) for _ in range(5)]
        wait_until(lambda: len(list(staging.iterdir())) >= 5, "they write")
        wait_until(lambda: not list(staging.iterdir()), "what they wrote is gone", 3 * STALL_TIMEOUT_S)
        errors = [from_rpc_error(each.exception(timeout=10), endpoint) for each in calls]
        stop[0] = True
    assert {error.reason for error in errors} == {"timeout"}


def test_a_read_that_nobody_takes_gives_its_file_back(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    data = os.urandom(48 * MIB)
    with Client(cluster.url, worker_socket=worker.socket) as client:
        client.put("large", data)
    with linked(cluster) as link:
        entries = link.call(methods.LOOKUP, m.LookupRequest(paths=["large"]), 10).entries
    boot, counter = struct.unpack(">QQ", entries.block_ids)
    request = w.ReadRequest()
    request.address.boot, request.address.counter = boot, counter
    request.address.length_bytes, request.address.hash = len(data), hash_block(data)
    [path] = [p for p in worker.block_files if f".{len(data)}." in p.name]

    def holders() -> int:
        return sum(os.path.realpath(link) == str(path) for link in Path(f"/proc/{worker.pid}/fd").iterdir())

    with grpc.insecure_channel(endpoints(cluster)[1]) as channel:
        call: Any = channel.unary_stream(READ_PATH)
        calls = [call(request.SerializeToString()) for _ in range(5)]
        wait_until(lambda: holders() >= 5, "they read")
        wait_until(lambda: holders() == 0, "their files are closed", 3 * STALL_TIMEOUT_S)
        for each in calls:
            each.cancel()


# ---- the worker's Unix socket


def test_floods_of_fds_where_none_belong(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    before = fds(worker)
    with open(os.devnull, "rb") as null, kit.connect(worker.socket) as sock:
        sock.send(kit.hello(77))
        sock.recv(4096)
        for i in range(300):
            socket.send_fds(sock, [sp.encode_request(i, sp.Stat())], [null.fileno()] * 250)
            assert sp.decode_reply(sock.recv(4096))[0] == i
        assert fds(worker) < before + MAX_MORE_FDS


def test_who_asks_for_fds_and_takes_none_is_bounded(cluster: Cluster) -> None:
    """Each of many clients asks for as much as it can, and reads nothing."""
    worker = cluster.workers[0]
    with Client(cluster.url, worker_socket=worker.socket) as client:
        client.put("small", b"0123456789")
    with linked(cluster) as link:
        entries = link.call(methods.LOOKUP, m.LookupRequest(paths=["small"]), 10).entries
    address = (*struct.unpack(">QQ", entries.block_ids), 10, hash_block(b"0123456789"))
    request = sp.encode_request(1, sp.Open([address] * 64, [[]] * 64, 5.0))
    before = fds(worker)
    with contextlib.ExitStack() as stack:
        for session in range(100, 112):
            sock = stack.enter_context(kit.connect(worker.socket))
            sock.send(kit.hello(session))
            sock.recv(4096)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(100):
                    sock.send(request)
        with Client(cluster.url, worker_socket=worker.socket) as client:
            assert client.get("small") == b"0123456789"
        assert fds(worker) < before + 6000
        wait_until(lambda: fds(worker) < before + MAX_MORE_FDS, "they are hung up on", 4 * STALL_TIMEOUT_S)


# ---- HTTP


def test_http(tmp_path: Path) -> None:
    argv = ["master", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    master = Process("http", argv, tmp_path)
    master.start()
    try:
        endpoint = master.facts["HTTP"]
        with contextlib.ExitStack() as stack:
            for _ in range(300):  # they say nothing
                stack.enter_context(connected(endpoint))
            for data in (
                *RAW.values(),
                b"POST / HTTP/1.1\r\n\r\n",
                b"GET /" + b"x" * 10**6,
                b"GET /metrics HTTP/9\r\n\r\n",
            ):
                with connected(endpoint) as sock, contextlib.suppress(OSError):
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass
            with connected(endpoint) as sock:
                sock.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert sock.recv(100).startswith(b"HTTP/1.1 200 ")
    finally:
        master.close()
    assert not re.search("internal error|never retrieved", master.log_tail())
