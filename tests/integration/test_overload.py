"""More work than a server takes: who is beyond its bounds is told so, and when to come again; heartbeats pass."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc.aio
import pytest

from kvstore import Client
from kvstore.core import sockproto as sp
from kvstore.core.errors import KvError, NotFound, Overloaded
from kvstore.core.hashing import hash_block
from kvstore.core.limits import MIB, RETRY_AFTER_S
from kvstore.core.types import Address, BlockId
from kvstore.master.metrics import MasterMetrics
from kvstore.master.service import MasterService
from kvstore.pb import master_pb2 as m
from kvstore.pb import worker_pb2 as w
from kvstore.rpc import methods
from kvstore.rpc.entries import address_to_pb
from kvstore.rpc.failover import AsyncFailover
from kvstore.rpc.link import AsyncLink, Link
from kvstore.rpc.metadata import Caller
from kvstore.rpc.server import serve
from kvstore.rpc.transport import SERVER_OPTIONS, GrpcTransport
from tests.support import worker_kit as kit
from tests.support.cluster import Cluster, wait_until
from tests.support.crowd import Crowd
from tests.unit.master.world import World, running

CLIENTS: Final = int(os.environ.get("KVSTORE_CLIENTS", "300"))
"""That come back at once after the master's restart; 2,000 in long runs."""
PROCESSES: Final = 3
MAX_MASTER_BYTES: Final = 300 * MIB
"""With 2,000 connections, too."""

LOOKUP: Final = m.LookupRequest(paths=[""])
BEAT: Final = m.HeartbeatRequest(node="n1", boot=7)


class Tight(GrpcTransport):
    """gRPC itself takes two calls at a time."""

    def server(self) -> grpc.aio.Server:
        return grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=2)


@asynccontextmanager
async def master(transport: GrpcTransport | None = None) -> AsyncIterator[tuple[World, MasterService, str]]:
    """Of one process, with a node, behind real gRPC."""
    async with running() as world:
        await world.join(1)
        service = MasterService(world.master, world.runtime, MasterMetrics(world.master))
        server = await serve("127.0.0.1:0", [service.add_to], transport=transport or GrpcTransport())
        try:
            yield world, service, server.endpoint
        finally:
            await server.stop(0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, workers=1, tick="300ms", dead_ticks=10) as cluster:
        with Client(cluster.url, worker_socket=cluster.workers[0].socket) as client:
            client.put("warm", b"data")
        yield cluster


# ---- bounds, and what is said beyond them


async def test_calls_beyond_the_bound_are_refused_with_a_hint_and_heartbeats_are_not() -> None:
    async with master() as (_, service, endpoint):
        link = AsyncLink(endpoint, Caller())
        with contextlib.ExitStack() as stack:
            for _ in range(service.admission.limit):
                stack.enter_context(service.admission)
            with pytest.raises(Overloaded) as refused:
                await link.call(methods.LOOKUP, LOOKUP, 5)
            with pytest.raises(Overloaded):
                await anext(link.stream(methods.LIST, m.ListRequest(), 5))
            reply = await link.call(methods.HEARTBEAT, BEAT, 5)
        assert refused.value.retry_after_s == RETRY_AFTER_S
        assert not reply.commands, "it is registered"
        await link.call(methods.LOOKUP, LOOKUP, 5)
        assert service.admission.under_way == 0
        await link.close()


async def test_a_refused_call_waits_as_it_was_told_and_then_succeeds() -> None:
    async with master() as (_, service, endpoint):
        link = AsyncFailover([endpoint], Caller())
        stack = contextlib.ExitStack()
        for _ in range(service.admission.limit):
            stack.enter_context(service.admission)
        begin = time.monotonic()
        call = asyncio.create_task(link.call(methods.LOOKUP, LOOKUP, 10))
        async with asyncio.timeout(10):
            while not service.admission.refused:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.001)
        stack.close()
        await call
        assert time.monotonic() - begin >= RETRY_AFTER_S
        assert service.admission.refused == 1
        await link.close()


async def test_what_grpc_itself_refuses_is_overloaded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with master(Tight()) as (world, service, endpoint):
        link, patient = AsyncLink(endpoint, Caller()), AsyncFailover([endpoint], Caller())
        flushed = asyncio.Event()
        monkeypatch.setattr(world.committer, "durable", flushed.wait)  # a drive that is slow
        stuck = [asyncio.create_task(patient.call(methods.MKDIR, m.MkdirRequest(paths=["d"]), 30)) for _ in range(2)]
        async with asyncio.timeout(10):
            while service.admission.under_way < 2:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.001)
        with pytest.raises(Overloaded) as refused:
            await link.call(methods.LOOKUP, LOOKUP, 5)
        assert refused.value.retry_after_s == RETRY_AFTER_S
        flushed.set()
        await asyncio.gather(*stuck)
        await asyncio.gather(link.close(), patient.close())


