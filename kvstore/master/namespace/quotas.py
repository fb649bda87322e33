"""Quotas at work: what live workers hold of each policy, what no quota counts, and who is to give up how much.

All of it follows from rows and heartbeats, and is made anew with each tick: nothing here needs to survive.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import xxhash

from kvstore.master.namespace import policies
from kvstore.master.namespace.policies import Policy
from kvstore.master.storage.db import Reader

FRESH_S: Final = 5.0
"""A published block is in its worker's heartbeats by then: until then it counts as held."""
HEADROOM_SHARE: Final = 0.2
"""Of a quota: so much of it at most is kept free for what is published until the next orders are carried out."""
HEADROOM_S: Final = 2.0
"""What came in so much time lately is kept free, so that a writer in a full directory is not refused."""
LEAST_HEAT: Final = 0.05
"""Added to each heat: what is colder than this is equally cold."""


class Rule(NamedTuple):
    """What a worker must know of a policy."""

    id: int
    parent: int
    ttl_s: float
    pinned: bool


class Table(NamedTuple):
    version: int
    """Hash of the rules; 0 where there are none."""
    rules: Sequence[Rule] = ()


class Held(NamedTuple):
    """What a worker holds of a policy."""

    bytes: int
    coldest: float
    """Touches just now that the coldest of it is worth which may be evicted; negative: there is none."""


class Order(NamedTuple):
    """A worker is to reduce what it holds of a policy by so much; what is hotter than `heat` stays."""

    policy: int
    bytes: int
    heat: float


class Quotas:
    """`table`: for workers. `hidden`: policy → published bytes that no live worker holds."""

    def __init__(self, reader: Reader, tick_s: float) -> None:
        self._reader = reader
        self.table = Table(0)
        self.hidden: dict[int, int] = {}
        ticks = 2 + math.ceil(FRESH_S / tick_s)
        self._fresh: deque[Counter[int]] = deque([Counter()], maxlen=ticks)
        self._refused: deque[Counter[int]] = deque([Counter()], maxlen=ticks)
        self._growth: dict[int, int] = {}
        self._orders: dict[int, dict[str, Order]] = {}

    def grew(self, grown: Counter[int]) -> None:
        """Bytes were published: policy → how many."""
        if grown:
            self._fresh[-1] += grown

    def refused(self, refused: Counter[int]) -> None:
        """There was no room: policy → the bytes that somebody came with. For a while so much is kept free: who tries
        again finds it, also where a block is large beside the quota."""
        if refused:
            self._refused[-1] |= refused

    def tick(self, held: Mapping[str, Mapping[int, Held]], *, is_whole: bool) -> None:
        """`held`: live node → policy → the blocks that count for it (not for those below it). `is_whole`: every known
        volume is live, so nothing is hidden. Where one is not, what others hold twice hides so much less of it.
        """
        rows = policies.every(self._reader)
        by_policy = _with_those_below({id: row.parent for id, row in rows}, held)
        fresh: Counter[int] = sum(self._fresh, Counter())
        self._growth = {id: round(size / FRESH_S * HEADROOM_S) for id, size in fresh.items()}
        self._fresh.append(Counter())
        self._refused.append(Counter())
        seen = {id: sum(each.bytes for each in by_policy.get(id, {}).values()) + fresh[id] for id, _ in rows}
        hidden = {id: row.used_bytes - seen[id] for id, row in rows if row.used_bytes > seen[id]}
        self.hidden = {} if is_whole else hidden
        over = {each.id: (each.row, self._due_bytes(each, by_policy.get(each.id, {}))) for each in rows}
        self._orders = {
            id: _orders(id, by_policy.get(id, {}), size_bytes, row.used_bytes // max(1, row.files))
            for id, (row, size_bytes) in over.items()
            if size_bytes > 0
        }
        self.table = _table(rows)

    def over(self, node: str) -> list[Order]:
        """What this node is to give up now: its share of what policies are over their quotas."""
        orders = []
        for policy, shares in self._orders.items():
            row = policies.read(self._reader, policy) if node in shares else None
            # Asked of the rows as they are now: what was given up since the tick is not asked for again.
            if row is not None and (over := self._over_bytes(Policy(policy, row))) > 0:
                orders.append(shares[node]._replace(bytes=min(over, shares[node].bytes)))
        return orders

    def _due_bytes(self, policy: Policy, held: Mapping[str, Held]) -> int:
        """What is to go now. Not for blocks that are too new for their workers to know what they count for: they will
        be the first to go when they do, and hot ones are not to go in their place.
        """
        too_new = policy.row.used_bytes - self.hidden.get(policy.id, 0) - sum(each.bytes for each in held.values())
        return self._over_bytes(policy) - max(0, too_new)

    def _over_bytes(self, policy: Policy) -> int:
        id, row = policy
        if not row.quota_bytes:
            return 0
        refused = max(refused[id] for refused in self._refused)
        growth = min(self._growth.get(id, 0), round(row.quota_bytes * HEADROOM_SHARE))
        headroom = max(growth, refused if refused <= row.quota_bytes else 0)
        return row.used_bytes - self.hidden.get(id, 0) - (row.quota_bytes - headroom)


def _orders(policy: int, held: Mapping[str, Held], size_bytes: int, block_bytes: int) -> dict[str, Order]:
    """By node. What a worker told may be a second old, and its cold blocks may have gone meanwhile: then it gives
    nothing, rather than hot ones, and the next tick knows better. Where all are hot the limit rises with the coldest.
    """
    shares = _shares(held, size_bytes, block_bytes)
    limit = 2 * max((LEAST_HEAT + held[node].coldest for node in shares), default=0.0)
    return {node: Order(policy, share, limit) for node, share in shares.items()}


def _shares(held: Mapping[str, Held], size_bytes: int, block_bytes: int) -> dict[str, int]:
    """Node → bytes it is to give up, in blocks of the usual size: none gives a hot block for a fraction of one, while
    others have cold ones. Who holds more gives more, and who has colder ones much more.
    """
    weights = {node: each.bytes / (LEAST_HEAT + each.coldest) for node, each in held.items() if each.coldest >= 0}
    total = sum(weights.values())
    if not total:
        return {}
    blocks = math.ceil(size_bytes / max(1, block_bytes))
    exact = {node: blocks * weight / total for node, weight in weights.items()}
    shares = {node: math.floor(share) for node, share in exact.items()}
    by_remainder = sorted(exact, key=lambda node: (shares[node] - exact[node], node))
    for node in by_remainder[: blocks - sum(shares.values())]:
        shares[node] += 1
    return {node: share * block_bytes for node, share in shares.items() if share}


def _with_those_below(parents: Mapping[int, int], held: Mapping[str, Mapping[int, Held]]) -> dict[int, dict[str, Held]]:
    """Policy → node → what counts for it and for those below it."""
    found: dict[int, dict[str, Held]] = {}
    for node, own in held.items():
        for policy, more in own.items():
            while policy in parents:
                nodes = found.setdefault(policy, {})
                nodes[node] = _together(nodes[node], more) if node in nodes else more
                policy = parents[policy]
    return found


def _together(one: Held, other: Held) -> Held:
    colder = [each.coldest for each in (one, other) if each.coldest >= 0]
    return Held(one.bytes + other.bytes, min(colder, default=-1.0))


def _table(rows: Iterable[Policy]) -> Table:
    rules = [Rule(id, row.parent, row.ttl_s, row.pinned) for id, row in rows]
    return Table(xxhash.xxh3_64_intdigest(repr(rules).encode()) or 1, rules) if rules else Table(0)
