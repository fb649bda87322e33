"""What a worker tells of itself, in heartbeats and to Prometheus.

Called in the heart's thread too: reads numbers, changes nothing.
"""

from __future__ import annotations

from kvstore.core.types import TIERS
from kvstore.pb import common_pb2 as pb
from kvstore.pb import master_pb2 as m
from kvstore.worker.blocks.store import Store


def volumes(store: Store) -> list[pb.Volume]:
    """Those in service."""
    return [
        pb.Volume(
            id=v.id, tier=v.tier, capacity_bytes=v.books.capacity, used_bytes=v.books.used, free_bytes=v.books.free
        )
        for v in store.in_service
    ]


def tiers(store: Store) -> list[m.TierCounters]:
    """Of the tiers that have a volume here, in service or not."""
    here, pins = {volume.tier for volume in store.volumes}, store.labels.pins
    return [
        store.counters.tiers[tier].to_pb(
            tier,
            blocks=sum(store.count(v) for v in store.volumes if v.tier == tier),
            pinned_bytes=pins.pinned_bytes(tier),
            unpinned_bytes=pins.unpinned_bytes(tier),
        )
        for tier in TIERS
        if tier in here
    ]
