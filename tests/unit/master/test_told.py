"""What workers count goes through the master as they told it, and nonsense in it harms nobody."""

from __future__ import annotations

import pytest

from kvstore.client.messages import cluster_map
from kvstore.core.told import TierCounters, Unlinked
from kvstore.master import convert
from kvstore.master.workers.nodes import Node
from kvstore.pb import common_pb2 as c
from kvstore.pb import master_pb2 as m
from tests.unit.master.world import running

TOP = 2**64 - 1
NO_REASONS = ("", "\x1b[2J", "a" * 17)
WHOLE = m.TierCounters(
    tier="ssd", blocks=1, hits=2, promotions=3, promoted_bytes=4, demotions=5, demoted_bytes=6, pinned_bytes=7,
    unpinned_bytes=8, unlinked=[m.Unlinked(reason="capacity", files=9, bytes=10), m.Unlinked(reason="ttl", files=TOP)],
)  # fmt: skip


def heartbeat(*tiers: m.TierCounters) -> m.HeartbeatRequest:
    volume = c.Volume(id=1, tier="ssd", capacity_bytes=1, free_bytes=1)
    return m.HeartbeatRequest(node="n1", boot=7, volumes=[volume], tiers=tiers)


def shown(node: Node) -> tuple[TierCounters, ...]:
    """As a client gets it, over the wire."""
    reply = m.ClusterMapReply(nodes=[convert.node(node, True, 0.0)])
    return cluster_map(m.ClusterMapReply.FromString(reply.SerializeToString())).nodes[0].tiers


async def test_counters_of_tiers_come_out_as_they_went_in() -> None:
    async with running() as world:
        node = await world.join(1)
        assert shown(node) == ()
        await world.master.heartbeat(convert.beat(heartbeat(WHOLE, m.TierCounters(tier="hdd"))))
        assert shown(node) == (
            TierCounters("ssd", 1, 2, 3, 4, 5, 6, 7, 8, (Unlinked("capacity", 9, 10), Unlinked("ttl", TOP, 0))),
            TierCounters("hdd"),
        )
        await world.master.heartbeat(convert.beat(heartbeat()))
        assert shown(node) == ()


@pytest.mark.parametrize(
    ("nonsense", "left"),
    [
        (m.TierCounters(tier="floppy", hits=1), ()),
        (m.TierCounters(hits=1), ()),
        (m.TierCounters(tier="ssd", hits=TOP, blocks=TOP), (TierCounters("ssd", TOP, TOP),)),
        (m.TierCounters(tier="ssd", unlinked=[m.Unlinked(reason=r) for r in NO_REASONS]), (TierCounters("ssd"),)),
    ],
)  # fmt: skip
async def test_nonsense_is_left_out_and_the_heartbeat_counts(
    nonsense: m.TierCounters, left: tuple[TierCounters, ...]
) -> None:
    async with running() as world:
        node = await world.join(1)
        orders = await world.master.heartbeat(convert.beat(heartbeat(nonsense)))
        assert not orders.register
        assert node.heard_s is not None
        assert shown(node) == left


async def test_what_is_kept_is_bounded() -> None:
    many = [m.Unlinked(reason=a + b, files=1) for a in "abcdefgh" for b in "abcdefgh"]
    twice = m.TierCounters(tier="ssd", unlinked=[*many, *many])
    beat = convert.beat(heartbeat(*[twice] * 1000))
    (tier,) = beat.tiers
    assert len(tier.unlinked) == convert.MAX_REASONS
