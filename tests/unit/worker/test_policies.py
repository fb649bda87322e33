"""Quota, TTL and pin on a whole worker."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from kvstore.core.errors import InvalidRequest
from kvstore.core.types import Address, BlockId
from kvstore.pb import master_pb2 as m
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.entries import address_to_pb
from kvstore.rpc.link import AsyncLink
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import WORKER_DESCRIBE
from kvstore.worker.blocks import heatfile
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.settings import Settings, VolumeSettings, Watermarks
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.fake_master import FakeMaster, make, running
from tests.support.worker_kit import KIB, MIB

MODELS, OLD, KEPT = 1, 2, 3
"""Three policies; the last two lie below the first."""
SESSIONS = itertools.count(1)
HOT = 1e6
"""Touches: hotter than any block."""


def rules(version: int = 1, *, ttl_s: float = 0.0, old_ttl_s: float = 0.0, pinned: bool = False) -> m.PolicyTable:
    """`pinned`: the third is."""
    return m.PolicyTable(
        version=version,
        rules=[
            m.PolicyRule(id=MODELS, ttl_s=ttl_s),
            m.PolicyRule(id=OLD, parent=MODELS, ttl_s=old_ttl_s),
            m.PolicyRule(id=KEPT, parent=MODELS, pinned=pinned),
        ],
    )


def settings(root: Path, *, master: str = kit.NOBODY, capacity: int = 64 * MIB) -> Settings:
    return kit.settings(root, master=master, capacity=capacity)._replace(session_grace_s=60.0)


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    """Without a master: the test says what it would."""
    async with kit.running(settings(tmp_path)) as worker:
        worker.policies.take_table(rules())
        yield worker
        await kit.check_books(worker)


@pytest.fixture
async def master() -> AsyncIterator[FakeMaster]:
    fake = make()
    async with running(fake):
        yield fake


async def put(worker: Worker, policy: int, size: int = 4 * KIB, count: int = 1) -> list[Block]:
    """Owned blocks with a label, each of a session of its own: they are no burst, and the first is the coldest."""
    blocks = [await kit.put(worker, os.urandom(size), next(SESSIONS)) for _ in range(count)]
    for block in blocks:
        worker.policies.label(block, policy)
    return blocks


def is_here(worker: Worker, block: Block) -> bool:
    return worker.store.get(block.id) is block


def here(worker: Worker, blocks: Sequence[Block]) -> list[bool]:
    return [is_here(worker, block) for block in blocks]


def unlinked(worker: Worker, reason: Reason) -> int:
    return sum(tier.unlinked[reason].files for tier in worker.counters.tiers.values())


async def use(worker: Worker, block: Block) -> None:
    os.close((await worker.opener.open(block.address, (), 5.0)).fd)


class Ahead:
    """Moves a worker's clock on."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_s = 0.0
        monkeypatch.setattr(worker.runtime, "monotonic_s", lambda: time.monotonic() + self._ahead_s)

    def by(self, seconds: float) -> None:
        self._ahead_s += seconds


async def reduced(worker: Worker, *over: tuple[int, int], heat: float = HOT) -> None:
    """One round of what a heartbeat's reply says."""
    worker.policies.tell(m.HeartbeatRequest())
    worker.policies.reduce([m.PolicyBytes(policy=policy, bytes=count, heat=heat) for policy, count in over])
    await worker.background.run(settled(worker))


async def settled(worker: Worker) -> None:
    await kit.until(lambda: not worker.policies._is_reducing)


async def expired(worker: Worker) -> None:
    worker.policies.upkeep(expire=True)
    await kit.until(lambda: not worker.policies._is_expiring)


# ---- TTL


