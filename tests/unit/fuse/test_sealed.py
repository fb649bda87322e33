"""Reads of sealed files: the same bytes by every way, and never a file that somebody still has open."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from kvstore.client.blocks import AsyncBlocks
from kvstore.core.errors import NotFound, Unavailable
from kvstore.core.types import Address, BlockId, Entry
from kvstore.fuse.sealed import SealedFiles
from kvstore.pagecache import Residency
from kvstore.runtime import SystemRuntime

DATA = os.urandom(300_000)
ADDRESS = Address(BlockId(1, 1), len(DATA), 7)
ENTRY = Entry(5, 0o100644, 0, 0, len(DATA), 0, 0, ADDRESS)


class OneFile:
    """Blocks that are all the same file."""

    def __init__(self, path: Path) -> None:
        self.path, self.opened, self.fails = path, 0, False
        self.touched: list[Sequence[Entry]] = []

    async def touch(self, entries: Sequence[Entry]) -> None:
        await asyncio.sleep(0)
        if self.fails:
            raise Unavailable("the worker is away")
        self.touched.append(entries)

    async def open(self, entry: Entry) -> int:
        self.opened += 1
        if entry.inode == 404:
            raise NotFound
        return os.open(self.path, os.O_RDONLY)


@pytest.fixture
def blocks(tmp_path: Path) -> OneFile:
    path = tmp_path / "block"
    path.write_bytes(DATA)
    return OneFile(path)


@pytest.fixture
async def files(blocks: OneFile) -> AsyncIterator[SealedFiles]:
    runtime = SystemRuntime(1)
    yield SealedFiles(cast(AsyncBlocks, blocks), runtime)
    runtime.close()


async def ways(files: SealedFiles) -> None:
    file = await files.open(ENTRY)
    for offset, size in (
        (0, 10),
        (4095, 2),
        (100_001, 131_072),
        (299_990, 10),
        (299_990, 4096),
        (300_000, 1),
        (1 << 40, 5),
    ):
        assert bytes(await files.read(file, offset, size)) == DATA[offset : offset + size], (offset, size)
    files.release(file)
    assert files.get(ENTRY.inode) is None


async def test_from_memory(files: SealedFiles) -> None:
    await ways(files)


async def test_what_is_not_in_memory_comes_from_a_thread(files: SealedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residency, "is_resident", lambda *_: False)
    await ways(files)


async def test_where_the_kernel_cannot_say(files: SealedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.pagecache._SYS_CACHESTAT", 100_000)
    await ways(files)


async def test_handles_share_one_fd_that_goes_with_the_last(files: SealedFiles, blocks: OneFile) -> None:
    one, two = await files.open(ENTRY), await files.open(ENTRY)
    assert one is two
    assert blocks.opened == 1
    files.release(one)
    assert bytes(await files.read(two, 0, 3)) == DATA[:3]
    fd = two.fd
    files.release(two)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_an_empty_file_needs_no_block(files: SealedFiles, blocks: OneFile) -> None:
    file = await files.open(ENTRY._replace(address=None, length_bytes=0))
    assert await files.read(file, 0, 100) == b""
    files.release(file)
    assert blocks.opened == 0


async def test_a_miss_leaves_nothing_behind(files: SealedFiles) -> None:
    with pytest.raises(NotFound):
        await files.open(ENTRY._replace(inode=404))
    assert files.get(404) is None


def test_residency(blocks: OneFile) -> None:
    residency, fd = Residency(), os.open(blocks.path, os.O_RDONLY)
    if not residency.is_resident(fd, 0, 4096) and not residency.is_known:
        pytest.skip("this kernel has no cachestat")
    assert residency.is_resident(fd, 0, len(DATA))
    assert residency.is_resident(fd, 4095, 2)
    assert not residency.is_resident(fd, 0, len(DATA) + (1 << 20))
    os.close(fd)
    assert not residency.is_resident(fd, 0, 10)
    assert residency.is_known


async def test_an_open_that_finds_an_fd_tells_the_worker(files: SealedFiles, blocks: OneFile) -> None:
    """Without the caller having to wait. The first open is the worker's own; a trouble of the worker is nobody's."""
    opened = [await files.open(ENTRY) for _ in range(4)]
    await asyncio.sleep(0.01)
    assert (blocks.opened, sum(map(len, blocks.touched))) == (1, 3)
    blocks.fails = True
    opened.append(await files.open(ENTRY))
    await asyncio.sleep(0.01)
    blocks.fails = False
    opened.append(await files.open(ENTRY))
    await asyncio.sleep(0.01)
    assert sum(map(len, blocks.touched)) == 4
    for file in opened:
        files.release(file)
