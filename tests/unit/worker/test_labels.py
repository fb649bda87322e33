"""The books of labelled blocks against a plain model: orders, bytes, pins."""

from __future__ import annotations

import dataclasses
import itertools
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.core.policies import NONE, Rule, Table
from kvstore.core.types import Address, BlockId
from kvstore.worker.blocks import labels as module
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.heat import NOBODY, HeatMap
from kvstore.worker.blocks.labels import Labels
from kvstore.worker.volumes.disk import disk_bytes
from kvstore.worker.volumes.volume import Volume

POLICIES = range(1, 5)
SHARE = 0.5
LIMIT = 3
MANY = 10


@dataclasses.dataclass
class Books:
    capacity: int


@dataclasses.dataclass
class Place:
    """As much of a volume as the books ask for."""

    id: int
    tier: str
    books: Books


def places() -> list[Volume]:
    return [cast(Volume, Place(id, tier, Books(100_000))) for id, tier in ((1, "mem"), (2, "ssd"))]


policies = st.sampled_from([NONE, *POLICIES])
ttls = st.sampled_from([0.0, 5.0, 5.0, 20.0])
tables = st.builds(
    Table,
    st.tuples(
        *(st.builds(Rule, st.just(id), policies, ttls, st.sampled_from([False, False, True])) for id in POLICIES)
    ),
)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.volumes = places()
        self.heat = HeatMap(self.volumes)
        self.labels = Labels(self.heat, self.volumes, SHARE)
        self.now_s = 0.0
        self.blocks: list[Block] = []
        self.scores: dict[BlockId, float] = {}
        self.counter = itertools.count(1)

    @precondition(lambda self: len(self.blocks) < MANY)
    @rule(length=st.integers(1, 30_000), at=st.integers(0, 1), policy=policies)
    def come(self, length: int, at: int, policy: int) -> None:
        address = Address(BlockId(1, next(self.counter)), length, length)
        block = Block(address, self.volumes[at], 1, self.now_s, used_s=self.now_s)
        self.heat.came(block, NOBODY, self.now_s)
        self.scores[block.id] = self.heat.of(block).score
        self.blocks.append(block)
        if policy != NONE:
            self.own(block)
        self.labels.set(block, policy)

    def own(self, block: Block) -> None:
        block.owned = True
        self.heat.reowned(block)

    @rule(at=st.integers(0, 1000))
    def disown(self, at: int) -> None:
        if self.blocks:
            block = self.blocks[at % len(self.blocks)]
            block.owned = False
            self.labels.set(block, NONE)
            self.heat.reowned(block)

    @rule(at=st.integers(0, 1000), policy=policies)
    def label(self, at: int, policy: int) -> None:
        if self.blocks:
            block = self.blocks[at % len(self.blocks)]
            self.own(block)
            self.labels.set(block, policy)

    @rule(at=st.integers(0, 1000))
    def use(self, at: int) -> None:
        self.now_s += 1.0
        if self.blocks:
            block = self.blocks[at % len(self.blocks)]
            block.used_s = self.now_s
            self.heat.touch(block, NOBODY, self.now_s)
            self.scores[block.id] = self.heat.of(block).score
            self.labels.touched(block)

    @rule(at=st.integers(0, 1000))
    def move(self, at: int) -> None:
        if self.blocks:
            block = self.blocks[at % len(self.blocks)]
            source = block.volume
            block.volume = self.volumes[1 - self.volumes.index(source)]
            self.heat.moved(block, source)
            self.labels.moved(block, source)

    @rule(at=st.integers(0, 1000))
    def go(self, at: int) -> None:
        if self.blocks:
            block = self.blocks.pop(at % len(self.blocks))
            self.heat.gone(block)
            self.labels.gone(block)

    @initialize(table=tables, labels=st.lists(policies, min_size=4, max_size=MANY))
    def begin(self, table: Table, labels: list[int]) -> None:
        self.change(table)
        for policy in labels:
            self.come(4000 * policy + 1, policy % 2, policy)

    @rule(table=tables)
    def change(self, table: Table) -> None:
        for block in self.labels.change(table):
            self.labels.judge(block)

    @rule()
    def admit(self) -> None:
        """After it, room for a pin is used."""
        self.labels.admit()
        for volume in self.volumes:
            waiting = [b for b in self.blocks if b.volume is volume and self.wants_pin(b) and not b.pinned]
            taken = sum(b.used_bytes for b in self.blocks if b.volume is volume and b.pinned)
            assert all(taken + b.used_bytes > volume.books.capacity * SHARE for b in waiting)

    @rule(passed_s=st.sampled_from([0.0, 4.0, 5.0, 20.0]))
    def expire(self, passed_s: float) -> None:
        self.now_s += passed_s
        due = {
            b.id
            for b in self.labelled()
            if not b.pinned and self.ttl_s(b) > 0 and b.used_s <= self.now_s - self.ttl_s(b)
        }
        found: set[BlockId] = set()
        while True:
            blocks, more = self.labels.due(self.now_s, lambda block: True, LIMIT)
            assert len(blocks) <= LIMIT
            found |= {block.id for block in blocks}
            for block in blocks:
                self.blocks.remove(block)
                self.heat.gone(block)
                self.labels.gone(block)
            if not more:
                break
        assert found == due

    def wants_pin(self, block: Block) -> bool:
        return self.labels.table.is_pinned(block.policy)

    def ttl_s(self, block: Block) -> float:
        return self.labels.table.ttl_s(block.policy)

    def labelled(self) -> list[Block]:
        return [block for block in self.blocks if block.policy != NONE]

    @invariant()
    def bytes_are_exact(self) -> None:
        expected: dict[int, int] = {}
        for block in self.labelled():
            expected[block.policy] = expected.get(block.policy, 0) + block.address.length_bytes
        assert self.labels.bytes == expected

    @invariant()
    def pins_hold_within_their_share(self) -> None:
        assert not [b for b in self.blocks if b.pinned and not self.wants_pin(b)]
        for volume in self.volumes:
            here = [b for b in self.blocks if b.volume is volume]
            pinned = sum(b.used_bytes for b in here if b.pinned)
            assert self.labels.pins.pinned_bytes(volume.tier) == pinned <= volume.books.capacity * SHARE
            waiting = sum(b.used_bytes for b in here if self.wants_pin(b) and not b.pinned)
            assert self.labels.pins.unpinned_bytes(volume.tier) == waiting

    @invariant()
    def volumes_have_the_pinned_and_the_unowned_in_orders_of_their_own(self) -> None:
        for volume in self.volumes:
            here = [b for b in self.blocks if b.volume is volume]
            owned = [b for b in here if b.owned]
            assert len(list(self.heat.coldest(volume))) == len(owned)
            assert {b.id for b in owned if not b.pinned} == set(self.heat.coldest(volume, pinned=False))
            assert {b.id: self.heat.of(b).score for b in here} == {b.id: self.scores[b.id] for b in here}
            order = [self.scores[id] for id in self.heat.coldest(volume)]
            assert order == sorted(self.scores[b.id] for b in owned)

    @invariant()
    def the_coldest_come_first(self) -> None:
        for policy in POLICIES:
            inside = self.labels.table.below(policy)
            expected = [self.heat.of(b).score for b in self.blocks if b.policy in inside and not b.pinned]
            found = [self.heat.of(b).score for b in self.labels.coldest(policy)]
            assert found == sorted(expected)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def make(count: int, share: float = SHARE) -> tuple[Labels, list[Block]]:
    """Blocks of 1,000 bytes on the second volume, with policy 1."""
    volumes = places()
    heat = HeatMap(volumes)
    labels = Labels(heat, volumes, share)
    labels.change(Table())
    blocks = [Block(Address(BlockId(1, at), 1000, at), volumes[1], 1, 0.0, owned=True) for at in range(count)]
    for block in blocks:
        heat.came(block, NOBODY, 0.0)
        labels.set(block, 1)
    return labels, blocks


