"""Workers: registration, liveness, reports. Rules 4, 11, 12, 13, 15, 16, 17."""

from __future__ import annotations

import pytest

from kvstore.core.errors import AlreadyExists, Denied, InvalidRequest, KvError, NotFound, Stale
from kvstore.core.types import Address, Seen
from kvstore.master.master import Settings
from kvstore.master.storage.db import Cf, MemoryDb, Op
from kvstore.master.storage.records import META_FORMAT
from kvstore.master.workers import incarnations, reports, upkeep
from kvstore.master.workers.incarnations import Incarnations
from kvstore.master.workers.reports import Full, Verdict
from tests.unit.master import world
from tests.unit.master.world import GIB, World, address, running, volume

FIRST, LAST = b"\0" * 16, b"\xff" * 16


def full(volume: int, blocks: list[Address], first: bytes = FIRST, last: bytes = LAST) -> Full:
    return Full(volume, first, last, sorted(a.block.pack() for a in blocks))


# ---- registration (rule 4)


async def test_a_worker_of_another_cluster_is_denied() -> None:
    async with running() as w:
        with pytest.raises(Denied, match="belongs to cluster xyz") as caught:
            await w.join(cluster="xyz")
        assert "\n" not in caught.value.message
        await w.join(cluster=w.master.cluster_id)


async def test_whom_it_refuses_stands_in_the_notice() -> None:
    async with running() as w:
        assert w.master.notice == ""
        for i in (1, 2):
            with pytest.raises(Denied):
                await w.join(i, cluster="xyz")
        assert w.master.notice.startswith("2 workers of another cluster are refused (n1, n2)")
        assert "--rebuild" in w.master.notice
        for i in (1, 2):
            await w.join(i, cluster=w.master.cluster_id)
        assert w.master.notice == ""


async def test_ids_that_live_elsewhere_are_refused() -> None:
    async with running() as w:
        await w.join(1)
        with pytest.raises(AlreadyExists, match="node n1 lives at h1:1"):
            await w.join(1, endpoint="h9:1", boot=9)
        with pytest.raises(AlreadyExists, match=r"volume 0{15}1 lives on node n1"):
            await w.join(2, volumes=[volume(1)])
        assert w.master.nodes.cluster.live[1].endpoint == "h1:1"
        w.die()
        await w.join(1, endpoint="h9:1", boot=9)
        assert w.master.nodes.cluster.live[1].endpoint == "h9:1"


async def test_the_same_address_supersedes_at_once() -> None:
    async with running() as w:
        await w.join(1)
        await w.put("f", address(1))
        await w.join(1, boot=99)
        assert (await w.beat(1)).register, "the start before is told to register, not obeyed"
        await w.join(2, endpoint="h1:1", volumes=[volume(1)])
        assert [r.node for r in w.stat("f").replicas] == ["n2"]
        assert not w.master.nodes.live(w.master.nodes.get("n1") or pytest.fail("n1 is gone"))
        assert w.master.nodes.space() == (GIB, 0, GIB), "its volume counts once"


@pytest.mark.parametrize(
    "wrong",
    [
        {"node": ""}, {"node": "x" * 256}, {"node": "a\nb"}, {"endpoint": ""}, {"boot": 0},
        {"volumes": [volume(1), volume(1)]}, {"volumes": [volume(0)]}, {"volumes": [volume(1)._replace(tier="tape")]},
        {"volumes": [volume(i + 1) for i in range(257)]}, {"fences": dict.fromkeys(range(2000), 0)},
        {"volumes": [volume(1, 2**64 - 1)]},
    ],
)  # fmt: skip
async def test_registrations_that_cannot_be(wrong: dict[str, object]) -> None:
    async with running() as w:
        with pytest.raises(InvalidRequest):
            await w.join(**wrong)  # type: ignore[arg-type]
        assert list(w.master.nodes) == []


async def test_an_unlisted_volume_is_gone_in_one_step() -> None:
    async with running() as w:
        await w.join(1, [1, 2])
        await w.put("f", address(1), volume=2)
        await w.beat(1, [1])
        with pytest.raises(NotFound):
            w.stat("f")
        assert (await w.beat(1, [1, 2])).register, "a volume that comes back is registered"
        await w.join(1, [1, 2])
        assert w.stat("f").replicas


