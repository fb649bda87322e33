"""What a worker promises of a volume, on each kind of file system that may lie under it: one suite, run against tmpfs,
ext4, and an ext4 of 64 MiB. What needs a disk that is really full runs on the small ones.
"""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from kvstore.core.errors import NoSpace
from kvstore.core.hashing import hash_block
from kvstore.core.types import Replica
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.entries import address_from_pb
from kvstore.rpc.metadata import Caller
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.settings import Settings, VolumeSettings, Watermarks
from kvstore.worker.volumes.disk import PAGE_BYTES, Disk
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.accounting import allocated_on_disk, check_exact, stop_moves, used_on_disk
from tests.support.small_fs import Filler, small_ext4, small_tmpfs
from tests.support.worker_kit import KIB, MIB

METADATA_BYTES = MIB
"""Of the file system, and the worker's identity and heat: not in the books."""
MARKS = Watermarks(0.95, 0.9)


def large_ext4(root: Path) -> AbstractContextManager[Path]:
    """Where temporary files lie, if that is ext4."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(root)], check=True, capture_output=True).stdout
    return nullcontext(root) if kind.startswith(b"ext") else small_ext4(root, 256)


SMALL: dict[str, Callable[[Path], AbstractContextManager[Path]]] = {"tmpfs": small_tmpfs, "small ext4": small_ext4}
ALL = {**SMALL, "ext4": large_ext4}


@pytest.fixture(params=ALL)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on the file system under test."""
    with ALL[request.param](tmp_path) as directory:
        yield directory


@pytest.fixture(params=SMALL)
def small_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with SMALL[request.param](tmp_path) as directory:
        yield directory


def volume_on(place: Path, capacity: int, *, tier: str = "ssd", floor: int = 0) -> VolumeSettings:
    return VolumeSettings(tier, str(place / f"volume-{tier}"), capacity, floor, MARKS)


def settings(root: Path, *volumes: VolumeSettings) -> Settings:
    return kit.settings(root)._replace(volumes=volumes, session_grace_s=60.0)


def first(worker: Worker) -> Volume:
    return worker.store.volumes[0]


async def put_many(worker: Worker, count: int, size: int = MIB, *, owned: bool = True) -> dict[Block, bytes]:
    data = [os.urandom(size) for _ in range(count)]
    return {await kit.put(worker, each, session, owned=owned): each for session, each in enumerate(data, 1)}


async def read_all(worker: Worker, blocks: dict[Block, bytes]) -> None:
    for block, data in blocks.items():
        assert await kit.get(worker, block.address) == data


def check_du(worker: Worker, volume: Volume) -> None:
    """The books count pages of 4 KiB; a small ext4 has blocks of 1 KiB, and takes a little less."""
    spare = volume.books.blocks - allocated_on_disk(volume)
    if os.statvfs(volume.path).f_frsize == PAGE_BYTES:
        assert spare == 0
    else:
        assert 0 <= spare < PAGE_BYTES * worker.store.count(volume)


async def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what the worker does by itself has no event
            await asyncio.sleep(0.02)


# ---- accounting and caps


async def test_the_books_say_what_du_says(tmp_path: Path, place: Path) -> None:
    async with kit.running(settings(tmp_path, volume_on(place, 32 * MIB))) as worker:
        blocks: dict[Block, bytes] = {}
        for size in (1, 4095, 4096, 4097, MIB - 1, MIB + 1, 3 * MIB):
            blocks |= await put_many(worker, 2, size)
        check_du(worker, first(worker))
        await read_all(worker, blocks)
        evicted, dropped, *left = blocks
        await worker.evictor.evict([evicted], Reason.CAPACITY)
        await worker.evictor.drop([dropped])
        check_du(worker, first(worker))
        await read_all(worker, {block: blocks[block] for block in left})
        await check_exact(worker)


async def test_the_capacity_is_never_passed(tmp_path: Path, place: Path) -> None:
    async with kit.running(settings(tmp_path, volume_on(place, 16 * MIB))) as worker:
        over: list[str] = []

        async def write(session: int) -> None:
            for turn in range(4):
                await kit.put(worker, os.urandom(MIB + turn * 100 * KIB), session)
                on_disk, books = used_on_disk(first(worker)), first(worker).books
                if not on_disk <= books.used <= books.capacity:
                    over.append(f"{on_disk} bytes on disk; {books.describe()}")

        async with asyncio.timeout(60):
            await asyncio.gather(*(write(session) for session in range(1, 17)))
        assert over == []
        assert worker.counters.evictions > 30
        await stop_moves(worker)
        await check_exact(worker)


