"""Peers that send something else than the block: whoever asked checks what came, and asks the next one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, cast

import pytest

from kvstore.client.blocks import AsyncRemoteBlocks
from kvstore.client.cluster import AsyncCluster, Cluster
from kvstore.client.meta import AsyncMeta, Meta
from kvstore.client.remote import AsyncRemote, Remote
from kvstore.client.staging import Loaded, Wish
from kvstore.client.sync_blocks import RemoteBlocks
from kvstore.client.threads import Threads
from kvstore.core.errors import Corrupt
from kvstore.core.hashing import hash_block
from kvstore.core.types import Address, BlockId, Entry, Replica
from kvstore.rpc.metadata import Caller
from kvstore.runtime import SystemRuntime
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.fake_frames import FakeFrames
from tests.support.worker_kit import MIB

DATA: Final = os.urandom(2 * MIB + 17)
HUNG_UP: Final = "ExecuteBatchError"
"""What gRPC logs of a fake whose reader has heard enough."""
pytestmark = pytest.mark.allow_errors(HUNG_UP)


def frames(data: bytes) -> list[bytes]:
    return [data[i : i + MIB] for i in range(0, len(data), MIB)]


LIES: Final[dict[str, list[bytes]]] = {
    "one bit": frames(DATA[:-1] + bytes([DATA[-1] ^ 1])),
    "short": frames(DATA)[:-1],
    "long": [*frames(DATA), b"x"],
    "longer than any": frames(DATA) * 3,
    "out of order": frames(DATA)[::-1],
    "twice the first": [frames(DATA)[0], *frames(DATA)[:-2], frames(DATA)[-1]],
    "nothing": [],
    "empty frames": [b""] * 5,
    "zeros": frames(bytes(len(DATA))),
}


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(kit.settings(tmp_path, "owner")) as worker:
        yield worker


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(kit.settings(tmp_path, "reader")) as worker:
        yield worker
        await kit.check_books(worker)


@asynccontextmanager
async def liar(read: Callable[[], list[bytes]]) -> AsyncIterator[Replica]:
    server = await FakeFrames(read=lambda _: read()).serve()
    try:
        yield Replica(1, "ssd", "liar", server.endpoint)
    finally:
        await server.stop(0)


async def read(worker: Worker, address: Address, *replicas: Replica) -> bytes:
    opened = await worker.opener.open(address, replicas, 20.0)
    try:
        return os.pread(opened.fd, address.length_bytes + 1, 0)
    finally:
        os.close(opened.fd)


@pytest.mark.parametrize("lie", LIES)
async def test_a_peer_that_lies_is_passed_over(owner: Worker, reader: Worker, lie: str) -> None:
    address = (await kit.put(owner, DATA)).address
    good = Replica(2, "ssd", "owner", owner.endpoint)
    async with liar(lambda: LIES[lie]) as lying:
        with pytest.raises(Corrupt) as caught:
            await read(reader, address, lying)
        assert caught.value.fault == lying.endpoint
        assert kit.files(reader, "blocks") == kit.files(reader, "staging") == []
        assert await read(reader, address, lying, good) == DATA
    assert await read(reader, address) == DATA, "what was kept is what the good one sent"


@pytest.mark.allow_errors("out of service", HUNG_UP)
@pytest.mark.parametrize("lie", LIES)
async def test_what_comes_for_a_worker_without_room_is_checked_too(owner: Worker, reader: Worker, lie: str) -> None:
    """In the scratch share no file has a name that could be verified later."""
    address = (await kit.put(owner, DATA)).address
    reader.store.fail(reader.store.volumes[0], "a test")
    async with liar(lambda: LIES[lie]) as lying:
        with pytest.raises(Corrupt):
            await read(reader, address, lying)
    assert reader.fetcher._scratch_bytes == 0


# ---- clients without a local worker


Load = Callable[[list[Wish]], Awaitable[list[Loaded]]]
ADDRESS: Final = Address(BlockId(1, 2), len(DATA), hash_block(DATA))


@pytest.fixture(params=["async", "sync"])
async def load(request: pytest.FixtureRequest) -> AsyncIterator[Load]:
    """Whole blocks over the network; who has them is in the wishes, so nobody asks the master."""
    runtime, threads = SystemRuntime(), Threads()
    if request.param == "async":
        cluster = AsyncCluster(cast("AsyncMeta", None), Caller(5))
        yield lambda wishes: AsyncRemoteBlocks(AsyncRemote(cluster, 5), runtime).load(wishes, timeout_s=20.0)
        await cluster.close()
    else:
        blocking = Cluster(cast("Meta", None), Caller(5))
        blocks = RemoteBlocks(Remote(blocking, 5), threads)
        yield lambda wishes: asyncio.to_thread(blocks.load, wishes, timeout_s=20.0)
        blocking.close()
    threads.close()
    runtime.close()


def entry_at(*replicas: Replica) -> Entry:
    return Entry(1, 0o100644, 0, 0, len(DATA), 0, 0, ADDRESS, replicas)


@pytest.mark.parametrize("lie", LIES)
async def test_a_client_takes_no_lie_for_the_block(load: Load, lie: str) -> None:
    """Neither as bytes nor in its buffer; and what lies beside it in the batch is none the worse for it."""
    async with liar(lambda: LIES[lie]) as lying, liar(lambda: frames(DATA)) as good:
        views = [memoryview(bytearray(len(DATA))) for _ in range(2)]
        lied, into, fine = await load(
            [Wish(entry_at(lying)), Wish(entry_at(lying), views[0]), Wish(entry_at(good), views[1])]
        )
        assert isinstance(lied, Corrupt)
        assert isinstance(into, Corrupt)
        assert (fine, bytes(views[1])) == (b"", DATA)
        fast = lying._replace(tier="mem")  # it is asked first
        [second] = await load([Wish(entry_at(fast, good))])
        assert second == DATA
