"""Blocks rise and sink between the tiers of one worker without a master."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.core import mover as core
from kvstore.core.errors import KvError
from kvstore.core.types import BlockId
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.mover import INTERVAL_S, PAUSE, Rest
from kvstore.worker.settings import Settings, VolumeSettings, Watermarks
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.worker_kit import MIB

MARKS = Watermarks(0.9, 0.75)


def settings(root: Path, *, mem: int = 8 * MIB, ssd: int = 32 * MIB, hdd: int = 0) -> Settings:
    tiers = [("mem", mem), ("ssd", ssd), ("hdd", hdd)]
    volumes = [VolumeSettings(tier, str(root / tier), size, 0, MARKS) for tier, size in tiers if size]
    return kit.settings(root)._replace(volumes=volumes, session_grace_s=60.0)


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(settings(tmp_path)) as worker:
        yield worker
        await check_all_books(worker)


async def check_all_books(worker: Worker) -> None:
    """Every byte on disk is in the books of its volume, and nothing else is."""
    await worker.held.probe()
    for volume in worker.store.volumes:
        await worker.staging.look(volume)
        blocks = [p for p in Path(volume.path, "blocks").rglob("*") if p.is_file()]
        assert {p.name for p in blocks} == {b.address.file_name for b in worker.store.hold(volume)}
        assert volume.books.blocks == sum(b.used_bytes for b in worker.store.hold(volume))
        assert volume.books.held == volume.books.staging == 0, volume.books.describe()
        assert volume.books.used <= volume.books.capacity


async def use(worker: Worker, block: Block, times: int = 2, client: int = 0) -> None:
    for _ in range(times):
        opened = await worker.opener.open(block.address, (), 5.0, client)
        os.close(opened.fd)


async def settle(worker: Worker, steps: int = 3) -> None:
    for _ in range(steps):
        await worker.mover.step()


def tier_of(block: Block) -> str:
    return block.volume.tier


async def test_a_block_that_was_written_rises_by_use(worker: Worker) -> None:
    data = os.urandom(MIB)
    block = await kit.put(worker, data)
    await settle(worker)
    assert tier_of(block) == "ssd"
    await use(worker, block, 1)
    await settle(worker)
    assert tier_of(block) == "mem", "it has room"
    assert await kit.get(worker, block.address) == data
    assert (worker.counters.promotions, worker.counters.promoted_bytes) == (1, MIB)


async def test_where_there_is_no_room_it_takes_a_second_use_and_more_heat(worker: Worker) -> None:
    old = [await kit.put(worker, os.urandom(MIB), session) for session in range(1, 7)]
    for block in old:
        await use(worker, block, 2)
    await settle(worker)
    assert {tier_of(b) for b in old} == {"mem"}
    block = await kit.put(worker, os.urandom(MIB), 100)
    for uses, tier in ((1, "ssd"), (1, "ssd"), (8, "mem")):
        await use(worker, block, uses)
        await settle(worker)
        assert tier_of(block) == tier


async def test_what_nobody_owns_yet_stays(worker: Worker) -> None:
    block = await kit.put(worker, os.urandom(MIB), owned=False)
    await use(worker, block, 3)
    await settle(worker)
    assert tier_of(block) == "ssd"


async def test_an_open_block_moves_and_its_readers_read_on(worker: Worker) -> None:
    data = os.urandom(MIB)
    block = await kit.put(worker, data)
    fd = (await worker.opener.open(block.address, (), 5.0)).fd
    await use(worker, block)
    ssd = block.volume
    await settle(worker)
    assert tier_of(block) == "mem"
    assert os.pread(fd, MIB, 0) == data
    assert ssd.books.held == MIB, "unlinked, and somebody has it open"
    os.close(fd)
    await worker.held.probe()
    assert ssd.books.held == 0


async def test_memory_gives_its_coldest_to_the_disk(worker: Worker) -> None:
    blocks = []
    for turn in range(9):
        blocks.append(await kit.put(worker, os.urandom(MIB)))
        await use(worker, blocks[-1], 3 * (turn + 1))
        await settle(worker)
    mem = worker.store.volumes[0]
    assert mem.books.used <= round(MARKS.high * 8 * MIB)
    assert tier_of(blocks[-1]) == "mem"
    assert tier_of(blocks[0]) == "ssd"
    assert worker.counters.demotions > 0
    assert len(worker.store) == 9, "nothing was evicted: the disk has room"


async def test_a_scan_does_not_flush_what_is_hot(worker: Worker) -> None:
    hot = [await kit.put(worker, os.urandom(MIB)) for _ in range(4)]
    for _ in range(4):
        for block in hot:
            await use(worker, block, 1)
    await settle(worker)
    assert {tier_of(b) for b in hot} == {"mem"}
    for turn in range(80):  # ten times the memory, each read once after it was written
        await use(worker, await kit.put(worker, os.urandom(MIB), session=100 + turn), 1)
        if turn % 4 == 0:  # the hot ones stay in use, if rarely
            await use(worker, hot[turn // 4 % 4], 1)
        await settle(worker, 1)
    assert [tier_of(b) for b in hot if worker.store.get(b.id) is b] == ["mem"] * 4
    assert worker.store.volumes[1].books.used <= 32 * MIB


async def test_only_the_last_tier_evicts(tmp_path: Path) -> None:
    async with kit.running(settings(tmp_path, mem=4 * MIB, ssd=8 * MIB, hdd=16 * MIB)) as worker:
        for session in range(40):
            await kit.put(worker, os.urandom(MIB), session)
            await settle(worker, 1)
        await settle(worker)
        _, ssd, hdd = worker.store.volumes
        assert worker.counters.evictions > 0
        assert ssd.books.used <= MARKS.high * 8 * MIB
        assert hdd.books.used <= MARKS.high * 16 * MIB
        newest = max(worker.store.hold(ssd), key=lambda b: b.id)
        assert newest.id.counter == 40
        await check_all_books(worker)


async def test_a_corrupt_block_is_not_carried_on(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    block = await kit.put(worker, os.urandom(MIB))
    await use(worker, block)
    with open(block.path, "r+b") as file:
        file.write(b"damaged")
    await settle(worker)
    assert worker.store.get(block.id) is None
    assert worker.counters.corruptions == 1
    assert [r.levelname for r in caplog.records if block.address.file_name in r.getMessage()] == ["ERROR"]
    with pytest.raises(KvError):
        await kit.get(worker, block.address)


test_a_corrupt_block_is_not_carried_on = pytest.mark.allow_errors("corrupt")(test_a_corrupt_block_is_not_carried_on)


class Failing(Disk):
    """Renames into the tier mem fail."""

    def rename(self, source: str, target: str) -> None:
        if "/mem/blocks/" in target:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().rename(source, target)


async def test_a_move_that_fails_changes_nothing(tmp_path: Path) -> None:
    async with kit.running(settings(tmp_path), Failing()) as worker:
        data = os.urandom(MIB)
        block = await kit.put(worker, data)
        await use(worker, block)
        await settle(worker)
        assert tier_of(block) == "ssd"
        assert await kit.get(worker, block.address) == data
        await settle(worker)
        await check_all_books(worker)


async def test_a_block_that_dies_while_it_moves_leaves_nothing(worker: Worker) -> None:
    block = await kit.put(worker, os.urandom(4 * MIB))
    await use(worker, block)
    step = asyncio.create_task(worker.mover.step())
    while not block.moving:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)
    await worker.evictor.drop([block])
    await step
    assert worker.store.get(block.id) is None
    # The move had it open when it was unlinked: its bytes count until the next probe.
    await kit.until(lambda: all(v.books.used == 0 for v in worker.store.volumes))


async def test_a_block_that_went_while_it_was_opened_leaves_no_trace(worker: Worker) -> None:
    block = await kit.put(worker, os.urandom(MIB))
    await worker.evictor.drop([block])
    worker.store.touch(block, 1)  # its reader comes back from the thread that opened the file
    assert list(worker.store.coldest(block.volume)) == []
    await settle(worker)


async def test_blocks_are_readable_at_every_moment(worker: Worker) -> None:
    data = [os.urandom(MIB) for _ in range(12)]
    blocks = [await kit.put(worker, each, session) for session, each in enumerate(data, 1)]
    stop = asyncio.Event()

    async def read() -> int:
        reads = 0
        while not stop.is_set():
            for block, content in zip(blocks, data, strict=True):
                assert await kit.get(worker, block.address) == content
                reads += 1
                await asyncio.sleep(0)  # an open of what is in memory waits for nothing
        return reads

    readers = [asyncio.create_task(read()) for _ in range(3)]
    for _ in range(20):
        await asyncio.sleep(0.02)
        await worker.mover.step()
    stop.set()
    assert all(await asyncio.gather(*readers))
    assert worker.counters.promotions > 0
    assert worker.counters.misses == 0


async def test_a_move_that_was_cut_short_leaves_one_copy(tmp_path: Path) -> None:
    """Killed between the rename and the unlink."""
    data, other = os.urandom(MIB), os.urandom(MIB)
    async with kit.running(settings(tmp_path)) as worker:
        block, half = await kit.put(worker, data), await kit.put(worker, other)
        mem = worker.store.volumes[0]
        shutil.copy(block.path, mem.block_path(block.address))
        Path(mem.block_path(half.address)).write_bytes(other[: MIB // 2])  # power failed, and its pages were lost
    async with kit.running(settings(tmp_path)) as again:
        for address, content in ((block.address, data), (half.address, other)):
            assert await kit.get(again, address) == content
        places = [find(v, block) + find(v, half) for v in again.store.volumes]
        assert places == [[block.address.file_name], [half.address.file_name]]
        await check_all_books(again)


def find(volume: Volume, block: Block) -> list[str]:
    return [p.name for p in Path(volume.path, "blocks").rglob(block.address.file_name)]


async def test_heat_survives_a_restart(tmp_path: Path) -> None:
    async with kit.running(settings(tmp_path, mem=0)) as worker:
        blocks = [await kit.put(worker, os.urandom(MIB), session) for session in range(1, 25)]
        hot = blocks[3]
        await use(worker, hot, 5)
        cold_order = [b.id for b in worker.store.coldest(worker.store.volumes[0])]
        assert cold_order[-1] == hot.id
    async with kit.running(settings(tmp_path, mem=0)) as again:
        for block in again.store.all():
            again.store.own(block)
        assert [b.id for b in again.store.coldest(again.store.volumes[0])] == cold_order
    (tmp_path / "ssd" / "heat").write_bytes(b"\1nonsense")
    async with kit.running(settings(tmp_path, mem=0)) as without:
        assert len(without.store) == 24


async def test_an_evicted_block_that_comes_back_is_not_new(tmp_path: Path) -> None:
    async with kit.running(settings(tmp_path, mem=0, ssd=4 * MIB)) as worker:
        data = os.urandom(MIB)
        block = await kit.put(worker, data)
        await use(worker, block, 6)
        await worker.evictor.evict([block], Reason.CAPACITY)
        again = await kit.put(worker, data)
        fresh = await kit.put(worker, os.urandom(MIB))
        heat = worker.store.heat
        assert heat.of(again).score > heat.of(fresh).score + 1
        assert heat.of(again).proven


async def test_more_than_a_lowered_capacity_is_evicted_down_to_it(tmp_path: Path) -> None:
    async with kit.running(settings(tmp_path, mem=0, ssd=16 * MIB)) as worker:
        for session in range(1, 13):
            await kit.put(worker, os.urandom(MIB), session)
    async with kit.running(settings(tmp_path, mem=0, ssd=8 * MIB)) as less:
        volume = less.store.volumes[0]
        for block in list(less.store.hold(volume)):
            less.store.own(block)
        await settle(less)
        assert volume.books.used <= 8 * MIB * MARKS.low
        assert await kit.get(less, next(iter(less.store.hold(volume))).address)
        await check_all_books(less)


async def test_moves_keep_their_pace(tmp_path: Path) -> None:
    slow = settings(tmp_path)._replace(move_bytes_per_s=8.0 * MIB, moves_at_a_time=1)
    async with kit.running(slow) as worker:
        for session in range(1, 4):
            await use(worker, await kit.put(worker, os.urandom(4 * MIB), session))
        start = worker.runtime.monotonic_s()
        await settle(worker, 4)
        assert worker.counters.promotions >= 1
        moved = worker.counters.promoted_bytes / (8 * MIB)
        assert worker.runtime.monotonic_s() - start >= moved - 0.6, "the first piece waits for nobody"


async def test_blocks_that_have_to_stay_do_not_hide_those_behind_them(tmp_path: Path) -> None:
    async with kit.running(settings(tmp_path, mem=0, ssd=8 * MIB)) as worker:
        for number in range(core.WINDOW + 20):
            (await kit.put(worker, number.to_bytes(8), session=1)).pinned = True
        for session in range(2, 9):
            await kit.put(worker, os.urandom(MIB - 200_000), session)
        volume = worker.store.volumes[0]
        volume.books.capacity = 6 * MIB
        await settle(worker)
        assert volume.books.used <= 6 * MIB * MARKS.low + MIB
        assert sum(block.pinned for block in worker.store.all()) == core.WINDOW + 20
        volume.books.capacity = 8 * MIB


PLAN_S = 0.02


def count_plans(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each began; each takes `PLAN_S`."""
    begun: list[float] = []
    coldest = worker.mover._coldest

    async def slow() -> dict[int, list[core.Resident[BlockId]]]:
        begun.append(worker.runtime.monotonic_s())
        await asyncio.sleep(PLAN_S)
        return await coldest()

    monkeypatch.setattr(worker.mover, "_coldest", slow)
    return begun


