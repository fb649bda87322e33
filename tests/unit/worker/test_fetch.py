"""Blocks from peers: two whole workers in one process, and peers that lie or are dead."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvstore.client.local import AsyncLocalWorker
from kvstore.core.errors import (
    Corrupt,
    Denied,
    InvalidRequest,
    KvError,
    NotFound,
    Overloaded,
    Stale,
    Timeout,
    TooLarge,
    Unavailable,
)
from kvstore.core.hashing import hash_block
from kvstore.core.types import Address, BlockId, Replica
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.entries import address_from_pb, address_to_pb
from kvstore.rpc.link import AsyncLink, Link
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import WORKER_GIVE_UP, WORKER_STAT
from kvstore.worker.blocks.block import Block
from kvstore.worker.serving.fetch import _verdict
from kvstore.worker.serving.peers import FORSAKEN_S
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.proxy import Proxy
from tests.support.worker_kit import MIB

LATE_S = 0.5
"""A busy machine's, on top."""
DEAD = Replica(1, "ssd", "dead", kit.NOBODY)


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(kit.settings(tmp_path, "owner")) as worker:
        yield worker
        await kit.check_books(worker)


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(kit.settings(tmp_path, "reader", capacity=4 * MIB)) as worker:
        yield worker
        await kit.check_books(worker)


@pytest.fixture
async def link(owner: Worker) -> AsyncIterator[AsyncLink]:
    link = AsyncLink(owner.endpoint, Caller(session=7))
    yield link
    await link.close()


def at(worker: Worker) -> Replica:
    return Replica(worker.store.volumes[0].id, "ssd", worker.settings.node, worker.endpoint)


async def open_bytes(worker: Worker, address: Address, *replicas: Replica) -> bytes:
    opened = await worker.opener.open(address, replicas, 20.0)
    try:
        return os.pread(opened.fd, address.length_bytes + 1, 0)
    finally:
        os.close(opened.fd)


async def test_a_block_is_fetched_once_for_all_who_wait_and_kept(owner: Worker, reader: Worker) -> None:
    data = os.urandom(3 * MIB)
    address = (await kit.put(owner, data)).address
    results = await asyncio.gather(*(open_bytes(reader, address, at(owner)) for _ in range(8)))
    assert results == [data] * 8
    assert (reader.counters.fetches, owner.counters.hits) == (1, 1)
    assert await kit.get(reader, address) == data, "now it is here"


async def test_a_caller_that_goes_away_does_not_end_the_fetch(owner: Worker, reader: Worker) -> None:
    data = os.urandom(3 * MIB)
    address = (await kit.put(owner, data)).address
    impatient = asyncio.ensure_future(open_bytes(reader, address, at(owner)))
    patient = asyncio.ensure_future(open_bytes(reader, address, at(owner)))
    await kit.until(lambda: address in reader.fetcher._flights)
    impatient.cancel()
    assert await patient == data


async def test_all_replicas_are_tried_in_order(owner: Worker, reader: Worker) -> None:
    address = (await kit.put(owner, b"data")).address
    assert await open_bytes(reader, address, DEAD, at(owner)) == b"data"


async def test_a_dead_peer_costs_the_next_reader_nothing(reader: Worker) -> None:
    first, second = (Address(BlockId(1, i), 4, 1) for i in (1, 2))
    with pytest.raises(Unavailable) as caught:
        await open_bytes(reader, first, DEAD)
    assert caught.value.fault == DEAD.endpoint
    with pytest.raises(Unavailable, match="did not answer a moment ago"):
        await open_bytes(reader, second, DEAD)


async def test_a_peer_that_lacks_it_is_not_to_blame(owner: Worker, reader: Worker) -> None:
    address = (await kit.put(owner, b"data")).address
    with pytest.raises(NotFound):
        await open_bytes(reader, Address(BlockId(1, 1), 4, 1), at(owner))
    with pytest.raises((NotFound, Stale)):
        await open_bytes(reader, address._replace(hash=5), at(owner))
    assert await open_bytes(reader, address, at(owner)) == b"data"


async def put_under_wrong_hash(owner: Worker) -> Block:
    """As a client makes it that takes the hash of other bytes."""
    staged, fd = await owner.staging.create(1, 4)
    os.pwrite(fd, b"data", 0)
    claim = kit.claim_of(fd, b"liar")
    os.close(fd)
    return await owner.sealer.seal(staged, claim)