async def test_space_counts_live_volumes() -> None:
    async with running() as w:
        await w.join(1, [1, 3])
        await w.join(2)
        assert w.master.nodes.space() == (3 * GIB, 0, 3 * GIB)
        await w.beat(1, [1])
        assert w.master.nodes.space() == (2 * GIB, 0, 2 * GIB)


# ---- liveness (rule 17)


async def test_dead_after_n_ticks_without_a_heartbeat() -> None:
    async with running() as w:
        await w.join()
        await w.put("f", address(1))
        for _ in range(4):
            w.master.tick()
        assert w.stat("f").replicas
        w.master.tick()
        with pytest.raises(NotFound):
            w.stat("f")
        assert not (await w.beat()).register
        assert w.stat("f").replicas


async def test_a_master_that_slept_declares_nobody_dead() -> None:
    async with running() as w:
        await w.join()
        w.runtime.now_s += 3600
        w.master.tick()
        assert w.master.nodes.cluster.live


async def test_after_a_restart_known_volumes_count_as_live() -> None:
    db = MemoryDb()
    async with running(db) as w:
        await w.join(1, [1, 2])
        await w.put("f", address(1))
        await w.put("g", address(2), volume=2)
        await w.beat(1, [1])
    async with running(db) as w:
        assert w.stat("f").replicas
        with pytest.raises(NotFound):
            w.stat("g")  # that volume was out of service before
        assert (await w.put("h", address(3))).created, "its boot is still registered"
        assert not (await w.beat()).register
        for _ in range(4):
            w.master.tick()
        assert w.stat("f").replicas
        w.master.tick()
        with pytest.raises(NotFound):
            w.stat("f")


async def test_what_only_counts_as_live_after_a_restart_does_not_keep_a_newcomer_out() -> None:
    db = MemoryDb()
    async with running(db) as w:
        await w.join(1)
        await w.put("f", address(1))
    async with running(db) as w:
        await w.join(1, endpoint="h9:1", boot=9)  # the node came back with another address, and so did the master
        assert [r.endpoint for r in w.stat("f").replicas] == ["h9:1"]
        with pytest.raises(AlreadyExists, match="node n1 lives at h9:1"):
            await w.join(1, boot=10)


async def test_a_worker_that_says_farewell_is_dead_at_once() -> None:
    async with running() as w:
        await w.join(1)
        await w.put("f", address(1))
        await w.beat(1, leaving=True)
        with pytest.raises(NotFound):
            w.stat("f")
        await w.join(1, endpoint="h9:1", boot=9)
        assert [r.endpoint for r in w.stat("f").replicas] == ["h9:1"]


async def test_unknown_workers_must_register() -> None:
    async with running() as w:
        assert (await w.beat()).register
        answer = await w.report()
        assert (answer.gap, answer.orders.register) == (True, True)


# ---- reports (rule 15)


async def test_held_and_nowhere() -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2)
        await w.put("f", address(1))
        await w.report(2, held=[(address(1), 2)])
        assert {r.node for r in w.stat("f").replicas} == {"n1", "n2"}
        await w.report(1, nowhere=[address(1)])
        assert [r.node for r in w.stat("f").replicas] == ["n2"]


async def test_a_block_moves_between_the_volumes_of_a_worker() -> None:
    async with running() as w:
        await w.join(1, [1, 3])
        await w.put("f", address(1))
        await w.report(held=[(address(1), 3)])
        assert [r.volume for r in w.stat("f").replicas] == [3]
        await w.report(held=[(address(1), 1), (address(1), 3)])
        assert {r.volume for r in w.stat("f").replicas} == {1, 3}


async def test_the_entry_falls_with_the_last_replica() -> None:
    async with running() as w:
        await w.join()
        await w.put("f", address(1))
        await w.report(nowhere=[address(1)])
        assert await w.names() == []
        assert w.master.counters().files == 0
        assert (await w.master.events(0, 1))[0][0].kind == "evict"


async def test_it_does_not_fall_when_it_lists_another_block_by_now() -> None:
    async with running() as w:
        await w.join()
        await w.put("f", address(1))
        await w.put("f", address(2))
        await w.report(nowhere=[address(1)])
        assert w.stat("f").address == address(2)


async def test_two_evictions_of_the_last_two_replicas() -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2)
        await w.put("f", address(1))
        await w.report(2, held=[(address(1), 2)])
        await w.report(1, nowhere=[address(1)])
        await w.report(2, nowhere=[address(1)])
        await w.report(2, nowhere=[address(1)])  # nowhere is idempotent
        assert await w.names() == []


