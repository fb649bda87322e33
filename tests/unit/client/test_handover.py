"""What a process needs that takes over from a former one of its session: the session, its staging, a start without the
master.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest

from kvstore.client.aio import AsyncClient
from kvstore.client.blocks import AsyncBlocks, AsyncLocalBlocks, AsyncRemoteBlocks
from kvstore.client.either import AsyncEitherBlocks
from kvstore.client.files import scratch_fd
from kvstore.client.local import AsyncLocalWorker
from kvstore.client.remote import AsyncRemote
from kvstore.client.sockets import SealedBlock
from kvstore.core import sockproto as sp
from kvstore.core.errors import InvalidRequest, NotFound, Unavailable
from kvstore.core.types import Address, BlockId
from kvstore.runtime import SystemRuntime
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.fake_socket import FakeSocket

NOBODY = "kvstore://127.0.0.1:1"
"""A master that never answers."""


class SentBlocks:
    """In the place of the remote workers: keeps what it is sent."""

    def __init__(self) -> None:
        self.sent = b""

    async def store(self, size_bytes: int, digest: int, frames: object, *, timeout_s: float) -> SealedBlock:
        self.sent = b"".join(frames())  # type: ignore[operator]
        return SealedBlock(Address(BlockId(1, 1), size_bytes, digest), 3)


@pytest.fixture
def runtime() -> Iterator[SystemRuntime]:
    runtime = SystemRuntime(2)
    yield runtime
    runtime.close()


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(kit.settings(tmp_path)) as worker:
        yield worker


def blocks_of(worker: Worker, runtime: SystemRuntime, remote: SentBlocks) -> tuple[AsyncEitherBlocks, AsyncLocalWorker]:
    link = AsyncLocalWorker(worker.settings.socket, session=5)
    remotes = AsyncRemoteBlocks(cast("AsyncRemote", remote), runtime)
    return AsyncEitherBlocks(AsyncLocalBlocks(link, runtime), remotes, link.path), link


async def test_staging_at_the_local_worker_is_written_on_and_sealed(worker: Worker, runtime: SystemRuntime) -> None:
    first, link = blocks_of(worker, runtime, SentBlocks())
    staging = await first.stage(8)
    os.pwrite(staging.fd, b"half", 0)
    handle, fd = staging.handle, staging.release()
    link.close()
    second, link = blocks_of(worker, runtime, SentBlocks())
    adopted = second.adopt(handle, fd)
    os.pwrite(adopted.fd, b" two", 4)
    sealed = await second.seal(adopted, 8)
    assert adopted.fd == -1
    assert await kit.get(worker, sealed.address) == b"half two"
    link.close()


async def test_a_file_without_a_name_is_written_on_and_sent(worker: Worker, runtime: SystemRuntime) -> None:
    remote = SentBlocks()
    blocks, link = blocks_of(worker, runtime, remote)
    fd = scratch_fd(None)
    os.pwrite(fd, b"half", 0)
    adopted = blocks.adopt(0, fd)
    os.pwrite(adopted.fd, b" two", 4)
    assert fcntl.fcntl(adopted.kept_fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    sealed = await blocks.seal(adopted, 8)
    assert (remote.sent, sealed.volume) == (b"half two", 3)
    assert (adopted.fd, adopted.kept_fd) == (-1, -1)
    link.close()


async def test_staging_of_the_other_kind_is_refused_and_its_fd_stays_the_callers(
    worker: Worker, runtime: SystemRuntime
) -> None:
    remote: AsyncBlocks = AsyncRemoteBlocks(cast("AsyncRemote", SentBlocks()), runtime)
    local: AsyncBlocks = AsyncLocalBlocks(AsyncLocalWorker(worker.settings.socket, session=5), runtime)
    fd = scratch_fd(None)
    for blocks, handle in ((remote, 7), (local, 0)):
        with pytest.raises(InvalidRequest):
            blocks.adopt(handle, fd)
    os.close(fd)


async def test_a_given_session_owns_what_the_former_process_staged(worker: Worker) -> None:
    worker.membership.cluster = "ours"
    async with AsyncClient(NOBODY, worker_socket=worker.settings.socket) as first:
        await first.start(known_cluster="ours")
        staging = await first.blocks.stage(4)
        os.pwrite(staging.fd, b"data", 0)
        handle, fd = staging.handle, staging.release()
    async with AsyncClient(NOBODY, worker_socket=worker.settings.socket, session=first.session) as second:
        await second.start(known_cluster="ours")
        sealed = await second.blocks.seal(second.blocks.adopt(handle, fd), 4)
    assert await kit.get(worker, sealed.address) == b"data"


@pytest.mark.parametrize("session", [0, -1, 2**64, "5"])
async def test_what_is_no_session_is_refused(session: int) -> None:
    with pytest.raises(InvalidRequest):
        AsyncClient(NOBODY, session=session)


async def test_with_a_known_cluster_a_start_needs_no_master(tmp_path: Path) -> None:
    """The worker is told the cluster, so that one of another cluster refuses; the node is learnt from it."""
    with FakeSocket(tmp_path / "s", lambda asked: asked.fail(NotFound("nothing is here"))) as fake:
        async with AsyncClient(NOBODY, worker_socket=fake.path, session=77) as client:
            await client.start(known_cluster="ours", timeout_s=5.0)
            assert fake.seen == [sp.Hello(sp.PROTOCOL_VERSION, 77, "ours")]
            assert client.node == "node"


async def test_without_a_known_cluster_a_start_asks_the_master() -> None:
    async with AsyncClient(NOBODY, worker_socket="") as client:
        with pytest.raises(Unavailable):
            await client.start(timeout_s=0.3)
