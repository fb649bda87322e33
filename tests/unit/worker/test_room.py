"""Room in a tier that is not the last: its coldest blocks are demoted for whoever waits there, not evicted."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.core.errors import NoSpace
from kvstore.worker.blocks.block import Block
from kvstore.worker.capacity import room
from kvstore.worker.mover import AHEAD_S
from kvstore.worker.settings import Settings, VolumeSettings, Watermarks
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.worker import Worker
from kvstore.worker.writes.staging import Staged
from tests.support import worker_kit as kit
from tests.support.accounting import check_exact
from tests.support.worker_kit import MIB


def settings(root: Path, *, ssd: int = 8 * MIB, hdd: int = 32 * MIB) -> Settings:
    """Nothing sinks before a volume is full."""
    marks = Watermarks(1.0, 0.9)
    volumes = [VolumeSettings(tier, str(root / tier), size, 0, marks) for tier, size in (("ssd", ssd), ("hdd", hdd))]
    return kit.settings(root)._replace(volumes=volumes, session_grace_s=60.0)


class Refusing(Disk):
    """The hdd takes no block while `refuses`."""

    refuses = False

    def rename(self, source: str, target: str) -> None:
        if self.refuses and "/hdd/blocks/" in target:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        super().rename(source, target)


@pytest.fixture
def disk() -> Refusing:
    return Refusing()


@pytest.fixture
async def worker(tmp_path: Path, disk: Refusing) -> AsyncIterator[Worker]:
    async with kit.running(settings(tmp_path), disk) as worker:
        yield worker
        for staged in worker.staging.of_clients():  # empty, but for their reservations
            await worker.staging.abort(staged)
        await check_exact(worker)


async def a_growing_file(worker: Worker) -> Staged:
    staged, fd = await worker.staging.create(1, MIB)
    os.close(fd)
    assert staged.volume.tier == "ssd"
    return staged


async def seven(worker: Worker, *, owned: bool = True) -> list[Block]:
    return [await kit.put(worker, os.urandom(MIB), owned=owned) for _ in range(7)]


def tiers(blocks: list[Block]) -> list[str]:
    return [block.volume.tier for block in blocks]


async def test_a_file_that_grows_sends_the_coldest_down_and_evicts_nothing(worker: Worker) -> None:
    blocks = await seven(worker)
    staged = await a_growing_file(worker)
    for block in blocks[2:]:
        await kit.get(worker, block.address)
    await worker.staging.reserve(staged, 3 * MIB)
    assert tiers(blocks) == ["hdd"] * 2 + ["ssd"] * 5, "the coldest, and no more than needed"
    assert worker.counters.evictions == 0
    assert worker.counters.demotions == 2
    assert all([await kit.get(worker, block.address) for block in blocks])


async def test_the_last_tier_evicts_for_what_comes_down(tmp_path: Path) -> None:
    async with kit.running(settings(tmp_path, hdd=4 * MIB)) as worker:
        old = [await kit.put(worker, os.urandom(MIB)) for _ in range(4)]
        assert await worker.mover.demote(old[0].volume, 4 * MIB) == 4 * MIB
        blocks = await seven(worker)
        staged = await a_growing_file(worker)
        await worker.staging.reserve(staged, 3 * MIB)
        assert sorted(tiers(blocks)) == ["hdd"] * 2 + ["ssd"] * 5
        assert [worker.store.get(b.id) for b in old].count(None) == 2
        await worker.staging.abort(staged)
        await check_exact(worker)


async def test_a_pinned_block_sinks_and_stays_here(worker: Worker) -> None:
    blocks = await seven(worker)
    for block in blocks:
        block.pinned = True
    staged = await a_growing_file(worker)
    await worker.staging.reserve(staged, 8 * MIB)
    assert tiers(blocks) == ["hdd"] * 7


@pytest.mark.parametrize("why", ["nothing may move", "the target fails", "it takes too long"])
async def test_where_demotion_frees_nothing_the_volume_evicts(
    worker: Worker, disk: Refusing, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    blocks = await seven(worker)
    match why:
        case "nothing may move":
            monkeypatch.setattr(worker.mover, "_next_s", worker.runtime.monotonic_s() + AHEAD_S + 60)
        case "the target fails":
            disk.refuses = True
        case "it takes too long":
            monkeypatch.setattr(room, "DEMOTING_SHARE", 0.01)
            monkeypatch.setattr(worker.room, "demote", hang)
    staged = await a_growing_file(worker)
    await worker.staging.reserve(staged, 3 * MIB)
    assert worker.counters.evictions == 2
    assert worker.counters.demotions == 0
    assert sum(worker.store.get(block.id) is block for block in blocks) == 5


async def hang(*_: object) -> int:
    await asyncio.Event().wait()
    return 0


async def test_blocks_nobody_owns_yet_neither_sink_nor_go(worker: Worker) -> None:
    blocks = await seven(worker, owned=False)
    staged = await a_growing_file(worker)
    with pytest.raises(NoSpace):
        await worker.room.grow(staged.volume, lambda: 2 * MIB, 0.3)
    assert tiers(blocks) == ["ssd"] * 7
    assert len(worker.store) == 7


async def test_moves_that_are_waited_for_run_ahead_of_the_pace_but_not_for_ever(tmp_path: Path) -> None:
    slow = settings(tmp_path)._replace(move_bytes_per_s=float(MIB), moves_at_a_time=1)
    async with kit.running(slow) as worker:
        blocks = await seven(worker)
        ssd = blocks[0].volume
        async with asyncio.timeout(AHEAD_S * 0.9):
            assert await worker.mover.demote(ssd, 6 * MIB) == AHEAD_S * MIB, "at once"
        assert await worker.mover.demote(ssd, 6 * MIB) <= MIB, "from now on at the pace"
        assert await worker.mover.demote(worker.store.volumes[-1], MIB) == 0, "nothing is below the last tier"


async def test_on_a_volume_that_is_still_looked_through_nothing_grows(worker: Worker) -> None:
    """A session that comes back after a restart may ask before the books know what is there."""
    staged = await a_growing_file(worker)
    worker.store.scanned.clear()
    with pytest.raises(NoSpace, match=r"just started.*retry"):
        await worker.room.grow(staged.volume, lambda: MIB, 0)
    with pytest.raises(NoSpace, match=r"just started.*retry"):
        await worker.room.grow(staged.volume, lambda: MIB, 0.05)
    waiting = asyncio.create_task(worker.staging.reserve(staged, 2 * MIB))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    worker.store.scanned.set()
    await waiting
    assert staged.volume.books.staging == 2 * MIB


def two_of_a_tier(root: Path) -> Settings:
    volumes = [
        VolumeSettings("ssd", str(root / name), size, 0, Watermarks(1.0, 0.9))
        for name, size in (("large", 16 * MIB), ("small", 8 * MIB))
    ]
    return kit.settings(root)._replace(volumes=volumes, session_grace_s=60.0)


@pytest.mark.parametrize("why", ["pinned", "unowned"])
async def test_a_put_goes_where_blocks_can_go(tmp_path: Path, why: str) -> None:
    """The larger volume has more blocks, but none of them may be evicted."""
    async with kit.running(two_of_a_tier(tmp_path)) as worker:
        blocks = [await kit.put(worker, os.urandom(MIB), owned=False) for _ in range(24)]
        small, large = sorted(worker.store.volumes, key=lambda volume: volume.books.capacity)
        assert small.books.free == large.books.free == 0
        for block in blocks:
            block.pinned = why == "pinned" and block.volume is large
            if why == "pinned" or block.volume is small:
                worker.store.own(block)
        assert (await kit.put(worker, os.urandom(2 * MIB))).volume is small
        assert worker.store.count(large) == 16
        await check_exact(worker)


async def test_where_nothing_can_go_a_put_waits_between_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kit.running(two_of_a_tier(tmp_path)) as worker:
        for _ in range(24):
            await kit.put(worker, os.urandom(MIB), owned=False)
        rounds = 0

        async def count(*_: object) -> int:
            nonlocal rounds
            rounds += 1
            return 0

        monkeypatch.setattr(worker.evictor, "make_room", count)
        with pytest.raises(NoSpace):
            await worker.staging.create(1, MIB, 5 * room.RETRY_S)
        assert 2 <= rounds <= 2 * 6, "one on each volume, and then a wait"
