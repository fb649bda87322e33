"""A buffer is the caller's again when its read was cancelled: nothing is written to it afterwards."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, cast

import pytest

from kvstore.client import files
from kvstore.client.blocks import INLINE_BYTES, AsyncLocalBlocks
from kvstore.client.local import AsyncLocalWorker
from kvstore.client.staging import Wish
from kvstore.core.types import Address, BlockId, Entry
from kvstore.runtime import SystemRuntime

SIZE: Final = INLINE_BYTES + 1
PIECE: Final = SIZE // 4


class Worker:
    """Hands out fds of files full of "old"."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(b"o" * SIZE)

    async def open(self, wanted: Sequence[object], *, timeout_s: float) -> list[int]:
        return [os.open(self._path, os.O_RDONLY) for _ in wanted]


class SlowDisk:
    """Reads wait for `go` once they have begun."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Event()
        self._preadv = os.preadv

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.begun.release()
        assert self.go.wait(10)
        return self._preadv(fd, buffers, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr(files, "READ_BYTES", PIECE)
    monkeypatch.setattr(os, "preadv", disk.preadv)
    yield disk
    disk.go.set()


@pytest.fixture
def runtime() -> Iterator[SystemRuntime]:
    runtime = SystemRuntime(1)
    yield runtime
    runtime.close()


def wish(buffer: bytearray) -> Wish:
    address = Address(BlockId(1, 1), SIZE, 1)
    entry = Entry(inode=1, mode=0o100644, uid=0, gid=0, length_bytes=SIZE, mtime_ns=0, ctime_ns=0, address=address)
    return Wish(entry, memoryview(buffer))


async def test_nothing_is_written_after_the_cancellation(
    tmp_path: Path, disk: SlowDisk, runtime: SystemRuntime
) -> None:
    """One read is under way, one waits for the only thread."""
    blocks = AsyncLocalBlocks(cast("AsyncLocalWorker", Worker(tmp_path / "block")), runtime)
    buffers = [bytearray(SIZE), bytearray(SIZE)]
    fds = set(os.listdir("/proc/self/fd"))
    loading = asyncio.ensure_future(blocks.load([wish(buffer) for buffer in buffers], timeout_s=10))
    assert await asyncio.to_thread(disk.begun.acquire, timeout=10)
    loading.cancel()
    await asyncio.sleep(0.05)
    assert not loading.done(), "it may still write"
    loading.cancel()
    await asyncio.sleep(0.05)
    assert not loading.done(), "whoever is impatient"
    disk.go.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    for buffer in buffers:
        buffer[:] = b"n" * SIZE
    await asyncio.wrap_future(runtime._pool.submit(lambda: None))  # everything before it in the queue is over
    assert buffers == [b"n" * SIZE, b"n" * SIZE]
    assert not disk.begun.acquire(blocking=False), "no further piece was read"
    assert set(os.listdir("/proc/self/fd")) <= fds


async def test_what_is_not_cancelled_is_whole(tmp_path: Path, disk: SlowDisk, runtime: SystemRuntime) -> None:
    disk.go.set()
    blocks = AsyncLocalBlocks(cast("AsyncLocalWorker", Worker(tmp_path / "block")), runtime)
    buffer = bytearray(SIZE)
    assert await blocks.load([wish(buffer)], timeout_s=10) == [b""]
    assert buffer == b"o" * SIZE
