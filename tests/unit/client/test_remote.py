"""Blocks over the network with workers that send other bytes, stop, refuse: never wrong bytes, always another try."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from kvstore.client.cluster import AsyncCluster, Cluster
from kvstore.client.messages import ClusterMap, Node
from kvstore.client.meta import AsyncMeta, Meta
from kvstore.client.remote import AsyncRemote, Remote
from kvstore.client.sockets import SealedBlock
from kvstore.core.errors import (
    Corrupt,
    Denied,
    InvalidRequest,
    KvError,
    NoSpace,
    NotFound,
    Overloaded,
    Timeout,
    Unavailable,
)
from kvstore.core.hashing import hash_block
from kvstore.core.limits import METADATA_TIMEOUT_S
from kvstore.core.told import WorkerCounters
from kvstore.core.types import Address, BlockId, Replica
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.breaker import NotAsked
from kvstore.rpc.entries import address_from_pb, address_to_pb
from kvstore.rpc.metadata import Caller
from kvstore.rpc.server import Server
from tests.support.fake_frames import FakeFrames
from tests.support.proxy import Proxy
from tests.support.worker_kit import until

DATA = os.urandom((2 << 20) + 5)
ADDRESS = Address(BlockId(1, 2), len(DATA), hash_block(DATA))
FRAMES = [DATA[i : i + (1 << 20)] for i in range(0, len(DATA), 1 << 20)]


class KnownMap:
    """In the place of the master: the map of the workers that the test started."""

    def __init__(self, endpoints: list[str]) -> None:
        counters = WorkerCounters(0, 0, 0, 0, 0, 0, 0, 0)
        self.nodes = tuple(Node(e, e, "", True, 0, (), counters, 0, False, "") for e in endpoints)

    def cluster_map(self, *, timeout_s: float) -> ClusterMap:
        return ClusterMap("c", 1, self.nodes, 0, 0, "", 1 << 30)


class AsyncKnownMap(KnownMap):
    async def cluster_map(self, *, timeout_s: float) -> ClusterMap:  # type: ignore[override]
        return super().cluster_map(timeout_s=timeout_s)


class World:
    """Fake workers, and a remote of the kind under test whose calls are awaited whichever it is."""

    def __init__(self, stack: AsyncExitStack, in_loop: bool) -> None:
        self._stack, self._in_loop = stack, in_loop
        self.endpoints: list[str] = []
        self.remote: Any = None
        self.breakers: Any = None

    async def add(self, fake: FakeFrames) -> str:
        server: Server = await fake.serve()
        self._stack.push_async_callback(server.stop, 0)
        self.endpoints.append(server.endpoint)
        return server.endpoint

    def add_dead(self) -> str:
        """An address where nobody listens."""
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.endpoints.append(f"127.0.0.1:{sock.getsockname()[1]}")
        return self.endpoints[-1]

    def start(self) -> None:
        if self._in_loop:
            cluster = AsyncCluster(cast("AsyncMeta", AsyncKnownMap(self.endpoints)), Caller(5))
            self._stack.push_async_callback(cluster.close)
            self.remote, self.breakers = AsyncRemote(cluster, 5), cluster.breakers
        else:
            blocking = Cluster(cast("Meta", KnownMap(self.endpoints)), Caller(5))
            self._stack.callback(blocking.close)
            self.remote, self.breakers = Remote(blocking, 5), blocking.breakers

    async def load(self, *endpoints: str, timeout_s: float = 10.0) -> bytes:
        """From replicas in this order: the fast tier first."""
        view = memoryview(bytearray(len(DATA)))
        replicas = [Replica(i, ("mem", "ssd", "hdd")[i], e, e) for i, e in enumerate(endpoints)]
        await self._call(self.remote.load, ADDRESS, replicas, view, timeout_s=timeout_s)
        return bytes(view)

    async def store(self, data: bytes = DATA, timeout_s: float = 10.0) -> SealedBlock:
        frames = [data[i : i + (1 << 20)] for i in range(0, len(data), 1 << 20)]
        stored = await self._call(self.remote.store, len(data), hash_block(data), lambda: frames, timeout_s=timeout_s)
        return cast("SealedBlock", stored)

    async def give_up(self, blocks: list[SealedBlock]) -> None:
        if self._in_loop:
            self.remote.give_up(blocks)
        else:
            await asyncio.to_thread(self.remote.give_up, blocks)

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._in_loop:
            return await function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)


@pytest.fixture(params=["async", "sync"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack, request.param == "async")


def good() -> FakeFrames:
    return FakeFrames(read=lambda _: FRAMES, write=sealed)


def sealed(request: w.WriteRequest, data: bytes) -> w.WriteReply:
    address = Address(BlockId(7, 7), len(data), hash_block(data))
    return w.WriteReply(address=address_to_pb(address), volume=3)


# ---- load ----


async def test_a_block_comes_from_its_replica(world: World) -> None:
    fake = good()
    endpoint = await world.add(fake)
    world.start()
    assert await world.load(endpoint) == DATA
    (request,) = fake.reads
    assert address_from_pb(request.address) == ADDRESS


FLIPPED = [bytes([FRAMES[0][0] ^ 1]) + FRAMES[0][1:], *FRAMES[1:]]


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (FLIPPED, Corrupt),
        (FRAMES[:-1], Corrupt),
        ([*FRAMES, b"x"], Corrupt),
        ([FRAMES[1], FRAMES[0], *FRAMES[2:]], Corrupt),
        ([], Corrupt),
        (NotFound("not here"), NotFound),
        (Overloaded("busy"), Overloaded),
        (Unavailable("starting"), Unavailable),
    ],
    ids=["one bit", "short", "long", "out of order", "nothing", "not found", "overloaded", "unavailable"],
)
async def test_what_is_not_the_block_is_never_returned_and_the_next_replica_is_asked(
    world: World, frames: list[bytes] | KvError, kind: type[KvError]
) -> None:
    bad = await world.add(FakeFrames(read=lambda _: frames))
    fine = await world.add(good())
    world.start()
    with pytest.raises(kind):
        await world.load(bad)
    assert await world.load(bad, fine) == DATA


async def test_a_dead_worker_is_not_asked_again_at_once(world: World) -> None:
    dead, fake = world.add_dead(), good()
    fine = await world.add(fake)
    world.start()
    assert await world.load(dead, fine) == DATA
    assert not world.breakers.closed(dead)
    with pytest.raises(Unavailable, match="did not answer a moment ago"):
        await world.load(dead)
    assert await world.load(dead, fine) == DATA


async def test_no_replica(world: World) -> None:
    world.start()
    with pytest.raises(NotFound) as caught:
        await world.load()
    assert caught.value.reason == "no_replica"


async def test_a_refusal_for_the_caller_is_not_shopped_around(world: World) -> None:
    fake = good()
    bad, fine = await world.add(FakeFrames(read=lambda _: Denied("another cluster"))), await world.add(fake)
    world.start()
    with pytest.raises(Denied):
        await world.load(bad, fine)
    assert fake.reads == []


# ---- store ----


async def test_a_block_goes_to_a_worker(world: World) -> None:
    fake = good()
    endpoint = await world.add(fake)
    world.start()
    assert await world.store() == SealedBlock(Address(BlockId(7, 7), len(DATA), hash_block(DATA)), 3, endpoint)
    (request,) = fake.writes
    assert (request.session, request.length_bytes, request.hash) == (5, len(DATA), hash_block(DATA))


async def test_blocks_are_given_up_where_they_lie_whoever_else_is_gone(world: World) -> None:
    dead, fakes = world.add_dead(), [good(), good()]
    endpoints = [await world.add(fake) for fake in fakes]
    world.start()
    blocks = [SealedBlock(ADDRESS._replace(hash=i), 3, e) for i, e in enumerate([dead, *endpoints, endpoints[1]])]
    await world.give_up(blocks)
    await until(lambda: all(fake.given_up for fake in fakes))
    (first,), (second,) = (fake.given_up for fake in fakes)
    assert (first.session, [a.hash for a in first.addresses]) == (5, [1])
    assert (second.session, [a.hash for a in second.addresses]) == (5, [2, 3])


async def test_what_is_told_in_the_background_ends_with_the_client() -> None:
    async with AsyncExitStack() as stack:
        world = World(stack, in_loop=True)
        world.start()
        world.remote.give_up([SealedBlock(ADDRESS, 3, "127.0.0.1:1")])
        await world.remote.close()
        assert not world.remote._giving_up


OWN_FAULTS = [
    NoSpace("full"),
    Overloaded("busy"),
    Unavailable("starting"),
    Corrupt("bad disk"),
    NotFound("making a staging file: No such file or directory"),
    KvError("a bug"),
]


@pytest.mark.parametrize("error", OWN_FAULTS)
async def test_another_worker_takes_what_one_refuses(world: World, error: KvError) -> None:
    refusing, fine = FakeFrames(write=lambda *_: error), good()
    await world.add(refusing)
    await world.add(fine)
    world.start()
    for _ in range(8):  # either may be chosen first
        assert (await world.store(b"abc")).volume == 3
    assert len(fine.writes) == 8


async def test_a_wrong_request_is_not_shopped_around(world: World) -> None:
    fakes = [FakeFrames(write=lambda *_: InvalidRequest("length")) for _ in range(2)]
    for fake in fakes:
        await world.add(fake)
    world.start()
    with pytest.raises(InvalidRequest):
        await world.store(b"abc")
    assert sum(len(fake.writes) for fake in fakes) == 1


async def test_a_dead_worker_is_passed_over(world: World) -> None:
    world.add_dead()
    await world.add(good())
    world.start()
    for _ in range(4):
        assert (await world.store(b"abc")).volume == 3


async def test_when_all_refuse_the_last_reason_is_told(world: World) -> None:
    for _ in range(2):
        await world.add(FakeFrames(write=lambda *_: NoSpace("full")))
    world.start()
    with pytest.raises(NoSpace):
        await world.store(b"abc")


async def test_there_is_no_worker(world: World) -> None:
    world.start()
    with pytest.raises(Unavailable, match="no live worker"):
        await world.store(b"abc")


async def test_a_worker_that_stored_other_bytes_is_not_believed(world: World) -> None:
    await world.add(FakeFrames(write=lambda request, _: sealed(request, b"other")))
    world.start()
    with pytest.raises(Corrupt, match="other bytes"):
        await world.store(b"abc")


async def test_a_worker_that_never_answers_is_a_timeout(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        world.endpoints.append(f"127.0.0.1:{silent.getsockname()[1]}")
        world.start()
        with pytest.raises((Timeout, Unavailable)):
            await world.store(b"abc", timeout_s=0.3)
        with pytest.raises((Timeout, Unavailable)):
            await world.load(world.endpoints[0], timeout_s=0.3)


async def test_a_peer_that_stops_in_the_middle_ends_by_the_deadline_and_is_not_waited_for_again(world: World) -> None:
    fake = good()
    with Proxy(await world.add(fake), after_bytes=1 << 20) as proxy:
        world.endpoints.append(proxy.endpoint)
        world.start()
        begin = time.monotonic()
        with pytest.raises(Timeout):
            await world.load(proxy.endpoint, timeout_s=METADATA_TIMEOUT_S)
        assert time.monotonic() - begin < METADATA_TIMEOUT_S + 2.0
        begin = time.monotonic()
        for _ in range(20):
            with pytest.raises(NotAsked):
                await world.load(proxy.endpoint)
        assert time.monotonic() - begin < METADATA_TIMEOUT_S
        assert len(fake.reads) == 1
        proxy.mend()
        await until(lambda: world.breakers.closed(proxy.endpoint))
        assert await world.load(proxy.endpoint) == DATA