async def test_more_than_a_lowered_capacity_is_evicted_and_the_rest_served(tmp_path: Path, place: Path) -> None:
    async with kit.running(settings(tmp_path, volume_on(place, 24 * MIB))) as worker:
        stored = {block.address: data for block, data in (await put_many(worker, 20)).items()}
    async with kit.running(settings(tmp_path, volume_on(place, 8 * MIB))) as less:
        for block in list(less.store.all()):
            less.store.own(block)
        await wait_for(lambda: first(less).books.used <= 8 * MIB)
        await stop_moves(less)
        assert 4 <= len(less.store) <= 8
        for block in less.store.all():
            assert await kit.get(less, block.address) == stored[block.address]
        await kit.put(less, os.urandom(MIB))
        await check_exact(less)


async def test_unlinked_files_count_until_their_last_reader_closes_them(tmp_path: Path, place: Path) -> None:
    async with kit.running(settings(tmp_path, volume_on(place, 16 * MIB))) as worker:
        block = await kit.put(worker, data := os.urandom(4 * MIB))
        fd = (await worker.opener.open(block.address, (), 5.0)).fd
        free = Disk().free_bytes(str(place))
        await worker.evictor.evict([block], Reason.CAPACITY)
        assert (first(worker).books.held, first(worker).books.blocks) == (4 * MIB, 0)
        await worker.held.probe()
        assert first(worker).books.held == 4 * MIB
        assert os.pread(fd, len(data), 0) == data
        os.close(fd)
        await worker.held.probe()
        assert first(worker).books.used == 0
        if first(worker).books.is_disk_full:  # on a large one others write meanwhile
            await wait_for(lambda: Disk().free_bytes(str(place)) >= free + 4 * MIB - METADATA_BYTES)


# ---- moves


@pytest.mark.parametrize("is_faster", [True, False])
async def test_blocks_move_to_another_file_system_and_back(tmp_path: Path, place: Path, is_faster: bool) -> None:
    (other := tmp_path / "other").mkdir()
    ssd, hdd = (place, other) if is_faster else (other, place)
    mine = settings(tmp_path, volume_on(ssd, 16 * MIB), volume_on(hdd, 24 * MIB, tier="hdd"))
    async with kit.running(mine) as worker:
        blocks = await put_many(worker, 6, 2 * MIB + 1)
        assert await worker.mover.demote(first(worker), 6 * MIB) >= 6 * MIB
        sunk = [block for block in blocks if block.volume.tier == "hdd"]
        assert len(sunk) == 3
        check_du(worker, worker.store.volumes[1])
        await read_all(worker, blocks)
        for block in sunk:
            worker.mover.touched(block)
        await wait_for(lambda: all(block.volume.tier == "ssd" for block in blocks))
        await read_all(worker, blocks)
        await stop_moves(worker)
        await check_exact(worker)


# ---- a disk that is full


@pytest.fixture
def filler(small_place: Path) -> Filler:
    return Filler(small_place)


async def test_the_free_floor_is_left_to_others(tmp_path: Path, small_place: Path) -> None:
    floor = 16 * MIB
    async with kit.running(settings(tmp_path, volume_on(small_place, 256 * MIB, floor=floor))) as worker:
        for _ in range(10):
            await asyncio.gather(*(kit.put(worker, os.urandom(MIB)) for _ in range(8)))
            assert Disk().free_bytes(str(small_place)) >= floor - METADATA_BYTES
        assert worker.counters.tiers["ssd"].unlinked[Reason.FLOOR].files >= 20
        with pytest.raises(NoSpace):
            await worker.staging.create(1, 60 * MIB, 0.2)
        await stop_moves(worker)
        await check_exact(worker)


async def test_when_another_program_fills_the_disk_the_cache_gives_way_down_to_the_floor(
    tmp_path: Path, small_place: Path, filler: Filler
) -> None:
    floor = 8 * MIB
    async with kit.running(settings(tmp_path, volume_on(small_place, 40 * MIB, floor=floor))) as worker:
        blocks = await put_many(worker, 30)
        fd = (await worker.opener.open(next(iter(blocks)).address, (), 5.0)).fd
        filler.fill()
        assert Disk().free_bytes(str(small_place)) == 0
        await wait_for(lambda: Disk().free_bytes(str(small_place)) >= floor)
        await stop_moves(worker)
        left = {block: data for block, data in blocks.items() if worker.store.get(block.id) is block}
        assert 10 <= len(left) <= 22, "no more than the floor, and down to the low watermark"
        await read_all(worker, left)
        assert os.pread(fd, MIB, 0) == next(iter(blocks.values()))
        os.close(fd)
        assert first(worker).in_service
        await check_exact(worker)


