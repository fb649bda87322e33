"""Links, the guard around handlers, failover: over a real server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from kvstore.core import errors
from kvstore.core.errors import KvError, NotFound
from kvstore.core.types import Address, BlockId, Entry, Replica
from kvstore.pb import common_pb2, master_pb2, master_pb2_grpc
from kvstore.rpc import entries, server, status
from kvstore.rpc.failover import AsyncFailover, Failover
from kvstore.rpc.link import AsyncLink, Link
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import LIST, LOOKUP, MKDIR

REPLICAS = (Replica(7, "ssd", "a", "a:1"), Replica(8, "mem", "b", "b:1"))
ROWS: list[Entry | KvError] = [
    Entry(5, 0o100644, 1, 2, 3, -4, 5, Address(BlockId(1, 2), 3, 2**64 - 1), REPLICAS, 1),
    NotFound("no replica", reason="no_replica"),
    Entry(6, 0o040755, 0, 0, 0, 0, 0, None, (), 1),
    Entry(7, 0o100644, 1, 2, 3, 4, 5, Address(BlockId(1, 3), 3, 9), REPLICAS[1:], 1),
]


class Fake(master_pb2_grpc.MasterServicer):
    def __init__(self, name: str) -> None:
        self.name, self.calls, self.caller = name, 0, Caller()
        self.fail: list[Exception] = []
        self.admission = server.Admission()

    @server.unary
    async def Lookup(self, request: master_pb2.LookupRequest, caller: Caller) -> master_pb2.LookupReply:
        self.calls, self.caller = self.calls + 1, caller
        if self.fail:
            raise self.fail.pop(0)
        return master_pb2.LookupReply(entries=entries.encode(ROWS))

    @server.unary
    async def Mkdir(self, request: master_pb2.MkdirRequest, caller: Caller) -> master_pb2.MkdirReply:
        self.calls += 1
        raise errors.Unavailable("after it was done, perhaps")

    @server.streaming
    async def List(self, request: master_pb2.ListRequest, caller: Caller) -> AsyncIterator[master_pb2.ListPage]:
        for name in ("a", "b"):
            yield master_pb2.ListPage(names=[name])
        raise errors.Stale("it moved")


@asynccontextmanager
async def serving(listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[Fake, str]]:
    fake = Fake(listen)  # type: ignore[abstract] # the other methods answer "unimplemented"

    def add(grpc_server: grpc.aio.Server) -> None:
        master_pb2_grpc.add_MasterServicer_to_server(fake, grpc_server)

    running = await server.serve(listen, [add])
    try:
        yield fake, running.endpoint
    finally:
        await running.stop(0)


def request() -> master_pb2.LookupRequest:
    return master_pb2.LookupRequest(paths=["a"])


def same(left: Entry | KvError, right: Entry | KvError) -> bool:
    if isinstance(left, KvError) and isinstance(right, KvError):
        return type(left) is type(right) and left.reason == right.reason
    return left == right


async def test_rows_and_caller_arrive() -> None:
    async with serving() as (fake, endpoint):
        link = AsyncLink(endpoint, Caller(0xABC, "node-1", "cluster", "r1"))
        reply = await link.call(LOOKUP, request(), 5)
        await link.close()
    assert all(map(same, entries.decode(reply.entries), ROWS))
    assert fake.caller == Caller(0xABC, "node-1", "cluster", "r1")


@pytest.mark.parametrize("kind", errors.BY_CODE.values(), ids=lambda k: k.__name__)
async def test_every_error_arrives_as_itself(kind: type[KvError]) -> None:
    async with serving() as (fake, endpoint):
        fake.fail = [kind("what to do", reason="special", fault="node-9")]
        link = AsyncLink(endpoint, Caller())
        with pytest.raises(KvError) as caught:
            await link.call(LOOKUP, request(), 5)
        await link.close()
    assert type(caught.value) is kind
    assert (str(caught.value), caught.value.reason, caught.value.fault) == ("what to do", "special", "node-9")


@pytest.mark.allow_errors
async def test_a_bug_in_a_handler_is_hidden_and_the_server_lives() -> None:
    async with serving() as (fake, endpoint):
        fake.fail = [ValueError("secret")]
        link = AsyncLink(endpoint, Caller())
        with pytest.raises(KvError, match="internal error") as caught:
            await link.call(LOOKUP, request(), 5)
        assert "secret" not in str(caught.value)
        reply = await link.call(LOOKUP, request(), 5)
        assert len(entries.decode(reply.entries)) == len(ROWS)
        await link.close()


async def test_a_stream_ends_with_its_error() -> None:
    async with serving() as (_, endpoint):
        link, names = AsyncLink(endpoint, Caller()), list[str]()

        async def read() -> None:
            async for page in link.stream(LIST, master_pb2.ListRequest(), 5):
                names.extend(page.names)

        with pytest.raises(errors.Stale):
            await read()
        await link.close()
    assert names == ["a", "b"]


async def test_nobody_there_is_unavailable_and_names_the_endpoint() -> None:
    async with serving() as (_, endpoint):
        pass
    link = AsyncLink(endpoint, Caller())
    with pytest.raises(errors.Unavailable, match=f"{endpoint}: connection refused; is it running"):
        await link.call(LOOKUP, request(), 5)
    await link.close()


@pytest.mark.parametrize(
    ("details", "told"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote "
            "host: connect: Connection refused (111)",
            "connection refused; is it running?",
        ),
        (
            "DNS resolution failed for nowhere.invalid:7070: C-ares status is not ARES_SUCCESS qtype=AAAA "
            "name=nowhere.invalid is_balancer=0: Domain name not found",
            "there is no host of this name",
        ),
        ("Deadline Exceeded", "no answer in time"),
        ("ipv4:127.0.0.1:1: connection attempt timed out before receiving SETTINGS frame", "no answer in time"),
        ("GOAWAY received", "the connection broke"),
        ("Socket closed", "the connection broke"),
        ("recvmsg:Connection reset by peer", "the connection broke"),
        ("INTERNAL: Trying to connect an http1.x server (HTTP status 400)", "a server of another kind"),
        ("something\nnew", "something new"),
        ("", "unavailable"),
    ],
)
def test_texts_of_the_transport_are_for_people(details: str, told: str) -> None:
    error = status.from_rpc_error(Failed(details), "h:1")
    assert isinstance(error, errors.Unavailable)
    assert error.fault == "h:1"
    assert error.message.startswith(f"h:1: {told}")


def test_a_text_of_the_transport_that_nobody_knows_is_one_short_line() -> None:
    message = status.from_rpc_error(Failed("word \n" * 1000), "h:1").message
    assert "\n" not in message
    assert len(message) <= len("h:1: ") + 200
    said_by_us = Failed("word " * 1000, ((status.CODE_KEY, str(errors.NotFound.code)),))
    assert len(status.from_rpc_error(said_by_us, "h:1").message) == 5000, "what our servers say is left as it is"


class Failed:
    """What grpc raises, with these details."""

    def __init__(self, details: str, trailing: tuple[tuple[str, str], ...] = ()) -> None:
        self._details, self._trailing = details, trailing

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._trailing


async def test_a_taken_port_is_one_clear_line() -> None:
    async with serving() as (_, endpoint):
        with pytest.raises(errors.Unavailable, match=f"cannot listen on {endpoint}"):
            await server.serve(endpoint, [])


async def test_failover_goes_on_to_the_next_address() -> None:
    async with serving() as (_, gone):
        pass
    async with serving() as (fake, endpoint):
        links = AsyncFailover([gone, endpoint], Caller())
        await links.call(LOOKUP, request(), 5)
        await links.call(LOOKUP, request(), 5)
        await links.close()
        assert fake.calls == 2


async def test_failover_retries_what_is_idempotent_and_nothing_else() -> None:
    async with serving() as (fake, endpoint):
        fake.fail = [errors.Unavailable("restarting"), errors.Overloaded("full")]
        links = AsyncFailover([endpoint], Caller())
        await links.call(LOOKUP, request(), 5)
        assert fake.calls == 3
        with pytest.raises(errors.Unavailable):
            await links.call(MKDIR, master_pb2.MkdirRequest(), 5)
        assert fake.calls == 4
        fake.fail = [errors.NotFound("no")] * 2
        with pytest.raises(errors.NotFound):
            await links.call(LOOKUP, request(), 5)
        assert fake.calls == 5
        await links.close()


async def test_the_deadline_bounds_the_retries() -> None:
    async with serving() as (_, gone):
        pass
    links = AsyncFailover([gone], Caller())
    with pytest.raises((errors.Unavailable, errors.Timeout)):
        await asyncio.wait_for(links.call(LOOKUP, request(), 0.3), 10)
    await links.close()


async def test_the_synchronous_link_does_the_same() -> None:
    async with serving() as (fake, endpoint):
        fake.fail = [errors.Unavailable("restarting")]
        links = Failover([endpoint], Caller(session=3))
        reply = await asyncio.to_thread(links.call, LOOKUP, request(), 5)
        assert all(map(same, entries.decode(reply.entries), ROWS))
        assert fake.caller.session == 3
        link, names = Link(endpoint, Caller()), list[str]()

        def read() -> None:
            for page in link.stream(LIST, master_pb2.ListRequest(), 5):
                names.extend(page.names)

        with pytest.raises(errors.Stale):
            await asyncio.to_thread(read)
        assert names == ["a", "b"]
        link.close()
        links.close()


async def test_another_protocol_version_is_refused() -> None:
    async with serving() as (_, endpoint), grpc.aio.insecure_channel(endpoint) as channel:
        stub = master_pb2_grpc.MasterStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Lookup(request(), metadata=(("kvstore-protocol", "2"),))
        assert isinstance(status.from_rpc_error(caught.value, endpoint), errors.Unsupported)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Lookup(request(), metadata=(("kvstore-session", "zz"),))
        assert isinstance(status.from_rpc_error(caught.value, endpoint), errors.InvalidRequest)


def test_columns_that_do_not_fit_are_a_typed_error() -> None:
    good = entries.encode(ROWS)
    for spoil in ("inode", "block_hash", "replica_volume", "reason"):
        bad = common_pb2.Entries()
        bad.CopyFrom(good)
        del getattr(bad, spoil)[-1]
        with pytest.raises(KvError):
            entries.decode(bad)
    bad = common_pb2.Entries()
    bad.CopyFrom(good)
    bad.block_ids = bad.block_ids[:-1]
    with pytest.raises(KvError):
        entries.decode(bad)
