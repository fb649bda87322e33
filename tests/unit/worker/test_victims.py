"""What eviction chooses from, however many cold blocks may not go: on a store without files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.core.types import Address, BlockId
from kvstore.runtime import SystemRuntime
from kvstore.worker.background import Background
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Counters
from kvstore.worker.blocks.fences import Fences
from kvstore.worker.blocks.store import Store
from kvstore.worker.capacity import evict
from kvstore.worker.capacity.evict import Evictor
from kvstore.worker.settings import VolumeSettings
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.volumes.held import HeldFiles
from kvstore.worker.volumes.volume import Volume, open_volume
from tests.support.worker_kit import MIB

CAPACITY = 1 << 40
SEEN = 16


@pytest.fixture
def runtime() -> Iterator[SystemRuntime]:
    runtime = SystemRuntime()
    yield runtime
    runtime.close()


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[list[Volume]]:
    volumes = [
        open_volume(VolumeSettings(tier, str(tmp_path / tier), CAPACITY, 0), at, Disk())
        for at, tier in enumerate(("ssd", "hdd"), 1)
    ]
    yield volumes
    for volume in volumes:
        volume.close()


@pytest.fixture
def store(runtime: SystemRuntime, volumes: list[Volume]) -> Store:
    return Store(runtime, volumes, Fences(7), Counters(), 0.5)


@pytest.fixture
def evictor(store: Store, runtime: SystemRuntime, monkeypatch: pytest.MonkeyPatch) -> Evictor:
    monkeypatch.setattr(evict, "MAX_SEEN", SEEN)
    return Evictor(store, Disk(), HeldFiles(runtime, Disk()), Background(), said)


async def said(blocks: Sequence[BlockId]) -> bool:
    return True


NUMBERS = itertools.count(1)


def add(store: Store, count: int, *, owned: bool = True) -> list[Block]:
    """Each hotter than those before it."""
    blocks = []
    for number in itertools.islice(NUMBERS, count):
        store.heat.clock.admit(CAPACITY // 1000)
        blocks.append(store.add(Address(BlockId(7, number), MIB, number), store.volumes[0], number, None))
        if owned:
            store.own(blocks[-1])
    return blocks


@pytest.mark.parametrize("why", ["unowned", "pinned", "disowned"])
def test_victims_are_found_behind_many_cold_blocks_that_have_to_stay(store: Store, evictor: Evictor, why: str) -> None:
    stay = add(store, 10 * SEEN, owned=why != "unowned")
    for block in stay:
        if why == "pinned":
            block.pinned = True
            store.heat.repinned(block)
        elif why == "disowned":
            store.disown(block)
    fair = add(store, 4)
    assert evictor._candidates(store.volumes[0], MIB) == fair[:2]


def test_a_round_does_not_look_through_all(store: Store, evictor: Evictor, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in add(store, 10 * SEEN):
        block.shielded_until_s = float("inf")
    looks = 0
    get = store._blocks.__getitem__

    class Counting(dict[BlockId, Block]):
        def __getitem__(self, id: BlockId) -> Block:
            nonlocal looks
            looks += 1
            return get(id)

    monkeypatch.setattr(store, "_blocks", Counting(store._blocks))
    assert evictor._candidates(store.volumes[0], MIB) == []
    assert 0 < looks <= SEEN


def test_a_block_comes_with_its_heat_and_keeps_it_whoever_owns_it(store: Store, evictor: Evictor) -> None:
    first, second, third = blocks = add(store, 3, owned=False)
    store.touch(first, 99)
    scores = [store.heat.of(block).score for block in blocks]
    assert scores[1] < scores[2] < scores[0]
    assert list(store.coldest(store.volumes[0])) == []
    for block in (third, first, second):
        store.own(block)
    assert list(store.coldest(store.volumes[0])) == [second, third, first]
    assert [store.heat.of(block).score for block in blocks] == scores
    store.disown(second)
    assert list(store.coldest(store.volumes[0])) == [third, first]
    assert [store.heat.of(block).score for block in blocks] == scores


def test_a_block_that_is_disowned_while_it_moves_is_in_order_where_it_went(store: Store, evictor: Evictor) -> None:
    (block,) = add(store, 1)
    score = store.heat.of(block).score
    store.disown(block)
    store.move(block, store.volumes[1], None)
    assert store.heat.of(block).score == score
    assert [list(store.coldest(volume)) for volume in store.volumes] == [[], []]
    store.own(block)
    assert [list(store.coldest(volume)) for volume in store.volumes] == [[], [block]]
    store.forget(block)
    store.own(block)  # the reply to a report may come late
    assert [list(store.coldest(volume)) for volume in store.volumes] == [[], []]
