"""Which policy each block of this worker belongs to, and the orders that policies ask for. Changed on the loop only.

Blocks without a policy cost nothing here. Those of one policy are ordered by heat (who goes when it is over its quota)
and, if it has a TTL, by last use. A block whose pin holds stands in neither order: it does not go.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.core.heat import Ranking
from kvstore.core.policies import NONE, Table
from kvstore.core.types import BlockId
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.heat import HeatMap
from kvstore.worker.blocks.pins import Pins
from kvstore.worker.volumes.volume import Volume

MAX_LOOKED_AT: Final = 1024
"""Blocks of one policy that are looked at in one go for what is due: some ten milliseconds."""


class Due(NamedTuple):
    """Blocks whose TTL is over; `more`: look again, there may be others."""

    blocks: list[Block]
    more: bool


class _Group:
    """The blocks of one policy, those labelled first in front."""

    def __init__(self) -> None:
        self.blocks: dict[BlockId, Block] = {}
        self.heat: Ranking[BlockId] = Ranking()
        self.use: Ranking[BlockId] = Ranking()
        """By a last use that is true or too early: a use costs nothing, and is entered when the block seems due."""

    def discard(self, block: Block) -> None:
        self.blocks.pop(block.id, None)
        self.heat.discard(block.id)
        self.use.discard(block.id)

    def coldest(self) -> Iterator[tuple[float, Block]]:
        return ((score, self.blocks[id]) for id, score in self.heat.coldest())

    def due(self, before_s: float, is_fair: Callable[[Block], bool], limit: int) -> Due:
        """Those not used since `before_s`, at most `limit`."""
        found: list[Block] = []
        renewed: list[Block] = []
        for id, used_s in itertools.islice(self.use.coldest(), MAX_LOOKED_AT):
            if used_s > before_s or len(found) == limit:
                break
            block = self.blocks[id]
            if block.used_s > before_s:
                renewed.append(block)
            elif is_fair(block):
                found.append(block)
        for block in renewed:
            self.use.set(block.id, block.used_s)
        return Due(found, len(found) == limit or len(found) + len(renewed) == MAX_LOOKED_AT)


class Labels:
    """
    table       the rules; the orders follow them after `judge` of the blocks that `change` returns
    bytes       published bytes of the blocks of each policy that has any. Any thread may copy it
    presuming   no table has come since the start: whatever has a label counts as pinned
    """

    def __init__(self, heat: HeatMap, volumes: Sequence[Volume], pin_share: float) -> None:
        self._heat, self.pins = heat, Pins(volumes, pin_share)
        self.table, self.presuming = Table(), True
        self.bytes: dict[int, int] = {}
        self._groups: dict[int, _Group] = {}

    def set(self, block: Block, policy: int) -> None:
        """The master says that this is the block's nearest policy; `NONE`: that it has none, or no owner."""
        if block.policy == policy:
            return
        self._take_out(block)
        block.policy = policy
        if policy == NONE:
            self.pins.unpin(block)
            self._heat.repinned(block)
            return
        self._groups.setdefault(policy, _Group()).blocks[block.id] = block
        self.bytes[policy] = self.bytes.get(policy, 0) + block.address.length_bytes
        self.judge(block)

    def touched(self, block: Block) -> None:
        """Its heat rose."""
        if block.policy != NONE and not block.pinned:
            self._groups[block.policy].heat.set(block.id, self._heat.of(block).score)

    def moved(self, block: Block, source: Volume) -> None:
        """It lies in `block.volume` now."""
        if block.policy != NONE:
            self.pins.moved(block, source)
            self._arrange(block)

    def gone(self, block: Block) -> None:
        self.set(block, NONE)

    def change(self, table: Table) -> list[Block]:
        """Other rules: returns the blocks to `judge`, as they may be many."""
        old, self.table = self.table, table
        was_presuming, self.presuming = self.presuming, False
        return [
            block
            for policy, group in self._groups.items()
            if was_presuming or _kind(old, policy) != _kind(table, policy)
            for block in group.blocks.values()
        ]

    def judge(self, block: Block) -> None:
        """What its policy's rules mean for it. Any number of times."""
        if block.policy == NONE:
            return
        if self.presuming:
            block.pinned = True
        elif self.table.is_pinned(block.policy):
            self.pins.pin(block)
        else:
            self.pins.unpin(block)
        self._arrange(block)

    def admit(self) -> None:
        """Pins that waited take hold where there is room now."""
        for block in self.pins.admit():
            self._arrange(block)

    def lowest_score(self, policy: int) -> float | None:
        """Of the blocks of this very policy that may go; None when there is none. Any thread may ask."""
        group = self._groups.get(policy)
        return group.heat.lowest() if group is not None else None

    def coldest(self, policy: int) -> Iterator[Block]:
        """Of a policy and all below it, from the coldest up. Nothing may change while it is iterated."""
        groups = [group for each in self.table.below(policy) if (group := self._groups.get(each))]
        merged = heapq.merge(*(group.coldest() for group in groups), key=operator.itemgetter(0))
        return (block for _, block in merged)

    def due(self, now_s: float, is_fair: Callable[[Block], bool], limit: int) -> Due:
        """Blocks that nobody used for the TTL of their policy, at most `limit`."""
        found: list[Block] = []
        more = False
        for policy, group in self._groups.items():
            ttl_s = self.table.ttl_s(policy)
            if ttl_s > 0:
                due = group.due(now_s - ttl_s, is_fair, limit - len(found))
                found += due.blocks
                more |= due.more
            if len(found) == limit:
                break
        return Due(found, more)

    def _arrange(self, block: Block) -> None:
        """Put it in the orders that it belongs to, and take it out of the others."""
        self._heat.repinned(block)
        group = self._groups[block.policy]
        if block.pinned:
            group.heat.discard(block.id)
        else:
            group.heat.set(block.id, self._heat.of(block).score)
        if block.pinned or self.table.ttl_s(block.policy) == 0:
            group.use.discard(block.id)
        else:
            group.use.set(block.id, block.used_s)

    def _take_out(self, block: Block) -> None:
        group = self._groups.get(block.policy)
        if group is None:
            return
        group.discard(block)
        self.bytes[block.policy] -= block.address.length_bytes
        if not group.blocks:
            del self._groups[block.policy], self.bytes[block.policy]


def _kind(table: Table, policy: int) -> tuple[bool, bool]:
    """What of the rules of a policy decides in which orders its blocks stand."""
    return table.is_pinned(policy), table.ttl_s(policy) > 0
