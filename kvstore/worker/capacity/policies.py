"""Quota, TTL and pin, as far as a worker judges them (rule 30): it knows the use of its blocks, the master their names.

The master says each block's policy in the replies to reports, the rules in those to heartbeats, and there too by how
much this worker is to reduce what it holds of a policy. What goes, goes like any other evicted block.

After a restart, labels come with the first full report and rules with the first heartbeat after the registration. Until
these are here nothing expires, and whatever has a label counts as pinned, for at most `PRESUMED_S`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvstore.core.policies import NONE, Rule, Table
from kvstore.core.types import Address, BlockId
from kvstore.pb import master_pb2 as m
from kvstore.pb import worker_pb2 as w
from kvstore.worker.background import Background
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.blocks.store import Store
from kvstore.worker.capacity.evict import MAX_VICTIMS, Candidate, Evictor, choose

log = logging.getLogger(__name__)

PRESUMED_S: Final = 10.0
"""How long after the first label the rules are waited for; they come with the heartbeat after a registration."""
JUDGED_AT_ONCE: Final = 1024
"""Blocks that are judged by new rules without a pause: some ten milliseconds."""


class _Order(NamedTuple):
    """Give up so many bytes of a policy, of blocks that are worth no more touches than `heat`."""

    policy: int
    bytes: int
    heat: float


class Policies:
    """What the worker does about policies; `store.labels` has the books. On the loop, but for `tell`."""

    def __init__(self, store: Store, evictor: Evictor, background: Background) -> None:
        self._store, self._evictor, self._background = store, evictor, background
        self._labels = store.labels
        self._first_label_s: float | None = None
        self._is_expiring = self._is_reducing = False
        self._rounds = self._rounds_told = 0

    # ---- what the master says

    def label(self, block: Block, policy: int) -> None:
        """The nearest policy of a block that an entry lists."""
        if policy != NONE and self._first_label_s is None:
            self._first_label_s = self._now_s()
        self._labels.set(block, policy)

    def on_beat(self, reply: m.HeartbeatReply, *, collects: bool) -> None:
        """Rules, if they are others than ours, and with `collects` what is to go for a quota."""
        if reply.HasField("policies"):
            self.take_table(reply.policies)
        if collects:
            self.reduce(reply.over)

    def take_table(self, table: m.PolicyTable) -> None:
        rules = (Rule(rule.id, rule.parent, rule.ttl_s, rule.pinned) for rule in table.rules)
        self._change(Table(rules, table.version))

    def reduce(self, over: Sequence[m.PolicyBytes]) -> None:
        """Evict so much of these policies. Ignored while a round runs, or when one has ended since the heartbeat was
        sent: the numbers are from before it.
        """
        if over and not self._is_reducing and self._rounds == self._rounds_told:
            self._is_reducing = True
            self._background.start(self._reduce([_Order(each.policy, each.bytes, each.heat) for each in over]))

    def upkeep(self, *, expire: bool) -> None:
        """About once a second: pins that waited take hold; with `expire`, what is due goes."""
        if self._labels.presuming and self._has_waited():
            log.warning("the master gave blocks policies, but no rules for %g s: nothing is pinned", PRESUMED_S)
            self._change(Table())
        self._labels.admit()
        if expire and not self._is_expiring:
            self._is_expiring = True
            self._background.start(self._expire())

    # ---- what others are told

    def tell(self, beat: m.HeartbeatRequest) -> None:
        """Fill in what a heartbeat says of policies. Called in its thread, and by nobody else."""
        self._rounds_told = self._rounds  # first: a round that ends from here on makes the answer out of date
        beat.policies_version = self._labels.table.version
        for policy, size_bytes in self._labels.bytes.copy().items():
            score = self._labels.lowest_score(policy)
            coldest = -1.0 if score is None else self._store.heat.clock.heat(score)
            beat.policy_bytes.add(policy=policy, bytes=size_bytes, heat=coldest)

    def describe(self, addresses: Iterable[Address]) -> list[w.BlockInfo]:
        """What is known of these blocks, in their order."""
        return [self._describe(address) for address in addresses]

    def _describe(self, address: Address) -> w.BlockInfo:
        block = self._store.get(address.block)
        if block is None or block.address != address or block.leaving:
            return w.BlockInfo(expires_s=-1)
        heat, idle_s = self._store.heat, self._now_s() - block.used_s
        ttl_s = self._labels.table.ttl_s(block.policy)
        return w.BlockInfo(
            here=True,
            tier=block.volume.tier,
            heat=heat.clock.heat(heat.of(block).score),
            idle_s=idle_s,
            expires_s=max(0.0, ttl_s - idle_s) if ttl_s > 0 else -1,
            pinned=block.pinned,
        )

    # ---- new rules

    def _change(self, table: Table) -> None:
        self._background.start(self._judge(self._labels.change(table)))

    async def _judge(self, blocks: Sequence[Block]) -> None:
        for start in range(0, len(blocks), JUDGED_AT_ONCE):
            for block in blocks[start : start + JUDGED_AT_ONCE]:
                self._labels.judge(block)
            await self._store.runtime.sleep(0)

    def _has_waited(self) -> bool:
        return self._first_label_s is not None and self._now_s() >= self._first_label_s + PRESUMED_S

    # ---- TTL

    async def _expire(self) -> None:
        """Rounds until nothing is due any more, or nothing goes."""
        try:
            is_done = False
            while not is_done:
                due = self._labels.due(self._now_s(), self._is_fair, MAX_VICTIMS)
                freed = await self._evictor.evict(due.blocks, Reason.TTL)
                is_done = not due.more or (bool(due.blocks) and freed == 0)
                await self._store.runtime.sleep(0)
        finally:
            self._is_expiring = False

    # ---- quota

    async def _reduce(self, over: Sequence[_Order]) -> None:
        """One round, of at most MAX_VICTIMS blocks; the lowest policies first, as those above them have it as well."""
        try:
            victims: dict[BlockId, Block] = {}
            depth = self._labels.table.depth
            for order in sorted(over, key=lambda order: -depth(order.policy)):
                if order.policy != NONE:
                    victims |= await self._victims(order, victims)
            await self._evictor.evict([block for block in victims.values() if self._is_fair(block)], Reason.QUOTA)
        finally:
            self._rounds += 1
            self._is_reducing = False

    async def _victims(self, order: _Order, chosen: dict[BlockId, Block]) -> dict[BlockId, Block]:
        """The coldest blocks of a policy and those below it, those that nobody holds first. What is chosen already
        counts.
        """
        inside = set(self._labels.table.below(order.policy))
        need = order.bytes - sum(b.address.length_bytes for b in chosen.values() if b.policy in inside)
        blocks = self._candidates(order, need, chosen)
        if not blocks:
            return {}
        held = await self._store.runtime.in_thread(self._probe, [block.path for block in blocks])
        sizes = (block.address.length_bytes for block in blocks)
        candidates = [Candidate(size, is_held) for size, is_held in zip(sizes, held, strict=True)]
        return {blocks[i].id: blocks[i] for i in choose(candidates, need, 0)}

    def _candidates(self, order: _Order, need_bytes: int, chosen: dict[BlockId, Block]) -> list[Block]:
        """Twice what is needed, so that there is a choice between held and not held."""
        heat = self._store.heat
        found: list[Block] = []
        total = 0
        for block in self._labels.coldest(order.policy):
            if total >= 2 * need_bytes or len(found) + len(chosen) >= MAX_VICTIMS:
                break
            if heat.clock.heat(heat.of(block).score) > order.heat:
                break  # and so are all that follow
            if block.id not in chosen and self._is_fair(block):
                found.append(block)
                total += block.address.length_bytes
        return found

    def _probe(self, paths: Iterable[str]) -> list[bool]:
        return [self._evictor.is_held(path) for path in paths]

    # ---- both

    def _is_fair(self, block: Block) -> bool:
        return block.is_movable and not block.pinned and block.shielded_until_s <= self._now_s()

    def _now_s(self) -> float:
        return self._store.runtime.monotonic_s()
