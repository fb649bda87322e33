"""What a client writes by itself into a staging file meets a disk that others have filled: its worker is asked to make
room, once, and the write goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.client import files
from kvstore.client.blocks import AsyncLocalBlocks
from kvstore.client.cache import MetadataCache
from kvstore.client.deadline import Deadline
from kvstore.client.flow import AsyncFlow, Flow
from kvstore.client.local import AsyncLocalWorker, LocalWorker
from kvstore.client.sockets import SealedBlock
from kvstore.client.staging import Staging
from kvstore.client.sync_blocks import LocalBlocks
from kvstore.client.threads import Threads
from kvstore.core.errors import NoSpace
from kvstore.runtime import SystemRuntime
from kvstore.worker.settings import VolumeSettings, Watermarks
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.accounting import check_exact, stop_moves
from tests.support.small_fs import Filler, small_ext4, small_tmpfs
from tests.support.worker_kit import KIB, MIB

SESSION = 9
SIZES = [100 * KIB, 6 * MIB + 7]
"""Written on the loop, and in a thread."""


@pytest.fixture(params=[small_tmpfs, small_ext4], ids=["tmpfs", "ext4"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with request.param(tmp_path) as directory:
        yield directory


@pytest.fixture
async def worker(tmp_path: Path, place: Path) -> AsyncIterator[Worker]:
    volume = VolumeSettings("ssd", str(place / "volume"), 48 * MIB, 0, Watermarks(1.0, 0.9))
    async with kit.running(kit.settings(tmp_path)._replace(volumes=[volume], session_grace_s=60.0)) as worker:
        await stop_moves(worker)
        yield worker
        await check_exact(worker)


class Crowded(AsyncLocalBlocks):
    """Another program fills the disk as soon as a file is staged. `asked`: how often room was asked for."""

    def __init__(self, worker: AsyncLocalWorker, runtime: SystemRuntime, filler: Filler) -> None:
        super().__init__(worker, runtime)
        self.filler, self.asked = filler, 0

    async def stage(self, size_hint: int = 0, *, timeout_s: float | None = None) -> Staging:
        staging = await super().stage(size_hint, timeout_s=timeout_s)
        self.filler.fill()
        return staging

    async def reserve(
        self, staging: Staging, size_bytes: int, *, evict: bool = True, timeout_s: float | None = None
    ) -> None:
        self.asked += 1
        await super().reserve(staging, size_bytes, evict=evict, timeout_s=timeout_s)


@pytest.fixture
async def blocks(worker: Worker, place: Path) -> AsyncIterator[Crowded]:
    local, runtime = AsyncLocalWorker(worker.settings.socket, SESSION), SystemRuntime()
    yield Crowded(local, runtime, Filler(place))
    local.close()
    runtime.close()


class CrowdedSync(LocalBlocks):
    """The same for threads."""

    def __init__(self, worker: LocalWorker, filler: Filler) -> None:
        super().__init__(worker, Threads())
        self.filler, self.asked = filler, 0

    def stage(self, size_hint: int = 0, *, timeout_s: float | None = None) -> Staging:
        staging = super().stage(size_hint, timeout_s=timeout_s)
        self.filler.fill()
        return staging

    def reserve(self, staging: Staging, size_bytes: int, *, timeout_s: float | None = None) -> None:
        self.asked += 1
        super().reserve(staging, size_bytes, timeout_s=timeout_s)


def store_in_thread(blocks: CrowdedSync, data: bytes, how: str, directory: Path) -> SealedBlock:
    if how == "bytes":
        return blocks.store(memoryview(data))
    (directory / "source").write_bytes(data)
    flow = Flow(cast("Any", SimpleNamespace(blocks=blocks)), cast("MetadataCache", None))
    return flow.store_file(directory / "source", len(data), files.no_progress, Deadline(30.0))


async def store(blocks: Crowded, data: bytes, how: str, directory: Path) -> SealedBlock:
    if how == "bytes":
        return await blocks.store(memoryview(data))
    (directory / "source").write_bytes(data)
    flow = AsyncFlow(cast("Any", SimpleNamespace(blocks=blocks)), cast("MetadataCache", None))
    return await flow.store_file(directory / "source", len(data), files.no_progress, Deadline(30.0))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["bytes", "file"])
async def test_the_worker_makes_room_and_the_write_goes_on(
    worker: Worker, blocks: Crowded, tmp_path: Path, size: int, how: str
) -> None:
    kept = [await kit.put(worker, os.urandom(MIB), session) for session in range(1, 21)]
    data = os.urandom(size)
    sealed = await store(blocks, data, how, tmp_path)
    assert blocks.asked == 1
    assert await kit.get(worker, sealed.address) == data
    gone = [block for block in kept if worker.store.get(block.id) is None]
    assert size // MIB <= len(gone) <= size // MIB + 5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["bytes", "file"])
async def test_the_same_for_threads(worker: Worker, place: Path, tmp_path: Path, size: int, how: str) -> None:
    for session in range(1, 21):
        await kit.put(worker, os.urandom(MIB), session)
    local = LocalWorker(worker.settings.socket, SESSION)
    blocks, data = CrowdedSync(local, Filler(place)), os.urandom(size)
    sealed = await asyncio.to_thread(store_in_thread, blocks, data, how, tmp_path)
    local.close()
    assert blocks.asked == 1
    assert await kit.get(worker, sealed.address) == data


@pytest.mark.parametrize("how", ["bytes", "file"])
async def test_where_nothing_can_go_it_is_refused_and_leaves_nothing(
    worker: Worker, blocks: Crowded, place: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.worker.writes.staging.ROOM_WAIT_S", 0.5)
    kept = [await kit.put(worker, os.urandom(MIB), owned=False) for _ in range(4)]
    with pytest.raises(NoSpace, match="free some of the disk"):
        await store(blocks, os.urandom(6 * MIB), how, tmp_path)
    assert blocks.asked == 1
    assert len(worker.staging) == 0
    assert all([await kit.get(worker, block.address) for block in kept])
    assert not [path for path in open_files() if path.startswith(f"{place}/volume/staging/")]
    blocks.filler.remove()
    staged = await kit.stage(worker, b"there is room again")
    await worker.staging.abort(staged)


def open_files() -> list[str]:
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the list itself
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
    return paths