async def test_what_nobody_uses_for_its_ttl_goes(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ahead(worker, monkeypatch)
    worker.policies.take_table(rules(2, ttl_s=100, old_ttl_s=10))
    [new], [old], [free] = [await put(worker, policy) for policy in (MODELS, OLD, 0)]
    await expired(worker)
    assert here(worker, [new, old, free]) == [True, True, True]
    clock.by(11)
    await expired(worker)
    assert here(worker, [new, old, free]) == [True, False, True]
    assert not os.path.exists(old.path)
    clock.by(100)
    await expired(worker)
    assert here(worker, [new, old, free]) == [False, False, True]
    assert unlinked(worker, Reason.TTL) == 2


async def test_opens_and_touches_renew_a_ttl_and_questions_do_not(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ahead(worker, monkeypatch)
    worker.policies.take_table(rules(2, ttl_s=10))
    opened, touched, asked = await put(worker, MODELS, count=3)
    for _ in range(3):
        clock.by(6)
        await use(worker, opened)
        worker.store.touch(touched, 1)
        worker.policies.describe([asked.address])
        await expired(worker)
    assert here(worker, [opened, touched, asked]) == [True, True, False]


async def test_a_ttl_that_comes_later_counts_from_the_last_use_and_one_that_goes_spares(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ahead(worker, monkeypatch)
    [block] = await put(worker, MODELS)
    clock.by(50)
    worker.policies.take_table(rules(2, ttl_s=100))
    await expired(worker)
    worker.policies.take_table(rules(3))
    clock.by(100)
    await expired(worker)
    assert is_here(worker, block)
    worker.policies.take_table(rules(4, ttl_s=100))
    await kit.until(lambda: worker.store.labels.due(worker.runtime.monotonic_s(), lambda block: True, 1).blocks)
    await expired(worker)
    assert not is_here(worker, block)


async def test_a_block_that_is_held_expires_and_its_reader_reads_on(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ahead(worker, monkeypatch)
    worker.policies.take_table(rules(2, ttl_s=10))
    data = os.urandom(MIB)
    block = await kit.put(worker, data)
    worker.policies.label(block, MODELS)
    fd = (await worker.opener.open(block.address, (), 5.0)).fd
    clock.by(11)
    await expired(worker)
    assert not is_here(worker, block)
    assert os.pread(fd, MIB, 0) == data
    os.close(fd)


async def test_many_go_in_bounded_rounds_without_waiting_for_the_next_second(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ahead(worker, monkeypatch)
    worker.policies.take_table(rules(2, ttl_s=10))
    blocks = await put(worker, MODELS, 1, count=600)
    rounds: list[int] = []
    evict = worker.evictor.evict

    async def watched(blocks: Sequence[Block], reason: Reason) -> int:
        rounds.append(len(blocks))
        return await evict(blocks, reason)

    monkeypatch.setattr(worker.evictor, "evict", watched)
    clock.by(11)
    await expired(worker)
    assert not any(here(worker, blocks))
    assert [size for size in rounds if size] == [256, 256, 88]


async def test_what_is_pinned_does_not_expire(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ahead(worker, monkeypatch)
    worker.policies.take_table(rules(2, ttl_s=10, pinned=True))
    [kept] = await put(worker, KEPT)
    clock.by(1000)
    await expired(worker)
    assert is_here(worker, kept)
    worker.policies.take_table(rules(3, ttl_s=10))
    await kit.until(lambda: not kept.pinned)
    await expired(worker)
    assert not is_here(worker, kept)


async def test_the_time_since_the_last_use_outlives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the wall clock: the time without a worker does not count."""
    async with kit.running(settings(tmp_path)) as worker:
        clock = Ahead(worker, monkeypatch)
        old = (await put(worker, MODELS))[0].address
        clock.by(500)
        new = (await put(worker, MODELS))[0].address
        clock.by(60)
    async with kit.running(settings(tmp_path)) as worker:
        idle = [info.idle_s for info in worker.policies.describe([old, new])]
        assert 560 <= idle[0] < 590
        assert 60 <= idle[1] < 90
        worker.policies.take_table(rules(2, ttl_s=300))
        for address in (old, new):
            block = worker.store.find(address)
            assert block is not None
            worker.store.own(block)
            worker.policies.label(block, MODELS)
        await expired(worker)
        assert [worker.store.find(address) is not None for address in (old, new)] == [False, True]


def test_a_snapshot_without_idle_times_can_be_read() -> None:
    block, score = BlockId(3, 4), -2.5
    packed = heatfile._BLOCK_1.pack(*block, score, True)
    ghosts = heatfile._GHOST.pack(10, 11, -1.0, False)
    data = b"\x01" + msgspec.msgpack.encode(heatfile._File(packed, ghosts, 0.5))
    remembered = heatfile.decode(data)
    assert dict(remembered.blocks) == {block: ((score, True), 0.0)}
    assert heatfile.decode(heatfile.encode(remembered)) == remembered
    with pytest.raises(ValueError, match="version"):
        heatfile.decode(b"\x03" + data[1:])


# ---- pin


async def test_pinned_blocks_are_not_evicted_and_take_a_share_at_most(tmp_path: Path) -> None:
    async with kit.running(settings(tmp_path, capacity=8 * MIB)) as worker:
        worker.policies.take_table(rules(pinned=True))
        kept = await put(worker, KEPT, MIB, count=6)
        assert [b.pinned for b in kept] == [True] * 4 + [False] * 2
        [tier] = worker.master_sync.beat().tiers
        assert (tier.pinned_bytes, tier.unpinned_bytes) == (4 * MIB, 2 * MIB)
        for _ in range(12):
            await put(worker, 0, MIB)
        assert here(worker, kept) == [True] * 4 + [False] * 2, "the pins beyond the share had no effect"
        worker.policies.take_table(rules(2))
        await kit.until(lambda: not any(b.pinned for b in kept))
        for _ in range(12):
            await put(worker, 0, MIB)
        assert not any(here(worker, kept)), "they are victims like any others again"
        await kit.check_books(worker)


async def test_any_number_of_cold_pins_stands_in_no_victims_way(tmp_path: Path) -> None:
    """The mover looks at the 256 coldest blocks."""
    volume = VolumeSettings("ssd", str(tmp_path / "ssd"), 8 * MIB, 0, Watermarks(0.9, 0.5))
    async with kit.running(settings(tmp_path)._replace(volumes=[volume])) as worker:
        worker.policies.take_table(rules(pinned=True))
        kept = await put(worker, KEPT, count=400)
        others = await put(worker, 0, MIB, count=6)
        assert all(b.pinned for b in kept)
        await kit.until(lambda: worker.store.volumes[0].books.used <= 4 * MIB)
        assert all(here(worker, kept))
        assert here(worker, others)[0] is False


async def test_a_pin_that_waits_takes_hold_when_there_is_room(tmp_path: Path) -> None:
    async with kit.running(settings(tmp_path, capacity=8 * MIB)) as worker:
        worker.policies.take_table(rules(pinned=True))
        kept = await put(worker, KEPT, MIB, count=6)
        await worker.evictor.drop([kept[1]])
        await kit.until(lambda: [b.pinned for b in kept] == [True, False, True, True, True, False])
        worker.policies.label(kept[0], OLD)
        await kit.until(lambda: [b.pinned for b in kept] == [False, False, True, True, True, True])
        worker.policies.take_table(rules(2))
        await kit.until(lambda: not any(b.pinned for b in kept))


async def test_a_move_takes_the_pin_to_the_share_of_the_other_volume(tmp_path: Path) -> None:
    marks = Watermarks(1.0, 1.0)
    volumes = [VolumeSettings(tier, str(tmp_path / tier), 8 * MIB, 0, marks) for tier in ("mem", "ssd")]
    async with kit.running(settings(tmp_path)._replace(volumes=volumes)) as worker:
        worker.policies.take_table(rules(pinned=True))
        kept = await put(worker, KEPT, MIB, count=5)
        used_s = [b.used_s for b in kept]
        for block in kept[:2]:
            await use(worker, block)
            block.used_s = used_s[kept.index(block)]
        await worker.mover.step()
        assert [b.volume.tier for b in kept] == ["mem"] * 2 + ["ssd"] * 3
        assert [b.used_s for b in kept] == used_s, "a move is no use"
        worker.policies.upkeep(expire=True)
        tiers = {tier.tier: (tier.pinned_bytes, tier.unpinned_bytes) for tier in worker.master_sync.beat().tiers}
        assert tiers == {"mem": (2 * MIB, 0), "ssd": (3 * MIB, 0)}
        assert all(b.pinned for b in kept)


async def test_labels_without_rules_count_as_pinned_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kit.running(settings(tmp_path, capacity=2 * MIB)) as worker:
        clock = Ahead(worker, monkeypatch)
        blocks = await put(worker, MODELS, MIB, count=2)
        assert all(b.pinned for b in blocks), "whatever their share"
        worker.policies.upkeep(expire=True)
        assert all(b.pinned for b in blocks)
        clock.by(11)
        worker.policies.upkeep(expire=True)
        await kit.until(lambda: not any(b.pinned for b in blocks))


async def test_a_restart_loses_no_pin(master: FakeMaster, tmp_path: Path) -> None:
    """The rules come after the verdicts."""
    master.table = rules(7, pinned=True)
    mine = settings(tmp_path, master=master.endpoint)
    async with kit.running(mine, joined=True) as worker:
        [kept], [other] = [await put(worker, policy) for policy in (KEPT, OLD)]
        master.policies = {kept.id: KEPT, other.id: OLD}
        for block in (kept, other):
            master.publish(block.address)
        await master.until(lambda: any(beat.policies_version == 7 for beat in master.beats.values()))
    master.table = None
    async with kit.running(mine, joined=True) as worker:
        await kit.until(lambda: all(block.owned for block in worker.store.all()))
        found = [worker.store.find(block.address) for block in (kept, other)]
        assert [block is not None and block.pinned for block in found] == [True, True]
        master.table = rules(7, pinned=True)
        await kit.until(lambda: [block is not None and block.pinned for block in found] == [True, False])


# ---- quota


async def test_over_its_quota_a_directory_gives_up_its_coldest(worker: Worker) -> None:
    blocks = await put(worker, OLD, count=6)
    [other] = await put(worker, MODELS)
    for block in (blocks[0], blocks[3]):
        await use(worker, block)
    await reduced(worker, (OLD, 10 * KIB))
    assert here(worker, blocks) == [True, False, False, True, False, True]
    assert is_here(worker, other)
    assert unlinked(worker, Reason.QUOTA) == 3
    assert worker.store.labels.bytes == {OLD: 12 * KIB, MODELS: 4 * KIB}


async def test_what_is_hotter_than_the_order_says_stays(worker: Worker) -> None:
    """The master's numbers are from before: others may have colder ones by now."""
    blocks = await put(worker, OLD, count=3)
    for _ in range(4):
        await use(worker, blocks[1])
    beat = m.HeartbeatRequest()
    worker.policies.tell(beat)
    [told] = beat.policy_bytes
    assert (told.policy, told.bytes) == (OLD, 12 * KIB)
    assert 0.5 < told.heat <= 1, "of the coldest"
    await reduced(worker, (OLD, 12 * KIB), heat=2 * told.heat)
    assert here(worker, blocks) == [False, True, False]
    worker.policies.tell(beat)
    assert beat.policy_bytes[-1].heat > 4


async def test_a_quota_is_for_all_that_is_below(worker: Worker) -> None:
    [own], [old], [kept] = [await put(worker, policy) for policy in (MODELS, OLD, KEPT)]
    await use(worker, own)
    await reduced(worker, (MODELS, 8 * KIB))
    assert here(worker, [own, old, kept]) == [True, False, False]


async def test_what_goes_below_counts_above(worker: Worker) -> None:
    own = await put(worker, MODELS, count=3)
    old = await put(worker, OLD, count=3)
    for block in old:
        await use(worker, block)
    await reduced(worker, (MODELS, 12 * KIB), (OLD, 8 * KIB))
    assert here(worker, own) == [False, True, True]
    assert sum(here(worker, old)) == 1


async def test_pinned_shielded_and_moving_blocks_are_spared(worker: Worker) -> None:
    worker.policies.take_table(rules(2, pinned=True))
    pinned, shielded, moving, fair = [(await put(worker, policy))[0] for policy in (KEPT, OLD, OLD, OLD)]
    shielded.shielded_until_s = worker.runtime.monotonic_s() + 60
    moving.moving = True
    await reduced(worker, (MODELS, 1 << 60))
    assert here(worker, [pinned, shielded, moving, fair]) == [True, True, True, False]
    moving.moving = False


async def test_blocks_that_nobody_holds_go_first(worker: Worker) -> None:
    held, free = await put(worker, OLD, count=2)
    await use(worker, free)
    fd = (await worker.opener.open(held.address, (), 5.0)).fd
    await use(worker, free)
    await reduced(worker, (OLD, 4 * KIB))
    os.close(fd)
    assert here(worker, [held, free]) == [True, False]


async def test_one_round_at_a_time_of_a_bounded_size(worker: Worker) -> None:
    blocks = await put(worker, OLD, 1, count=300)
    over = [m.PolicyBytes(policy=OLD, bytes=290, heat=HOT)]
    asked_before = m.HeartbeatRequest()
    worker.policies.tell(asked_before)
    worker.policies.reduce(over)
    worker.policies.reduce(over)
    await settled(worker)
    assert sum(here(worker, blocks)) == 44, "the second one came while the first was running"
    worker.policies.reduce(over)
    assert not worker.policies._is_reducing, "it answers a heartbeat from before the round"
    await reduced(worker, (OLD, 34))
    assert sum(here(worker, blocks)) == 10


async def test_nonsense_from_the_master_hurts_nobody(worker: Worker) -> None:
    loop = m.PolicyTable(version=9, rules=[m.PolicyRule(id=1, parent=2), m.PolicyRule(id=2, parent=1, ttl_s=-5)])
    worker.policies.take_table(loop)
    [block] = await put(worker, 1)
    await reduced(worker, (0, 1 << 63), (77, 5), (2, 0))
    await expired(worker)
    assert is_here(worker, block)


async def test_with_a_master_that_lost_state_nothing_goes_for_its_policies(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ahead(worker, monkeypatch)
    worker.policies.take_table(rules(2, ttl_s=10))
    [block] = await put(worker, MODELS)
    clock.by(100)
    worker.policies.upkeep(expire=False)
    worker.policies.on_beat(m.HeartbeatReply(over=[m.PolicyBytes(policy=MODELS, bytes=1, heat=HOT)]), collects=False)
    assert not worker.policies._is_expiring
    assert not worker.policies._is_reducing
    assert is_here(worker, block)


# ---- with a master


async def test_labels_rules_and_quotas_come_by_reports_and_heartbeats(master: FakeMaster, tmp_path: Path) -> None:
    master.table = rules(5)
    async with kit.running(settings(tmp_path, master=master.endpoint), joined=True) as worker:
        blocks = [await kit.put(worker, os.urandom(4 * KIB), owned=False) for _ in range(4)]
        for block in blocks:
            master.policies[block.id] = OLD
            master.publish(block.address)

        def told(policy: int, size_bytes: int) -> bool:
            beat = master.beats.get("a")
            return beat is not None and [(p.policy, p.bytes) for p in beat.policy_bytes] == [(policy, size_bytes)]

        await master.until(lambda: told(OLD, 16 * KIB) and master.beats["a"].policies_version == 5)
        for block in blocks:
            master.policies[block.id] = MODELS
        master.commands.append(m.Command(full_report=m.FullReport()))
        await master.until(lambda: told(MODELS, 16 * KIB))
        master.over = [m.PolicyBytes(policy=MODELS, bytes=4 * KIB, heat=HOT)]
        await master.until(lambda: told(MODELS, 12 * KIB))
        master.over = []
        await master.until(lambda: sum(block.id in master.replicas for block in blocks) == 3)


async def test_a_reply_without_policies_says_that_there_are_none(master: FakeMaster, tmp_path: Path) -> None:
    async with kit.running(settings(tmp_path, master=master.endpoint), joined=True) as worker:
        [block] = await put(worker, OLD)
        master.publish(block.address)
        worker.store.on_change(block.id)
        await kit.until(lambda: block.policy == 0)
        assert worker.store.labels.bytes == {}


async def test_blocks_are_described_over_the_network(worker: Worker) -> None:
    worker.policies.take_table(rules(2, old_ttl_s=100, pinned=True))
    [old], [kept] = [await put(worker, policy) for policy in (OLD, KEPT)]
    other = Address(old.id, 1, 1)
    link = AsyncLink(worker.endpoint, Caller(9, "a", ""))
    try:
        request = w.DescribeRequest(addresses=[address_to_pb(a) for a in (old.address, kept.address, other)])
        reply = await link.call(WORKER_DESCRIBE, request, 10.0)
        many = w.DescribeRequest(addresses=[address_to_pb(other)] * 5000)
        with pytest.raises(InvalidRequest, match="5000"):
            await link.call(WORKER_DESCRIBE, many, 10.0)
    finally:
        await link.close()
    first, second, third = reply.blocks
    assert (first.here, first.tier, first.pinned, first.heat > 0) == (True, "ssd", False, True)
    assert 0 <= first.idle_s < 60
    assert first.expires_s == pytest.approx(100 - first.idle_s)
    assert (second.here, second.pinned, second.expires_s) == (True, True, -1)
    assert not third.here


async def test_a_block_that_the_master_forgot_has_no_policy(worker: Worker) -> None:
    [block] = await put(worker, OLD)
    worker.store.disown(block)
    await asyncio.sleep(0)
    assert (block.policy, worker.store.labels.bytes) == (0, {})
