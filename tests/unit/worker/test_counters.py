"""What a worker counts and tells: by tier, and bytes really unlinked by reason."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.core.errors import Corrupt
from kvstore.pb import master_pb2 as m
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import EVICTED, Reason, TierCounters
from kvstore.worker.reports import told
from kvstore.worker.settings import Settings, VolumeSettings
from kvstore.worker.volumes.disk import disk_bytes
from kvstore.worker.volumes.volume import MAX_QUARANTINED, WORKER_SESSION
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.fake_master import FakeMaster, make, running, split
from tests.support.worker_kit import KIB, MIB


@pytest.fixture
async def master() -> AsyncIterator[FakeMaster]:
    fake = make()
    async with running(fake):
        yield fake


@pytest.fixture
async def worker(master: FakeMaster, tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(kit.settings(tmp_path, master=master.endpoint), joined=True) as worker:
        worker.sessions.enter(1)
        yield worker


def unlinked(worker: Worker, tier: str = "ssd") -> dict[str, tuple[int, int]]:
    """(files, bytes) by reason, as the next heartbeat tells them."""
    return {u.reason: (u.files, u.bytes) for t in told.tiers(worker.store) if t.tier == tier for u in t.unlinked}


async def gone(master: FakeMaster, *blocks: Block) -> None:
    """The master has heard that they are nowhere."""
    ids = {block.id for block in blocks}
    await master.until(lambda: ids <= {b for report in master.reports for b in split(report.nowhere_ids)})


async def test_a_removed_block(worker: Worker, master: FakeMaster) -> None:
    block = await kit.put(worker, os.urandom(9 * KIB), owned=False)
    master.publish(block.address)
    await kit.until(lambda: block.owned)
    master.remove(block.address)
    master.commands.append(m.Command(unlink=m.Unlink(block_ids=block.id.pack())))
    await gone(master, block)
    assert unlinked(worker) == {"removed": (1, disk_bytes(9 * KIB))}


async def test_a_block_that_was_replaced_before_its_worker_heard_that_it_was_published(
    worker: Worker, master: FakeMaster
) -> None:
    """It is dead at its first verdict, and no orphan: its session lives, and the worker did not ask for it."""
    take, block = master._take, await kit.put(worker, b"data", owned=False)

    def published_and_removed(request: m.ReportRequest) -> None:
        master.publish(block.address)
        master.remove(block.address)
        take(request)

    master._take = published_and_removed  # type: ignore[method-assign]
    worker.store.on_change(block.id)
    await gone(master, block)
    assert unlinked(worker) == {"removed": (1, disk_bytes(4))}


@pytest.mark.parametrize("why", ["session over", "given up"])
async def test_a_block_that_nobody_published(worker: Worker, master: FakeMaster, why: str) -> None:
    block = await kit.put(worker, os.urandom(5 * KIB), owned=False)
    if why == "given up":
        worker.store.give_up(block)
    else:
        worker.sessions.leave(1, worker.runtime.monotonic_s())
    await gone(master, block)
    assert unlinked(worker) == {"orphan": (1, disk_bytes(5 * KIB))}


@pytest.mark.parametrize("reason", EVICTED)
async def test_evictions_are_those_of_their_reasons(worker: Worker, reason: Reason) -> None:
    blocks = [await kit.put(worker, os.urandom(4 * KIB)) for _ in range(2)]
    await worker.evictor.evict(blocks, reason)
    assert unlinked(worker) == {reason.value: (2, 8 * KIB)}
    assert (worker.counters.evictions, worker.counters.evicted_bytes) == (2, 8 * KIB)


async def test_a_block_that_could_not_be_unlinked_is_not_counted(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = await kit.put(worker, b"data")

    def refuse(path: str) -> None:
        raise OSError(1, "Operation not permitted", path)

    monkeypatch.setattr(worker.disk, "unlink", refuse)
    await worker.evictor.evict([block], Reason.CAPACITY)
    assert unlinked(worker) == {}


async def damage(worker: Worker, size_bytes: int) -> Block:
    """A block whose bytes are found to be wrong; its file is in quarantine now."""
    block = await kit.put(worker, os.urandom(size_bytes))
    Path(block.path).write_bytes(b"\0" * size_bytes)
    with pytest.raises(Corrupt):
        await worker.opener.open(block.address, (), 5.0)
    return block


@pytest.mark.allow_errors("is corrupt")
async def test_a_corrupt_block_is_unlinked_when_it_leaves_the_quarantine(worker: Worker) -> None:
    for _ in range(MAX_QUARANTINED):
        await damage(worker, 6 * KIB)
    assert unlinked(worker) == {}
    for _ in range(2):
        await damage(worker, 6 * KIB)
    assert unlinked(worker) == {"corrupt": (2, 2 * disk_bytes(6 * KIB))}
    assert worker.store.volumes[0].books.quarantine == MAX_QUARANTINED * disk_bytes(6 * KIB)
    assert worker.counters.evictions == 0


@pytest.mark.allow_errors("is corrupt")
async def test_a_corrupt_file_that_takes_the_place_of_its_like_in_quarantine(worker: Worker) -> None:
    block = await damage(worker, 6 * KIB)
    Path(block.path).write_bytes(b"\0" * 6 * KIB)  # as if it had been fetched again
    volume = worker.store.volumes[0]
    again = worker.store.add(block.address, volume, 1, None)
    volume.books.blocks += again.used_bytes
    with pytest.raises(Corrupt):
        await worker.opener.open(block.address, (), 5.0)
    assert unlinked(worker) == {"corrupt": (1, disk_bytes(6 * KIB))}
    assert volume.books.used == volume.books.quarantine == disk_bytes(6 * KIB)


async def test_hits_moves_and_blocks_by_tier(tmp_path: Path) -> None:
    async with kit.running(two_tiers(tmp_path)) as worker:
        worker.sessions.enter(1)
        block = await kit.put(worker, os.urandom(MIB))
        await kit.get(worker, block.address)
        assert [(t.tier, t.blocks, t.hits, t.promotions) for t in told.tiers(worker.store)] == [
            ("mem", 0, 0, 0),
            ("ssd", 1, 1, 0),
        ]
        await kit.get(worker, block.address)
        async with asyncio.timeout(10):
            while block.volume.tier != "mem":  # noqa: ASYNC110 - the mover has no event
                await asyncio.sleep(0.01)
        await kit.until(lambda: worker.counters.promotions)
        await kit.get(worker, block.address)
        [mem, ssd] = told.tiers(worker.store)
        assert (mem.blocks, mem.hits, mem.promotions, mem.promoted_bytes, mem.demotions) == (1, 1, 1, MIB, 0)
        assert (ssd.blocks, ssd.hits, ssd.promotions) == (0, 2, 0)
        assert not [*mem.unlinked, *ssd.unlinked], "a move unlinks nothing that is gone for anybody"
        await worker.evictor.evict([block], Reason.TTL)
        assert (unlinked(worker, "mem"), unlinked(worker, "ssd")) == ({"ttl": (1, MIB)}, {})


def two_tiers(root: Path) -> Settings:
    settings = kit.settings(root)
    memory = VolumeSettings("mem", str(root / "memory"), 8 * MIB, 0, settings.volumes[0].watermarks)
    return settings._replace(volumes=[memory, *settings.volumes])


async def test_a_heartbeat_tells_it(worker: Worker, master: FakeMaster) -> None:
    block = await kit.put(worker, b"data")
    await kit.get(worker, block.address)
    beat = worker.master_sync.beat()
    assert [(t.tier, t.blocks, t.hits) for t in beat.tiers] == [("ssd", 1, 1)]
    assert (beat.counters.hits, beat.counters.evictions) == (1, 0)


def test_only_the_reasons_that_occurred_travel() -> None:
    counters = TierCounters()
    assert not counters.to_pb("ssd", 0).unlinked
    counters.unlink_all(Reason.TTL, [1, 2])
    assert list(counters.to_pb("ssd", 0).unlinked) == [m.Unlinked(reason="ttl", files=2, bytes=3)]


async def test_what_a_dead_client_was_writing_is_an_orphan(worker: Worker) -> None:
    """What it took counts, not what was reserved for it; of an aborted file nothing does."""
    staged, fd = await worker.staging.create(1, 64 * KIB)
    os.pwrite(fd, os.urandom(5 * KIB), 0)
    os.close(fd)
    await worker.staging.abort(await kit.stage(worker, b"unwanted"))
    assert unlinked(worker) == {}
    worker.sessions.leave(1, worker.runtime.monotonic_s())
    await kit.until(lambda: unlinked(worker))
    assert unlinked(worker) == {"orphan": (1, 8 * KIB)}
    assert not os.path.exists(staged.path)


async def test_what_the_worker_itself_left_half_done_is_an_orphan(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path)) as worker:
        path = worker.store.volumes[0].staging_path(WORKER_SESSION, 7)
    Path(path).write_bytes(os.urandom(4 * KIB))
    async with kit.running(kit.settings(tmp_path)) as worker:
        assert not os.path.exists(path)
        assert unlinked(worker) == {"orphan": (1, 4 * KIB)}