async def test_a_gap_is_not_taken() -> None:
    async with running() as w:
        await w.join()
        await w.put("f", address(1))
        for number in (0, 2, 3):
            answer = await w.report(nowhere=[address(1)], number=number, digest=77)
            assert (answer.gap, answer.next_report) == (True, 1)
            assert answer.orders.full_report
        assert w.stat("f").replicas


async def test_a_repeated_report_is_answered_and_not_taken_twice() -> None:
    async with running() as w:
        await w.join()
        await w.put("f", address(1))
        first = await w.report(held=[(address(1), 1)], number=1, digest=5)
        assert await w.report(held=[(address(1), 1)], number=1, digest=5) == first
        # Another content under the number: one of the two is late, and only a full report can tell.
        assert (await w.report(nowhere=[address(1)], number=1, digest=6)).gap
        assert w.stat("f").replicas


async def test_the_number_survives_a_restart() -> None:
    db = MemoryDb()
    async with running(db) as w:
        await w.join()
        await w.report(number=1)
    async with running(db) as w:
        assert (await w.report(number=1)).next_report == 2
        assert not (await w.report(number=2)).gap
        assert (await w.join()).row.next_report == 3


async def test_reports_of_volumes_that_are_not_its_own_change_nothing() -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2)
        await w.put("f", address(1))
        assert (await w.report(2, held=[(address(1), 1), (address(1), 99)])).held.verdicts == [
            Verdict.OWNED,
            Verdict.OWNED,
        ]
        await w.report(2, full=full(1, []))
        assert [r.volume for r in w.stat("f").replicas] == [1]


# ---- full reports


async def test_a_full_report_drops_what_is_missing() -> None:
    async with running() as w:
        await w.join()
        for i in range(1, 6):
            await w.put(f"{i}", address(i))
        answer = await w.report(full=full(1, [address(2), address(4)]), fence=100)
        assert answer.full.verdicts == [Verdict.OWNED, Verdict.OWNED]
        assert await w.names() == ["2", "4"]


async def test_pieces_merge_by_range() -> None:
    async with running() as w:
        await w.join()
        for i in range(1, 6):
            await w.put(f"{i}", address(i))
        await w.report(full=full(1, [], address(2).block.pack(), address(3).block.pack()), fence=100)
        assert await w.names() == ["1", "4", "5"]


async def test_a_full_report_adds_what_came_back() -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2)
        await w.put("f", address(1))
        await w.report(2, full=full(2, [address(1)]))
        assert {r.node for r in w.stat("f").replicas} == {"n1", "n2"}


async def test_what_was_published_after_the_piece_was_read_stays() -> None:
    """The piece is read, X is sealed and published, the report arrives: its own fence says that it cannot know X."""
    async with running() as w:
        await w.join()
        await w.put("old", address(1))
        await w.put("new", address(7))
        await w.report(full=full(1, []), fence=7)
        assert await w.names() == ["new"]
        await w.report(full=full(1, []), fence=8)
        assert await w.names() == []


async def test_a_wiped_volume_of_very_many_blocks_goes_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MERGE_STEP", 10)
    async with running() as w:
        await w.join()
        for i in range(35):
            await w.put(f"{i}", address(i))
        await w.report(full=full(1, [address(3)]), fence=100)
        assert await w.names() == ["3"]


@pytest.mark.parametrize(
    "piece",
    [
        full(1, [address(9)], FIRST, address(5).block.pack()),
        full(1, [address(1)], address(2).block.pack(), LAST),
        Full(1, FIRST, LAST, [bytes(16)] * 4097),
    ],
)
async def test_pieces_that_cannot_be(piece: Full) -> None:
    async with running() as w:
        await w.join()
        with pytest.raises(InvalidRequest):
            await w.report(full=piece)


# ---- dead rows (rules 11, 12)


async def test_an_unpublished_block_past_its_grace_cannot_be_published_any_more() -> None:
    async with running() as w:
        await w.join()
        answer = await w.report(held=[(address(3), 1)], dead=[address(3)], fence=2)
        assert answer.held.verdicts == [Verdict.DEAD]
        with pytest.raises(Stale):
            await w.put("f", address(3))


async def test_a_block_that_was_published_just_before_is_not_made_dead() -> None:
    async with running() as w:
        await w.join()
        await w.put("f", address(3))
        answer = await w.report(held=[(address(3), 1)], dead=[address(3)])
        assert answer.held.verdicts == [Verdict.OWNED]
        assert w.stat("f").replicas


