"""The snapshot of heat: taken while the worker goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.ghosts import Content
from kvstore.core.types import Address, BlockId
from kvstore.runtime import SystemRuntime
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Counters
from kvstore.worker.blocks.fences import Fences
from kvstore.worker.blocks.heat import HeatMap
from kvstore.worker.blocks.heatfile import PIECE, HeatFile
from kvstore.worker.blocks.store import Store
from kvstore.worker.settings import VolumeSettings
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.volumes.volume import Volume, open_volume
from tests.support.worker_kit import MIB

CAPACITY = 1 << 40


@pytest.fixture
def runtime() -> Iterator[SystemRuntime]:
    runtime = SystemRuntime()
    yield runtime
    runtime.close()


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    volume = open_volume(VolumeSettings("ssd", str(tmp_path / "v"), CAPACITY, 0), 5, Disk())
    yield volume
    volume.close()


@pytest.fixture
def store(runtime: SystemRuntime, volume: Volume) -> Store:
    """Without files: a snapshot looks at none."""
    store = Store(runtime, [volume], Fences(7), Counters(), 0.5)
    store.scanned.set()
    return store


def add(store: Store, number: int) -> Block:
    block = store.add(Address(BlockId(7, number), MIB, number), store.volumes[0], 1, None)
    store.own(block)
    store.heat.touch(block, 0, 0.0)
    return block


async def turns_while(work: asyncio.Task[None]) -> int:
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0)
    await work
    return turns


async def test_a_snapshot_of_many_blocks_leaves_the_loop_to_others(store: Store) -> None:
    blocks = ghosts = 200_000
    for number in range(blocks):
        add(store, number)
    for number in range(ghosts):
        store.heat.ghosts.add(Content(MIB, blocks + number), store.heat.of(next(iter(store.all()))))
    turns = await turns_while(asyncio.create_task(HeatFile(store).save()))
    assert turns >= (blocks + ghosts) / PIECE, "it never has more than a piece in one go"


async def test_blocks_that_are_used_come_and_go_meanwhile(store: Store, volume: Volume) -> None:
    blocks = [add(store, number) for number in range(5 * PIECE)]
    chance = random.Random(1)
    steady, unsteady = blocks[: 3 * PIECE], blocks[3 * PIECE :]
    save, new = asyncio.create_task(HeatFile(store).save()), len(blocks)
    while not save.done():
        await asyncio.sleep(0)
        for block in chance.sample(unsteady, 10):
            if store.get(block.id) is block:
                store.heat.evicted(block)
                store.forget(block)
        for block in chance.sample(steady, 10):
            store.touch(block, 0)
        add(store, new := new + 1)
    await save
    remembered = await recalled(store, volume)
    assert {b.id for b in steady} <= remembered._remembered.keys()
    assert all(store.get(b.id) is not None for b in steady)
    lost = {block.id for block in unsteady if store.get(block.id) is None}
    assert len(lost) > 0
    assert remembered._remembered.keys() <= {b.id for b in blocks}


async def test_a_snapshot_keeps_the_order_although_the_clock_goes_on(store: Store, volume: Volume) -> None:
    blocks = [add(store, number) for number in range(3 * PIECE)]
    for number, block in enumerate(blocks):
        store.heat.clock.admit(CAPACITY // 1000)
        store.heat.touch(block, 0, float(number))
    expected = list(store.heat.coldest(volume))
    clock = store.heat.clock.now
    save = asyncio.create_task(HeatFile(store).save())
    while not save.done():
        await asyncio.sleep(0)
        store.heat.clock.admit(CAPACITY)  # a whole turnover between two pieces
    await save
    remembered = (await recalled(store, volume))._remembered
    assert sorted(remembered, key=lambda id: remembered[id].heat.score) == expected
    assert remembered[blocks[-1].id].heat.score == pytest.approx(store.heat.of(blocks[-1]).score - clock)


async def recalled(store: Store, volume: Volume) -> HeatMap:
    """What another worker makes of the file."""
    other = Store(store.runtime, [volume], Fences(8), Counters(), 0.5)
    await HeatFile(other).load()
    return other.heat
