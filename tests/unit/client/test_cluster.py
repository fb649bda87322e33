"""Breakers of workers whose endpoint leaves the cluster map while somebody uses it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import grpc
import grpc.aio
import pytest

from kvstore.client.cluster import AsyncCluster, Cluster
from kvstore.client.meta import AsyncMeta, Meta
from kvstore.core.errors import KvError
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.breaker import AsyncBreaker
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import WORKER_STAT

UNTIL_S = 20.0


async def stat(request: w.WorkerStatRequest, context: object) -> w.WorkerStatReply:
    return w.WorkerStatReply()


STAT = grpc.unary_unary_rpc_method_handler(stat, WORKER_STAT.request.FromString, WORKER_STAT.reply.SerializeToString)


@asynccontextmanager
async def back_at(endpoint: str) -> AsyncIterator[None]:
    server = grpc.aio.server()
    service, method = WORKER_STAT.path.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: STAT}),))
    server.add_insecure_port(endpoint)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@pytest.fixture
def endpoint() -> str:
    """Nobody is there yet."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


async def ask(cluster: AsyncCluster, endpoint: str) -> None:
    with pytest.raises(KvError), cluster.call(endpoint, 5.0):
        await cluster.link(endpoint).call(WORKER_STAT, w.WorkerStatRequest(), 5.0)


def ask_blocking(cluster: Cluster, endpoint: str) -> None:
    with pytest.raises(KvError), cluster.call(endpoint, 5.0):
        cluster.link(endpoint).call(WORKER_STAT, w.WorkerStatRequest(), 5.0)


async def closes(cluster: AsyncCluster | Cluster, endpoint: str) -> None:
    async with asyncio.timeout(UNTIL_S):
        while not cluster.breakers.closed(endpoint):  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.05)


async def test_a_breaker_whose_link_was_closed_asks_on_a_new_one(endpoint: str) -> None:
    cluster = AsyncCluster(cast("AsyncMeta", None), Caller(7))
    await ask(cluster, endpoint)
    assert not cluster.breakers.closed(endpoint)
    await cluster._links.pop(endpoint).close()
    async with back_at(endpoint):
        await closes(cluster, endpoint)
        await cluster.close()


async def test_a_breaker_of_threads_whose_link_was_closed_asks_on_a_new_one(endpoint: str) -> None:
    cluster = Cluster(cast("Meta", None), Caller(7))
    await asyncio.to_thread(ask_blocking, cluster, endpoint)
    assert not cluster.breakers.closed(endpoint)
    cluster._links.pop(endpoint).close()
    async with back_at(endpoint):
        await closes(cluster, endpoint)
        cluster.close()


async def test_who_uses_a_worker_while_it_leaves_the_map_keeps_a_link_that_works(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of another worker's breaker takes a moment, in which a call is made."""
    go_on = asyncio.Event()
    close = AsyncBreaker.close

    async def slowly(breaker: AsyncBreaker) -> None:
        await go_on.wait()
        await close(breaker)

    monkeypatch.setattr(AsyncBreaker, "close", slowly)
    cluster = AsyncCluster(cast("AsyncMeta", None), Caller(7))
    cluster.link(endpoint)
    cluster.breakers.of("127.0.0.1:1")
    pruning = asyncio.create_task(cluster._prune(set()))
    await asyncio.sleep(0)
    await ask(cluster, endpoint)
    used = cluster.link(endpoint)
    go_on.set()
    await pruning
    assert cluster.link(endpoint) is used
    async with back_at(endpoint):
        await closes(cluster, endpoint)
        await used.call(WORKER_STAT, w.WorkerStatRequest(), 5.0)
        await cluster.close()