async def test_bytes_that_differ_are_never_served(
    owner: Worker, reader: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer believes its block and does not look; the receiver's own check tells."""
    monkeypatch.setattr(owner.opener, "doubt", nothing)
    block = await put_under_wrong_hash(owner)
    with pytest.raises(Corrupt, match="sent something else") as caught:
        await open_bytes(reader, block.address, at(owner))
    assert caught.value.fault == owner.endpoint
    assert kit.files(reader, "blocks") == kit.files(reader, "staging") == []


async def nothing(address: Address) -> None:
    pass


@pytest.mark.allow_errors("is corrupt")
async def test_a_worker_sees_for_itself_that_it_sends_something_else(owner: Worker, reader: Worker) -> None:
    block = await put_under_wrong_hash(owner)
    with pytest.raises(Corrupt):
        await open_bytes(reader, block.address, at(owner))
    assert owner.store.get(block.id) is None, "nobody has to come twice"
    assert len(kit.files(owner, "quarantine")) == 1
    assert kit.files(reader, "blocks") == kit.files(reader, "staging") == []


@pytest.mark.allow_errors("is corrupt")
async def test_a_block_that_was_found_here_meanwhile_is_verified_before_it_is_served(
    owner: Worker, reader: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = (await kit.put(owner, b"data")).address

    async def stream(peer: object, address: Address, sink: object) -> None:
        volume = reader.store.volumes[0]
        with open(volume.block_path(address), "wb") as file:
            file.write(b"rots")
        block = reader.store.add(address, volume, 0, None)  # as a scan does
        volume.books.blocks += block.used_bytes

    monkeypatch.setattr(reader.fetcher, "_stream", stream)
    with pytest.raises(Corrupt):
        await open_bytes(reader, address, at(owner))


@pytest.mark.parametrize(
    ("failures", "kind", "reason"),
    [
        ([], NotFound, "no_replica"),
        ([NotFound(reason="no_replica"), Stale()], NotFound, "stale"),
        ([NotFound(reason="no_replica"), NotFound(reason="corrupt")], NotFound, "corrupt"),
        ([NotFound(reason="no_replica"), Unavailable()], Unavailable, "unavailable"),
        ([Unavailable(), NotFound(reason="timeout")], NotFound, "timeout"),
        ([Unavailable(), Timeout(), Corrupt(), NotFound(reason="no_replica")], Corrupt, "corrupt"),
        ([Overloaded(), NotFound(reason="no_replica")], Overloaded, "overloaded"),
    ],
)
def test_why_no_replica_could_be_read(failures: list[KvError], kind: type[KvError], reason: str) -> None:
    told = _verdict(Address(BlockId(1, 1), 4, 1), failures)
    assert (type(told), told.reason) == (kind, reason)


async def test_the_reason_of_a_miss_gets_through_the_socket(owner: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(*_: object) -> int:
        raise NotFound("no replica could be read", reason="corrupt")

    monkeypatch.setattr(owner.fetcher, "fetch", fetch)
    client = AsyncLocalWorker(owner.settings.socket, 1)
    address = Address(BlockId(1, 1), 4, 1)
    results = await client.open([(address, ()), (address, [DEAD])])
    client.close()
    assert [(type(r), getattr(r, "reason", "")) for r in results] == [(NotFound, "no_replica"), (NotFound, "corrupt")]


async def test_without_room_a_reader_is_served_all_the_same(owner: Worker, reader: Worker) -> None:
    for _ in range(4):
        await kit.put(reader, os.urandom(MIB), owned=False)
    data = os.urandom(2 * MIB)
    address = (await kit.put(owner, data)).address
    opened = await reader.opener.open(address, [at(owner)], 20.0)
    assert os.pread(opened.fd, 2 * MIB, 0) == data
    assert reader.store.get(address.block) is None
    assert reader.fetcher._scratch_bytes == 2 * MIB
    await reader.held.probe()
    assert reader.fetcher._scratch_bytes == 2 * MIB, "somebody still reads it"
    os.close(opened.fd)
    await reader.held.probe()
    assert reader.fetcher._scratch_bytes == 0


async def test_room_for_a_fetch_is_made_by_eviction(owner: Worker, reader: Worker) -> None:
    old = [await kit.put(reader, os.urandom(MIB), session) for session in (1, 2, 3, 4)]
    address = (await kit.put(owner, os.urandom(MIB))).address
    await open_bytes(reader, address, at(owner))
    assert reader.store.get(address.block) is not None
    assert reader.store.get(old[0].id) is None


async def test_serving_a_peer_shields_a_block_from_eviction(owner: Worker, reader: Worker) -> None:
    block = await kit.put(owner, b"data")
    await open_bytes(reader, block.address, at(owner))
    assert await owner.evictor.make_room(owner.store.volumes[0], 1) == 0


async def test_frames_of_a_range(owner: Worker, link: AsyncLink) -> None:
    data = os.urandom(3 * MIB + 5)
    address = address_to_pb((await kit.put(owner, data)).address)
    for offset, size in ((0, 0), (5, 0), (MIB - 1, 2), (2 * MIB, MIB), (len(data), 0)):
        request = w.ReadRequest(address=address, offset_bytes=offset, size_bytes=size)
        frames = [frame async for frame in link.read_frames(request, 10)]
        assert b"".join(frames) == data[offset : offset + size if size else None]
        assert all(len(frame) <= MIB for frame in frames)
    assert owner.counters.read_bytes > len(data)


@pytest.mark.parametrize(("offset", "size"), [(0, 5), (5, 0), (2**64 - 1, 1), (1, 2**64 - 1)])
async def test_a_range_outside_of_the_block_is_refused(owner: Worker, link: AsyncLink, offset: int, size: int) -> None:
    address = address_to_pb((await kit.put(owner, b"data")).address)
    with pytest.raises(InvalidRequest):
        [f async for f in link.read_frames(w.ReadRequest(address=address, offset_bytes=offset, size_bytes=size), 10)]


def frames_of(data: bytes) -> list[bytes]:
    return [data[i : i + MIB] for i in range(0, len(data), MIB)]


async def test_what_is_sent_becomes_a_block(owner: Worker, link: AsyncLink) -> None:
    data = os.urandom(2 * MIB + 5)
    request = w.WriteRequest(session=7, length_bytes=len(data), hash=hash_block(data))
    reply = await link.write_frames(request, frames_of(data), 10)
    assert reply.volume == owner.store.volumes[0].id
    assert await kit.get(owner, address_from_pb(reply.address)) == data
    assert owner.sessions.is_over(7, owner.runtime.monotonic_s() + 0.2), "its grace began with the call's end"


@pytest.mark.parametrize(
    ("request_", "data", "error"),
    [
        (w.WriteRequest(session=7, length_bytes=4, hash=1), b"data", Corrupt),
        (w.WriteRequest(session=7, length_bytes=5, hash=1), b"data", InvalidRequest),
        (w.WriteRequest(session=7, length_bytes=3, hash=1), b"data", InvalidRequest),
        (w.WriteRequest(session=7, length_bytes=0, hash=1), b"", InvalidRequest),
        (w.WriteRequest(session=7, length_bytes=2**40, hash=1), b"", TooLarge),
    ],
)
async def test_a_bad_write_leaves_nothing(
    owner: Worker, link: AsyncLink, request_: w.WriteRequest, data: bytes, error: type[KvError]
) -> None:
    with pytest.raises(error):
        await link.write_frames(request_, [data] if data else [], 10)
    assert kit.files(owner, "blocks") == kit.files(owner, "staging") == []
    assert owner.store.volumes[0].books.used == 0


async def test_a_client_that_stops_in_the_middle_leaves_nothing(owner: Worker, link: AsyncLink) -> None:
    asked_again = asyncio.Event()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    class Frames:
        """Two frames, and then none for as long as anybody waits."""

        def __init__(self) -> None:
            self.left = 2

        def __iter__(self) -> Frames:
            return self

        def __next__(self) -> bytes:
            self.left -= 1
            if self.left < 0:
                loop.call_soon_threadsafe(asked_again.set)
                asyncio.run_coroutine_threadsafe(stop.wait(), loop).result(20)
                raise StopIteration
            return bytes(MIB)

    request = w.WriteRequest(session=7, length_bytes=8 * MIB, hash=1)
    call = asyncio.ensure_future(asyncio.to_thread(send_blocking, owner.endpoint, request, Frames()))
    await asked_again.wait()
    await kit.until(lambda: kit.files(owner, "staging"))
    with pytest.raises(KvError):
        await call
    stop.set()
    await kit.until(lambda: not kit.files(owner, "staging") and owner.store.volumes[0].books.used == 0)


def send_blocking(endpoint: str, request: w.WriteRequest, frames: object) -> None:
    link = Link(endpoint, Caller(session=7))
    try:
        link.write_frames(request, frames, 1.0)  # type: ignore[arg-type]
    finally:
        link.close()


async def test_garbage_in_place_of_a_request_is_refused(owner: Worker) -> None:
    async with grpc.aio.insecure_channel(owner.endpoint) as channel:
        call: Any = channel.unary_stream("/kvstore.raw.Blocks/Read")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [frame async for frame in call(b"\xff\xff\xff")]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_caller_of_another_cluster_is_refused(owner: Worker) -> None:
    owner.membership.cluster = "mine"
    link = AsyncLink(owner.endpoint, Caller(cluster="another"))
    with pytest.raises(Denied):
        await link.call(WORKER_STAT, w.WorkerStatRequest(), 5)
    with pytest.raises(Denied):
        [f async for f in link.read_frames(w.ReadRequest(), 5)]
    with pytest.raises(Denied):
        await link.write_frames(w.WriteRequest(), [], 5)
    await link.close()


async def test_a_block_that_came_over_the_network_can_be_given_up_by_its_session(
    owner: Worker, link: AsyncLink
) -> None:
    request = w.WriteRequest(session=7, length_bytes=4, hash=hash_block(b"data"))
    written = await link.write_frames(request, [b"data"], 5)
    block = owner.store.get(address_from_pb(written.address).block)
    assert block is not None
    given_up: list[bool] = []
    for session in (8, 7):
        await link.call(WORKER_GIVE_UP, w.GiveUpRequest(session=session, addresses=[written.address]), 5)
        given_up.append(block.given_up)
    assert given_up == [False, True], "only by its own"
    with pytest.raises(InvalidRequest, match="too many"):
        await link.call(WORKER_GIVE_UP, w.GiveUpRequest(session=7, addresses=[written.address] * 5000), 5)


async def test_stat_tells_what_there_is(owner: Worker, link: AsyncLink) -> None:
    await kit.put(owner, b"data", owned=False)
    stat = await link.call(WORKER_STAT, w.WorkerStatRequest(), 5)
    assert (stat.node, stat.blocks, stat.unpublished_blocks, stat.volumes[0].used_bytes) == ("owner", 1, 1, 4096)


async def test_a_silent_peer_is_not_waited_for_again_and_used_when_it_is_back(owner: Worker, reader: Worker) -> None:
    """Connected, but nothing comes through: one fetch waits, and a probe in the background finds it again."""
    first, second = [(await kit.put(owner, os.urandom(1000))).address for _ in range(2)]
    with Proxy(owner.endpoint) as proxy:
        through = Replica(1, "ssd", "peer", proxy.endpoint)
        proxy.cut()
        with pytest.raises((Timeout, Unavailable), match=r"silent|no answer in time"):
            await open_bytes(reader, first, through)
        begin = time.monotonic()
        for _ in range(20):
            with pytest.raises(Unavailable, match="a moment ago"):
                await open_bytes(reader, second, through)
        assert time.monotonic() - begin < 20 * 0.01 + LATE_S
        assert len(await open_bytes(reader, first, through, at(owner))) == 1000, "another replica serves meanwhile"
        proxy.mend()
        await kit.until(lambda: reader.peers.get(proxy.endpoint).breaker.closed)
        assert len(await open_bytes(reader, second, through)) == 1000


async def test_a_reader_is_never_the_one_who_tries_a_silent_peer(owner: Worker, reader: Worker) -> None:
    """However long it is silent: what is asked of it meanwhile are probes, one at a time."""
    address = (await kit.put(owner, b"data")).address
    with Proxy(owner.endpoint) as proxy:
        through = Replica(1, "ssd", "peer", proxy.endpoint)
        proxy.cut()
        with pytest.raises((Timeout, Unavailable)):
            await open_bytes(reader, address, through)
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            begin = time.monotonic()
            with pytest.raises(Unavailable, match="a moment ago"):
                await open_bytes(reader, address, through)
            assert time.monotonic() - begin < LATE_S
            await asyncio.sleep(0.05)


async def test_a_full_disk_here_says_nothing_of_the_peer(
    owner: Worker, reader: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.worker.serving.fetch.SCRATCH_BYTES", 0)
    reader.store.volumes[0].books.capacity = 0
    address = (await kit.put(owner, b"data")).address
    with pytest.raises(Overloaded, match="no room to keep it"):
        await open_bytes(reader, address, at(owner))
    assert reader.peers.get(owner.endpoint).breaker.closed


async def test_silent_peers_that_nobody_asks_for_are_probed_no_more(owner: Worker, reader: Worker) -> None:
    address, now_s = (await kit.put(owner, b"data")).address, time.monotonic()
    reader.peers._now_s = lambda: now_s
    with pytest.raises(Unavailable):
        await open_bytes(reader, address, DEAD)
    now_s += FORSAKEN_S / 2
    alive = reader.peers.get(owner.endpoint)
    assert list(reader.peers._peers) == [DEAD.endpoint, owner.endpoint]
    now_s += FORSAKEN_S
    reader.peers.get("127.0.0.1:9")
    assert list(reader.peers._peers) == [owner.endpoint, "127.0.0.1:9"], "one that answers is kept"
    assert reader.peers.get(owner.endpoint) is alive