def test_those_labelled_first_are_pinned_and_the_next_follow_when_one_goes() -> None:
    labels, blocks = make(20)
    size = disk_bytes(1000)
    for block in labels.change(Table([Rule(1, pinned=True)])):
        labels.judge(block)
    fit = int(100_000 * SHARE // size)
    assert [b.pinned for b in blocks] == [True] * fit + [False] * (20 - fit)
    assert (labels.pins.pinned_bytes("ssd"), labels.pins.unpinned_bytes("ssd")) == (fit * size, (20 - fit) * size)
    labels.gone(blocks[0])
    labels.admit()
    assert [b.pinned for b in blocks] == [False] + [True] * fit + [False] * (19 - fit)


def test_a_share_of_nothing_pins_nothing() -> None:
    labels, blocks = make(3, share=0.0)
    for block in labels.change(Table([Rule(1, pinned=True)])):
        labels.judge(block)
    labels.admit()
    assert not any(block.pinned for block in blocks)


def test_what_is_in_use_costs_a_look_once_a_ttl_and_not_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """999 blocks that are used all the time, and one that is not."""
    monkeypatch.setattr(module, "MAX_LOOKED_AT", 100)
    labels, blocks = make(1000)
    for block in labels.change(Table([Rule(1, ttl_s=10.0)])):
        labels.judge(block)
    for block in blocks[:-1]:
        block.used_s = 15.0
    found: list[Block] = []
    looks = 0
    more = True
    while more:
        due, more = labels.due(15.0, lambda block: True, 256)
        found += due
        for block in due:
            labels.gone(block)
        looks += 1
    assert (found, looks) == ([blocks[-1]], 11)
    assert labels.due(24.9, lambda block: True, 256) == ([], False), "one look, until the next are due"