def rests(begun: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(begun)]


async def test_however_often_blocks_are_touched_plans_have_a_tenth_of_the_time(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = await kit.put(worker, os.urandom(MIB))
    mem, ssd = worker.store.volumes
    mem.books.take(8 * MIB)  # there is no room above, and nothing to displace
    begun = count_plans(worker, monkeypatch)
    async with asyncio.timeout(10):
        while len(begun) < 6:
            worker.mover.touched(block)
            await asyncio.sleep(0.002)
    mem.books.give_back(8 * MIB)
    assert block.volume is ssd
    assert min(rests(begun)) >= min(PLAN_S * (1 + PAUSE), PLAN_S + INTERVAL_S)


async def test_relief_that_finds_nothing_to_evict_rests_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_step() -> None:
        return

    async with kit.running(settings(tmp_path, mem=0)) as worker:
        monkeypatch.setattr(worker.mover, "step", no_step)
        (volume,) = worker.store.volumes
        begun = count_plans(worker, monkeypatch)
        volume.books.take(31 * MIB)  # above the mark, and nothing to evict
        async with asyncio.timeout(10):
            while len(begun) < 6:
                worker.mover.filled(volume)
                await asyncio.sleep(0.002)
        volume.books.give_back(31 * MIB)
        assert min(rests(begun)) >= min(PLAN_S * (1 + PAUSE), PLAN_S + INTERVAL_S)


async def test_the_time_that_moves_take_is_no_reason_to_rest(worker: Worker) -> None:
    clock = worker.runtime.monotonic_s
    rest = Rest(worker.runtime)
    with rest.after():
        await asyncio.sleep(0.01)
    start_s = clock()
    await asyncio.sleep(0.01 * PAUSE)  # moves
    await rest.over()
    moved_s = clock() - start_s
    with rest.after():
        await asyncio.sleep(2 * INTERVAL_S / PAUSE)
    start_s = clock()
    await rest.over()
    assert INTERVAL_S <= clock() - start_s < INTERVAL_S + 2, "never longer than that"
    assert moved_s < 0.01 * PAUSE + 2
