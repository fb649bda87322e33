"""The master's link behind its breaker: who is refused, who waits, and what a long listing does not prove."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any, cast

import pytest

from kvstore.client.masterlink import AsyncMasterLink, MasterLink
from kvstore.core.errors import KvError, Timeout, Unavailable
from kvstore.core.limits import METADATA_TIMEOUT_S
from kvstore.pb import master_pb2 as m
from kvstore.rpc import methods
from kvstore.rpc.breaker import NotAsked
from kvstore.rpc.failover import AsyncFailover, Failover

MASTER = "m:1"
LATE = Timeout("no answer in time", fault=MASTER)


class Wire:
    """In the place of the failover: every call ends with `error`, a stream after `pages`."""

    def __init__(self) -> None:
        self.error: KvError | None = None
        self.pages = 0
        self.asked = 0

    def call(self, method: Any, request: Any, timeout_s: float) -> Any:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return m.StatfsReply()

    def stream(self, method: Any, request: Any, timeout_s: float) -> Generator[Any, None, None]:
        yield from [m.ListPage()] * self.pages
        if self.error is not None:
            raise self.error


class AsyncWire:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def call(self, *args: Any) -> Any:
        return self._wire.call(*args)

    async def stream(self, *args: Any) -> AsyncGenerator[Any, None]:
        for page in self._wire.stream(*args):
            yield page


class World:
    def __init__(self, kind: str) -> None:
        self.wire = Wire()
        self.link: AsyncMasterLink | MasterLink
        if kind == "async":
            self.link = AsyncMasterLink(cast("AsyncFailover", AsyncWire(self.wire)), [MASTER])
        else:
            self.link = MasterLink(cast("Failover", self.wire), [MASTER])

    async def call(self, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        if isinstance(self.link, AsyncMasterLink):
            await self.link.call(methods.STATFS, m.StatfsRequest(), timeout_s)
        else:
            self.link.call(methods.STATFS, m.StatfsRequest(), timeout_s)

    async def list(self, timeout_s: float = METADATA_TIMEOUT_S) -> int:
        """Pages that came."""
        if isinstance(self.link, AsyncMasterLink):
            return len([p async for p in self.link.stream(methods.LIST, m.ListRequest(), timeout_s)])
        return len(list(self.link.stream(methods.LIST, m.ListRequest(), timeout_s)))

    async def close(self) -> None:
        closing = self.link.close()
        if closing is not None:
            await closing


@pytest.fixture(params=["async", "sync"])
async def world(request: pytest.FixtureRequest) -> Any:
    world = World(request.param)
    yield world
    await world.close()


async def test_one_timeout_and_nobody_waits(world: World) -> None:
    world.wire.error = LATE
    with pytest.raises(Timeout):
        await world.call()
    assert world.link.is_away
    with pytest.raises(NotAsked):
        await world.call()
    with pytest.raises(NotAsked):
        await world.list()


async def test_who_gives_more_time_is_let_through(world: World) -> None:
    world.wire.error = Unavailable("refused", fault=MASTER)
    with pytest.raises(Unavailable):
        await world.call()
    world.wire.error = None
    await world.call(METADATA_TIMEOUT_S + 0.1)
    assert not world.link.is_away, "and what he found out is good for all"


async def test_the_masters_own_refusal_is_an_answer(world: World) -> None:
    world.wire.error = Unavailable("a rebuild is under way")
    with pytest.raises(Unavailable):
        await world.call()
    assert not world.link.is_away


async def test_a_listing_that_takes_long_is_no_silence(world: World) -> None:
    world.wire.error, world.wire.pages = LATE, 3
    with pytest.raises(Timeout):
        await world.list()
    await asyncio.sleep(0.05)
    assert not world.link.is_away
    assert world.wire.asked == 0, "nor is it suspected"


async def test_a_listing_that_brings_nothing_is(world: World) -> None:
    world.wire.error = LATE
    with pytest.raises(Timeout):
        await world.list()
    assert world.link.is_away
