"""Several addresses of one server: after a silence that proves something the next call goes to the next address, and no
call is made twice for it (rules 21, 29).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from kvstore.core.errors import Timeout, Unavailable
from kvstore.core.limits import METADATA_TIMEOUT_S
from kvstore.pb import master_pb2, master_pb2_grpc
from kvstore.rpc import methods, server
from kvstore.rpc.failover import AsyncFailover, Failover
from kvstore.rpc.metadata import Caller


class Address(master_pb2_grpc.MasterServicer):
    """A server whose connections live; `stopped`: it answers nothing, after `pages` of a listing."""

    def __init__(self) -> None:
        self.calls, self.pages = 0, 0
        self.stopped = False
        self.refuses = False
        self.admission = server.Admission()

    async def _answer(self) -> None:
        self.calls += 1
        if self.refuses:
            raise Unavailable("not now")
        if self.stopped:
            await asyncio.sleep(60)

    @server.unary
    async def Lookup(self, request: master_pb2.LookupRequest, caller: Caller) -> master_pb2.LookupReply:
        await self._answer()
        return master_pb2.LookupReply()

    @server.unary
    async def Mkdir(self, request: master_pb2.MkdirRequest, caller: Caller) -> master_pb2.MkdirReply:
        await self._answer()
        return master_pb2.MkdirReply()

    @server.streaming
    async def List(self, request: master_pb2.ListRequest, caller: Caller) -> AsyncIterator[master_pb2.ListPage]:
        for _ in range(self.pages):
            yield master_pb2.ListPage(names=["a"])
        await self._answer()


class World:
    """Two addresses, and one client of both."""

    def __init__(self, first: Address, second: Address, client: AsyncFailover | Failover) -> None:
        self.first, self.second, self._client = first, second, client

    @property
    def calls(self) -> tuple[int, int]:
        return self.first.calls, self.second.calls

    async def lookup(self, timeout_s: float) -> None:
        await self._call(methods.LOOKUP, master_pb2.LookupRequest(paths=["a"]), timeout_s)

    async def mkdir(self, timeout_s: float) -> None:
        await self._call(methods.MKDIR, master_pb2.MkdirRequest(paths=["a"]), timeout_s)

    async def list(self, timeout_s: float) -> None:
        client, request = self._client, master_pb2.ListRequest()
        if isinstance(client, AsyncFailover):
            async for _ in client.stream(methods.LIST, request, timeout_s):
                pass
        else:
            await asyncio.to_thread(lambda: list(client.stream(methods.LIST, request, timeout_s)))

    async def _call(self, method: methods.Method[methods.Q, methods.A], request: methods.Q, timeout_s: float) -> None:
        if isinstance(self._client, AsyncFailover):
            await self._client.call(method, request, timeout_s)
        else:
            await asyncio.to_thread(self._client.call, method, request, timeout_s)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Address, str]]:
    address = Address()  # type: ignore[abstract] # the other methods answer "unimplemented"

    def add(grpc_server: grpc.aio.Server) -> None:
        master_pb2_grpc.add_MasterServicer_to_server(address, grpc_server)

    running = await server.serve("127.0.0.1:0", [add])
    try:
        yield address, running.endpoint
    finally:
        await running.stop(0)


@pytest.fixture(params=[AsyncFailover, Failover], ids=["async", "sync"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """The first address has answered once: its connection lives."""
    async with listening() as (first, one), listening() as (second, other):
        client = request.param([one, other], Caller())
        world = World(first, second, client)
        await world.lookup(10.0)
        yield world
        closing = client.close()
        if closing is not None:
            await closing


async def test_after_a_whole_timeout_the_next_call_goes_to_the_next_address(world: World) -> None:
    world.first.stopped = True
    with pytest.raises(Timeout):
        await world.lookup(METADATA_TIMEOUT_S)
    assert world.calls == (2, 0)
    await world.lookup(10.0)
    await world.lookup(10.0)
    assert world.calls == (2, 2)


async def test_a_mutation_that_timed_out_is_not_repeated_there(world: World) -> None:
    world.first.stopped = True
    with pytest.raises(Timeout):
        await world.mkdir(METADATA_TIMEOUT_S)
    assert world.calls == (2, 0)
    await world.mkdir(10.0)
    assert world.calls == (2, 1)


async def test_nor_is_one_that_was_unavailable_and_the_next_call_does_not_meet_the_same(world: World) -> None:
    world.first.refuses = True
    with pytest.raises(Unavailable):
        await world.mkdir(10.0)
    assert world.calls == (2, 0)
    await world.mkdir(10.0)
    assert world.calls == (2, 1)


async def test_the_impatience_of_a_caller_proves_nothing(world: World) -> None:
    world.first.stopped = True
    for _ in range(2):
        with pytest.raises(Timeout):
            await world.lookup(0.05)
    world.first.stopped = False
    await world.lookup(10.0)
    assert world.second.calls == 0


async def test_a_silent_listing_proves_something_and_a_slow_one_does_not(world: World) -> None:
    world.first.stopped, world.first.pages = True, 2
    with pytest.raises(Timeout):
        await world.list(METADATA_TIMEOUT_S)
    world.first.pages = 0
    with pytest.raises(Timeout):
        await world.list(METADATA_TIMEOUT_S)
    assert world.calls == (3, 0), "the first one had brought something"
    await world.list(10.0)
    assert world.calls == (3, 1)