@pytest.mark.allow_errors("ExecuteBatchError")  # gRPC's word for a reader who went while it sent
async def test_blocks_beyond_the_bound_are_refused_and_the_worker_says_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.worker.serving.service.MAX_BULK_STREAMS", 2)
    async with kit.running(kit.settings(tmp_path)) as worker:
        block = await kit.put(worker, bytes(40 * MIB))
        request = w.ReadRequest(address=address_to_pb(block.address))
        links = [AsyncLink(worker.endpoint, Caller()) for _ in range(3)]
        streams = [link.read_frames(request, 20) for link in links]
        for stream in streams[:2]:
            assert await anext(stream)
        with pytest.raises(Overloaded) as refused:
            await anext(streams[2])
        assert refused.value.retry_after_s == RETRY_AFTER_S
        assert (await links[2].call(methods.WORKER_STAT, w.WorkerStatRequest(), 5)).node == "a"
        for stream in streams:
            await stream.aclose()
        assert await _read(links[2], request) == 40 * MIB
        for link in links:
            await link.close()


async def _read(link: AsyncLink, request: w.ReadRequest) -> int:
    """Bytes. The worker hears of readers who went a moment later."""
    async with asyncio.timeout(20):
        while True:
            try:
                return sum([len(frame) async for frame in link.read_frames(request, 20)])
            except Overloaded as error:
                await asyncio.sleep(error.retry_after_s)


async def test_fetches_beyond_the_bound_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.worker.serving.fetch.MAX_FETCHES", 1)
    async with kit.running(kit.settings(tmp_path)) as worker:
        gate = asyncio.Event()

        async def wait(*_: object) -> None:
            await gate.wait()
            raise NotFound("nobody has it")

        monkeypatch.setattr(worker.fetcher, "_try_all", wait)
        first, second = (Address(BlockId(1, i), 10, 1) for i in (1, 2))
        replicas = sp.from_wire_replicas([(1, "ssd", "b", kit.NOBODY)])
        opening = asyncio.create_task(worker.opener.open(first, replicas, 20.0))
        await kit.until(lambda: worker.fetcher._flights)
        with pytest.raises(Overloaded):
            await worker.opener.open(second, replicas, 20.0)
        gate.set()
        with pytest.raises(NotFound):
            await opening


async def test_sessions_beyond_the_bound_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.worker.writes.sessions.MAX_SESSIONS", 2)
    async with kit.running(kit.settings(tmp_path)) as worker:
        answers = []
        with contextlib.ExitStack() as stack:
            for session in (1, 2, 3, 2):
                sock = stack.enter_context(kit.connect(worker.settings.socket))
                await asyncio.to_thread(sock.send, kit.hello(session))
                answers.append(sp.decode_reply(await asyncio.to_thread(sock.recv, 4096))[1])
        assert [isinstance(answer, KvError) for answer in answers] == [False, False, True, False]
        assert isinstance(answers[2], Overloaded)
        assert answers[2].retry_after_s == RETRY_AFTER_S


# ---- real processes


def test_heartbeats_pass_while_blocks_are_read_as_fast_as_can_be(cluster: Cluster) -> None:
    data = os.urandom(16 * MIB)
    with Client(cluster.url, worker_socket=cluster.workers[0].socket) as client:
        client.put("large", data)
    request, stop, read = _read_request(cluster, data), threading.Event(), []

    def flood() -> None:
        link = Link(cluster.workers[0].facts["ENDPOINT"], Caller())
        while not stop.is_set():
            with contextlib.suppress(KvError):
                read.append(sum(map(len, link.read_frames(request, 20))))
        link.close()

    threads = [threading.Thread(target=flood) for _ in range(24)]
    for thread in threads:
        thread.start()
    ages, end = [], time.monotonic() + 4
    while time.monotonic() < end:
        [node] = cluster.map().nodes
        assert node.live
        ages.append(node.heartbeat_age_s)
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    assert sum(read) > 10 * len(data), "it was under load"
    assert max(ages) < 10 * 0.3


def _read_request(cluster: Cluster, data: bytes) -> w.ReadRequest:
    [path] = [p for p in cluster.workers[0].block_files if f".{len(data)}." in p.name]
    address = Address.parse(path.name)
    assert address.hash == hash_block(data)
    return w.ReadRequest(address=address_to_pb(address))


def test_a_crowd_that_comes_back_at_once_after_a_restart_is_served(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        crowds = [Crowd(cluster.url, CLIENTS // PROCESSES) for _ in range(PROCESSES)]
        for crowd in crowds:
            stack.callback(crowd.close)
        before = _served(crowds)
        cluster.master.kill()
        time.sleep(2.0)  # all have noticed, and wait in their back-offs
        cluster.master.start()
        after = _served(crowds)
        wait_until(lambda: all(node.live and node.heartbeat_age_s >= 0 for node in cluster.map().nodes), "beats arrive")
        print(f"{CLIENTS} clients: all connected {before:.1f} s after they began, again {after:.1f} s after the start")
        steady = _served(crowds)
        [node] = cluster.map().nodes
        assert node.live, "its heartbeats were not starved"
        assert steady < 10
        assert _rss(cluster) < MAX_MASTER_BYTES
    assert "internal error" not in cluster.logs()


def _served(crowds: list[Crowd], timeout_s: float = 60.0) -> float:
    """Seconds until every client of them has been served."""
    for crowd in crowds:
        crowd.ask()
    return max(crowd.answer(timeout_s).took_s for crowd in crowds)


def _rss(cluster: Cluster) -> int:
    pages = Path(f"/proc/{cluster.master.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")
