"""From maps of a cluster to what happens a second, per node and tier. Pure.

A map holds counters as the last heartbeat of each worker told them, so a rate is what came between two heartbeats over
the time between those two, not over the time between two maps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from kvstore.client.messages import ClusterMap, Node
from kvstore.core.told import TierCounters
from kvstore.core.types import TIERS

MIN_ELAPSED_S: Final = 0.1
"""Two maps that tell the time of one heartbeat a little differently do not make two of it."""
UNLINKED: Final = "unlinked:"
Key = tuple[str, str]
"""(tier, name); tier "" for what is not told by tier."""
Figures = Mapping[Key, int]
"""What was counted since the worker's start."""


class Tier(NamedTuple):
    """Of one node: its volumes in service of one tier, and what is counted there."""

    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    counters: TierCounters


class TierRates(NamedTuple):
    hits_s: float
    hit_ratio: float | None
    """Of all reads on its node those that found the block in this tier; None when there were none."""
    promotions_s: float
    """Moves into it from a slower one."""
    demotions_s: float
    """Moves into it from a faster one."""
    unlinked_s: dict[str, float]
    """By reason, only those that occurred."""


class NodeRates(NamedTuple):
    """All a second, from one heartbeat to a later one."""

    hits_s: float
    fetches_s: float
    misses_s: float
    hit_ratio: float | None
    """Of all reads those that found the block on this node; None when there were none."""
    read_bytes_s: float
    written_bytes_s: float
    tiers: dict[str, TierRates]
    """Of the tiers of which its worker told."""


class LookupRates(NamedTuple):
    """Of the master: names looked up."""

    lookups_s: float
    hit_ratio: float | None
    """Of the names looked up those that were there; None when nobody asked."""


class _Heard(NamedTuple):
    at_s: float
    figures: Figures


class Rates:
    """Takes one map after the other."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._nodes: dict[str, NodeRates] = {}
        self._asked: _Heard | None = None
        self.lookups: LookupRates | None = None
        """None before the second map."""

    def add(self, cluster: ClusterMap, now_s: float) -> None:
        """`now_s`: when the map came, on a clock that does not jump."""
        self._add_lookups(cluster, now_s)
        live = {node.id: node for node in cluster.nodes if node.live and node.heartbeat_age_s >= 0}
        self._heard = {id: heard for id, heard in self._heard.items() if id in live}
        self._nodes = {id: rates for id, rates in self._nodes.items() if id in live}
        for node in live.values():
            self._add_node(node, now_s - node.heartbeat_age_s)

    def of(self, node: Node) -> NodeRates | None:
        """None before the second heartbeat that was seen of it, and for a node that is not live."""
        return self._nodes.get(node.id)

    def _add_node(self, node: Node, heard_s: float) -> None:
        before, now = self._heard.get(node.id), _Heard(heard_s, figures(node))
        if before is not None and now.at_s - before.at_s < MIN_ELAPSED_S:
            return  # the same heartbeat: what it told is shown once more
        self._heard[node.id] = now
        if before is not None:
            self._nodes[node.id] = _node_rates(node, per_second(before.figures, now.figures, now.at_s - before.at_s))

    def _add_lookups(self, cluster: ClusterMap, now_s: float) -> None:
        now = _Heard(now_s, {("", "found"): cluster.lookups_found, ("", "not_found"): cluster.lookups_not_found})
        before, self._asked = self._asked, now
        if before is not None and now.at_s > before.at_s:
            rate = per_second(before.figures, now.figures, now.at_s - before.at_s)
            asked = sum(rate.values())
            self.lookups = LookupRates(asked, share(rate["", "found"], asked))


def tiers(node: Node) -> list[Tier]:
    """Of a node, the fastest first; also those of which its worker told no counters yet."""
    told = {tier.tier: tier for tier in node.tiers}
    names = {volume.tier for volume in node.volumes} | told.keys()
    return [_tier(node, told.get(name, TierCounters(name))) for name in sorted(names, key=_place)]


def _place(tier: str) -> int:
    """A tier of a newer worker comes last."""
    return TIERS.index(tier) if tier in TIERS else len(TIERS)


def _tier(node: Node, counters: TierCounters) -> Tier:
    volumes = [volume for volume in node.volumes if volume.tier == counters.tier]
    return Tier(
        sum(volume.capacity_bytes for volume in volumes),
        sum(volume.used_bytes for volume in volumes),
        sum(volume.free_bytes for volume in volumes),
        counters,
    )


def figures(node: Node) -> Figures:
    """All that a node counts."""
    found = {("", name): number for name, number in node.counters._asdict().items()}
    for tier in node.tiers:
        found |= {(tier.tier, name): getattr(tier, name) for name in ("hits", "promotions", "demotions")}
        found |= {(tier.tier, UNLINKED + unlinked.reason): unlinked.files for unlinked in tier.unlinked}
    return found


def per_second(before: Figures, after: Figures, elapsed_s: float) -> dict[Key, float]:
    """A worker that started anew counts from zero: what it told before is over."""
    if any(after.get(key, 0) < number for key, number in before.items()):
        before = {}
    return {key: (number - before.get(key, 0)) / elapsed_s for key, number in after.items()}


def share(part: float, whole: float) -> float | None:
    """None of nothing."""
    return part / whole if whole else None


def _node_rates(node: Node, rate: Mapping[Key, float]) -> NodeRates:
    hits_s, fetches_s, misses_s = rate["", "hits"], rate["", "fetches"], rate["", "misses"]
    reads_s = hits_s + fetches_s + misses_s
    return NodeRates(
        hits_s,
        fetches_s,
        misses_s,
        share(hits_s, reads_s),
        rate["", "read_bytes"],
        rate["", "written_bytes"],
        {tier.tier: _tier_rates(tier, rate, reads_s) for tier in node.tiers},
    )


def _tier_rates(tier: TierCounters, rate: Mapping[Key, float], reads_s: float) -> TierRates:
    name = tier.tier
    unlinked = {u.reason: rate[name, UNLINKED + u.reason] for u in tier.unlinked}
    return TierRates(
        rate[name, "hits"],
        share(rate[name, "hits"], reads_s),
        rate[name, "promotions"],
        rate[name, "demotions"],
        {reason: files_s for reason, files_s in unlinked.items() if files_s},
    )