async def test_while_the_disk_is_full_puts_are_refused_and_readers_are_served(
    tmp_path: Path, small_place: Path, filler: Filler
) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    mine = settings(tmp_path, volume_on(small_place, 40 * MIB, floor=MIB))
    async with kit.running(kit.settings(elsewhere, "peer")) as peer, kit.running(mine) as worker:
        away = await kit.put(peer, data := os.urandom(3 * MIB))
        kept = await put_many(worker, 8, owned=False)  # these cannot be evicted
        await put_many(worker, 20)
        while len(worker.store) > len(kept):
            filler.fill()
            await worker.staging.look(first(worker))  # as it does once a second
            await asyncio.sleep(0.05)
        filler.fill()
        await worker.staging.look(first(worker))
        with pytest.raises(NoSpace, match="free some of the disk"):
            await worker.staging.create(1, MIB, 0.5)
        await read_all(worker, kept)
        opened = await worker.opener.open(away.address, [Replica(1, "ssd", "peer", peer.endpoint)], 20.0)
        assert os.pread(opened.fd, len(data), 0) == data
        os.close(opened.fd)
        assert first(worker).in_service
        filler.remove()
        block = await kit.put(worker, os.urandom(MIB))
        assert await kit.get(worker, block.address)
        await stop_moves(worker)
        await check_exact(worker)


class Watched(Disk):
    """Counts the writes that met a full disk."""

    refusals = 0

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        try:
            super().write(fd, data, offset)
        except OSError as error:
            self.refusals += error.errno == errno.ENOSPC
            raise


async def upload(worker: Worker, data: bytes, between: Callable[[], object] = lambda: None) -> w.WriteReply:
    """As a remote client does; `between` is called after the first frame was written."""

    async def frames() -> AsyncIterator[bytes]:
        yield w.WriteRequest(session=7, length_bytes=len(data), hash=hash_block(data)).SerializeToString()
        for at in range(0, len(data), MIB):
            yield data[at : at + MIB]
            if at == 0:
                between()

    return await worker.bulk.write(frames(), Caller(session=7))


async def test_a_write_that_meets_a_full_disk_in_the_middle_makes_room_and_goes_on(
    tmp_path: Path, small_place: Path, filler: Filler
) -> None:
    disk = Watched()
    async with kit.running(settings(tmp_path, volume_on(small_place, 48 * MIB)), disk) as worker:
        blocks = await put_many(worker, 20)
        data = os.urandom(6 * MIB + 7)
        reply = await upload(worker, data, filler.fill)
        assert disk.refusals >= 1
        assert await kit.get(worker, address_from_pb(reply.address)) == data
        left = {block: content for block, content in blocks.items() if worker.store.get(block.id) is block}
        assert len(left) < len(blocks)
        await read_all(worker, left)
        await stop_moves(worker)
        await check_exact(worker)


async def test_a_move_that_meets_a_full_disk_makes_room_and_goes_on(
    tmp_path: Path, small_place: Path, filler: Filler
) -> None:
    (other := tmp_path / "other").mkdir()
    mine = settings(tmp_path, volume_on(other, 8 * MIB), volume_on(small_place, 48 * MIB, tier="hdd"))
    disk = Watched()
    async with kit.running(mine, disk) as worker:
        await put_many(worker, 6)
        for _ in range(4):
            assert await worker.mover.demote(first(worker), 6 * MIB) == 6 * MIB
            blocks = await put_many(worker, 6)
        await stop_moves(worker)
        filler.fill()
        while first(worker).books.blocks:  # a plan that was made before the disk was full comes only in part to pass
            assert await worker.mover.demote(first(worker), 6 * MIB) > 0
        assert disk.refusals >= 1
        left = {block: data for block, data in blocks.items() if worker.store.get(block.id) is block}
        assert {block.volume.tier for block in left} == {"hdd"}, "some of them were the coldest there"
        await read_all(worker, left)
        await check_exact(worker)