async def test_nobody_buries_the_blocks_of_another_worker() -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2)
        await w.report(2, dead=[address(3)])
        assert (await w.put("f", address(3))).created


async def test_dead_rows_go_when_nobody_holds_them_and_the_fence_has_passed() -> None:
    async with running() as w:
        await w.join()
        await w.put("f", address(5))
        await w.remove("f")
        await w.report(held=[(address(5), 1)], fence=9)
        w.master.tick()
        assert world.keys(w.db, Cf.BLOCKS), "its worker still holds it"
        await w.put("g", address(10))
        await w.remove("g")
        await w.report(nowhere=[address(5), address(10)], fence=9)
        w.master.tick()
        assert world.keys(w.db, Cf.BLOCKS) == {address(10).block.pack()}, "the fence has not passed this one"
        with pytest.raises(Stale):
            await w.put("h", address(10))
        await w.report(fence=11)
        w.master.tick()
        assert world.keys(w.db, Cf.BLOCKS) == set()
        with pytest.raises(Stale):
            await w.put("h", address(10))


async def test_a_boot_that_is_over_stays_so() -> None:
    """An old image of a worker's disk comes back: what it had published was removed, swept and forgotten since."""
    async with running() as w:
        await w.join(fences={7: 5, 6: 0})
        await w.put("f", address(5, boot=6))
        await w.join(boot=9, fences={9: 0})
        await w.join(boot=10, fences={10: 0, 6: 5, 7: 0})
        for over in (address(8, boot=6), address(9, boot=7)):
            with pytest.raises(Stale):
                await w.put("g", over)
        await w.put("g", address(1, boot=10))


async def test_fences_only_rise_and_unlisted_boots_are_over() -> None:
    async with running() as w:
        await w.join(fences={7: 5, 6: 0})
        await w.report(fence=3)
        with pytest.raises(Stale, match="given up"):
            await w.put("f", address(4))
        with pytest.raises(Stale, match="not known"):
            await w.put("f", address(1, boot=6))
        assert (await w.put("f", address(5))).created


async def test_a_worker_cannot_move_the_fence_of_another() -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2, fences={14: 0, 7: 1000})
        assert (await w.put("f", address(5))).created


async def test_a_block_replaced_while_its_worker_was_away_is_unlinked_when_it_comes_back() -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2)
        await w.put("f", address(1))
        await w.report(2, held=[(address(1), 2)], fence=2)
        for _ in range(5):
            w.master.tick()
            await w.beat(2)
        await w.put("f", address(2, boot=14), volume=2)
        assert address(1).block.pack() in (await w.beat(2)).unlink
        await w.report(2, nowhere=[address(1)])
        assert list((await w.beat(1)).unlink) == [address(1).block.pack()]


# ---- rule 16


@pytest.mark.allow_errors("rolled back")
async def test_a_master_that_was_rolled_back_collects_nothing() -> None:
    async with running() as w:
        await w.join(sequence=1000)
        await w.put("f", address(1))
        await w.put("f", address(2))
        assert (await w.beat()).unlink == ()
        assert (await w.report(held=[(address(1), 1)])).held.verdicts == [Verdict.UNKNOWN]
        await w.join(sequence=1)
        assert (await w.beat()).unlink == (), "not even when its own sequence has passed the worker's"
        await w.join(sequence=0)
        assert list((await w.beat()).unlink) == [address(1).block.pack()], "the worker's operator has accepted it"


def copy_of(db: MemoryDb) -> MemoryDb:
    """A backup, restored."""
    copy = MemoryDb()
    for cf in Cf:
        copy.write([Op(cf, key, value) for key, value in db.scan(cf, b"", None, 1 << 40)])
    return copy


async def test_each_start_is_an_incarnation_of_its_own_and_only_the_last_ones_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(incarnations, "MAX_STARTS", 3)
    db, drawn = MemoryDb(), []
    for _ in range(5):
        async with running(db) as w:
            drawn.append(w.master.incarnations.current)
            await w.mkdir(f"{len(drawn)}")
    async with running(db) as w:
        starts = w.master.incarnations.starts
    assert len(set(drawn)) == 5
    assert [start.incarnation for start in starts[:2]] == drawn[3:]
    assert [start.sequence for start in starts] == [3, 4, 5]


def test_where_histories_part() -> None:
    starts = Incarnations([Seen(11, 0), Seen(12, 100), Seen(13, 150)])
    assert [starts.is_ahead(Seen(11, at), 200) for at in (0, 100, 101)] == [False, False, True]
    assert [starts.is_ahead(Seen(12, at), 200) for at in (150, 151)] == [False, True]
    assert [starts.is_ahead(Seen(13, at), 200) for at in (200, 201)] == [False, True]
    assert starts.is_ahead(Seen(99, 0), 200), "a start that this database does not know"


@pytest.mark.allow_errors("rolled back")
async def test_a_rolled_back_master_that_has_overtaken_what_a_worker_saw_collects_nothing() -> None:
    db = MemoryDb()
    async with running(db) as w:
        await w.put("old", None)
        backup = copy_of(db)
    async with running(db) as w:
        await w.join()
        await w.put("good", address(1))
        seen = Seen(w.master.incarnations.current, w.master.committer.durable_sequence)
    async with running(backup) as w:
        for i in range(5):
            await w.put(f"busy{i}", None)
        assert w.master.committer.durable_sequence > seen.sequence, "by its sequence alone nobody could tell"
        assert not (await w.join(sequence=seen.sequence, seen=[seen])).row.collects
        assert (await w.join(sequence=0)).row.collects, "its operator has accepted it"


@pytest.mark.allow_errors("rolled back")
async def test_an_earlier_start_of_the_same_history_is_ahead_when_its_end_was_lost() -> None:
    db = MemoryDb()
    async with running(db) as w:
        await w.put("a", None)
        backup = copy_of(db)
        await w.put("b", None)
        seen = Seen(w.master.incarnations.current, w.master.committer.durable_sequence)
    async with running(backup) as w:
        for i in range(3):
            await w.put(f"c{i}", None)
        assert not (await w.join(sequence=seen.sequence, seen=[seen])).row.collects
    async with running(db) as w:
        await w.put("d", None)
        assert (await w.join(sequence=seen.sequence, seen=[seen])).row.collects, "nothing of what it saw is missing"


@pytest.mark.allow_errors("rolled back")
async def test_one_volume_that_has_seen_another_history_is_enough() -> None:
    async with running() as w:
        mine = Seen(w.master.incarnations.current, 0)
        assert (await w.join(seen=[mine])).row.collects
        assert not (await w.join(seen=[mine, Seen(99, 0)])).row.collects
        with pytest.raises(InvalidRequest, match="histories"):
            await w.join(seen=[mine] * 257)


# ---- forgetting (rule 14)


async def age(w: World, ticks: int) -> None:
    for _ in range(ticks):
        w.master.tick()


async def test_what_is_gone_for_long_is_forgotten_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "REPLICAS_PER_STEP", 10)
    async with running(settings=Settings(forget_after_s=30.0)) as w:
        await w.join()
        for i in range(25):
            await w.put(f"{i}", address(i))
        await age(w, 29)
        assert w.master.counters().files == 25
        for left in (15, 5, 0):
            await age(w, 1)
            assert w.master.counters().files == left
        await age(w, 2)
        assert list(w.master.nodes) == []
        assert w.master.nodes.volumes == {}


async def test_the_absence_of_a_volume_is_counted_across_restarts_and_ends_with_its_return() -> None:
    db, settings = MemoryDb(), Settings(forget_after_s=60.0)
    async with running(db, settings) as w:
        await w.join()
        await w.put("f", address(1))
        await w.beat(1, [])
        await age(w, 59)
        await w.join()
        await age(w, 4)
        await w.beat()
        await age(w, 2)
    async with running(db, settings) as w:
        for _ in range(200):
            await age(w, 1)
            await w.beat()
        assert w.stat("f").replicas


async def test_another_format_is_refused() -> None:
    db = MemoryDb()
    async with running(db):
        pass
    db.write([Op(Cf.META, META_FORMAT, b"\x09")])
    with pytest.raises(KvError, match="another version"):
        World(db)


async def test_inodes_are_not_given_out_again_after_a_power_cut() -> None:
    """A reader may have seen a number whose publish the cut took back: a restart skips what could have been minted."""
    db = MemoryDb()
    async with running(db) as w:
        before = w.master.counters().next_inode
    async with running(db) as w:
        assert (await w.put("f", None)).entry.inode >= before + (1 << 20)
