"""A master that takes names back, or has an operator's word to forget them (rules 16, 22)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kvstore.core.errors import Denied, InvalidRequest, KvError, Stale, Unavailable
from kvstore.core.types import Seen
from kvstore.master.master import Settings
from kvstore.master.metrics import MasterMetrics
from kvstore.master.recovery.claims import Claim
from kvstore.master.recovery.rebuild import INODES_AT, STUCK_S, Kind, Wanted
from kvstore.master.recovery.telling import MAX_TELLING
from kvstore.master.storage.db import Cf, MemoryDb
from kvstore.master.storage.records import META_REBUILD, JournalLimits
from kvstore.master.workers.reports import Full, Verdict
from tests.unit.master.test_claims import HISTORY, claim, tree
from tests.unit.master.world import World, address, keys, running

CLUSTER = "the cluster that lost its master"
SEEN = [Seen(HISTORY, 5000)]
REBUILD = Wanted(Kind.REBUILD, workers=1)
DISCARD = Wanted(Kind.DISCARD, workers=1)
AHEAD: dict[str, Any] = {"cluster": CLUSTER, "sequence": 5000, "seen": SEEN, "minted": 100}


def finish(world: World) -> None:
    """Steps until nothing is left to do."""
    for _ in range(1000):
        if not world.master.rebuild_step():
            return
    raise AssertionError("the rebuild does not come to its end")


def is_over(world: World) -> bool:
    return world.master.rebuild is None


async def send(world: World, *page: Claim, i: int = 1, is_last: bool = True) -> bool:
    return await world.master.recover(f"n{i}", 7 * i, page, is_last)


async def refusals(world: World) -> list[type[KvError]]:
    """What clients get, of each verb."""
    calls = [
        world.put("x", None), world.mkdir("x"), world.remove("x"), world.rename("x", "y"), world.names(),
        world.policy("", pinned=True), world.master.set_attributes(0, "", 0o700, None, None, None),
    ]  # fmt: skip
    results = await asyncio.gather(*calls, return_exceptions=True)
    row = world.master.lookup(0, ["x"])[0]
    return [type(result) for result in (*results, row) if isinstance(result, KvError)]


async def test_an_empty_master_takes_the_id_of_its_workers_and_their_names() -> None:
    async with running(wanted=REBUILD) as w:
        assert w.master.cluster_id == ""
        finish(w)
        assert not is_over(w), "it waits for a worker"
        node = await w.join(**AHEAD)
        assert (w.master.cluster_id, node.row.collects) == (CLUSTER, False)
        assert (await w.beat()).send_names, "it is asked for its names"
        assert await refusals(w) == [Unavailable] * 8
        await send(w, claim("a/b", 1, 4000), is_last=False)
        finish(w)
        assert not is_over(w), "not before it has told all"
        await send(w, claim("c", 2, 4001))
        assert not (await w.beat()).send_names
        finish(w)
        assert is_over(w)
        assert tree(w) == {"a/b": 1, "c": 2}
        assert "2 files in 1 directories" in w.master.notice
        assert w.master.counters().sequence > 5000, "nothing that a worker has seen is ahead any more"
        assert w.stat("c").inode >= 1 << INODES_AT, "no mount has seen this number for other content"
        assert not await send(w, claim("d", 3)), "it is over"


@pytest.mark.allow_errors("rolled back")
async def test_workers_are_trusted_again_when_each_block_has_a_name() -> None:
    async with running(wanted=Wanted(Kind.REBUILD, workers=2)) as w:
        await w.join(1, **AHEAD)
        await w.join(2, **AHEAD)
        await send(w, claim("a", 1, 4000))
        await send(w, claim(None, 2, boot=14, volume=2), i=2)
        finish(w)
        assert "1 blocks" in w.master.notice
        assert "--discard" in w.master.notice
        assert "--rebuild" not in w.master.notice, "that has been"
        assert [(await w.beat(i)).register for i in (1, 2)] == [True, True], "they hear of it by registering"
        whole, bare = await w.join(1, **AHEAD), await w.join(2, **AHEAD)
        assert (whole.row.collects, whole.row.recovered) == (True, SEEN)
        assert (bare.row.collects, bare.row.recovered) == (False, [])
        assert (await w.beat(1)).register, "that registration was one from before the end, for all the master knows"
        assert not (await w.beat(2)).register
        ids = Full(2, b"\0" * 16, b"\xff" * 16, [address(2, 14).block.pack()])
        assert (await w.report(2, full=ids, dead=[address(2, 14)])).full.verdicts == [Verdict.UNKNOWN]
        now = w.master.counters().sequence
        later = await w.join(1, cluster=CLUSTER, sequence=now, seen=[Seen(w.master.incarnations.current, now)])
        assert not later.is_to_hear
        assert not (await w.beat(1)).register
        again = await w.join(1, **AHEAD)
        assert (again.row.collects, again.is_to_hear) == (True, True), "it was killed before its disk had heard of it"


@pytest.mark.allow_errors("rolled back")
async def test_a_worker_that_was_away_is_not_collected_from() -> None:
    async with running(wanted=REBUILD) as w:
        await w.join(1, **AHEAD)
        await send(w, claim("a", 1, 4000))
        finish(w)
        assert not (await w.join(2, **AHEAD)).row.collects


async def test_no_id_of_the_lost_history_is_published_again() -> None:
    """Rule 10: any that the worker had minted may have been published, or be dead."""
    async with running(wanted=REBUILD) as w:
        await w.join(**AHEAD, fences={7: 3, 70: 1})
        await send(w, claim("a", 5, 4000))
        finish(w)
        await w.join(**AHEAD, fences={7: 3, 70: 1})
        for old in (address(5), address(50), address(99), address(1, boot=70)):
            with pytest.raises(Stale):
                await w.put("again", old)
        await w.report(fence=3)
        with pytest.raises(Stale):
            await w.put("again", address(50))
        await w.put("new", address(100))


async def test_blocks_below_the_fence_that_nobody_names_go_when_their_worker_gives_them_up() -> None:
    async with running(wanted=DISCARD) as w:
        await w.join(**AHEAD)
        finish(w)
        await w.join(**AHEAD)
        assert (await w.report(held=[(address(5), 1)])).held.verdicts == [Verdict.UNKNOWN]
        assert (await w.report(held=[(address(5), 1)], dead=[address(5)])).held.verdicts == [Verdict.DEAD]


async def test_nothing_is_collected_and_no_name_told_while_it_runs() -> None:
    """A name of an older copy must not become a note that looks newer."""
    db = MemoryDb()
    async with running(db) as w:
        await w.join()
        await w.put("a", address(1))
        await w.put("removed", address(3))
        await w.remove("removed")
    async with running(db, wanted=REBUILD) as w:
        await w.join(**{**AHEAD, "cluster": w.master.cluster_id})
        held = [(address(i), 1) for i in (1, 2, 3)]
        answer = await w.report(held=held, dead=[address(2)], named=[address(1)])
        assert answer.held.verdicts == [Verdict.OWNED, Verdict.UNKNOWN, Verdict.UNKNOWN]
        assert not answer.names.rows
        assert not answer.orders.unlink
        assert not (await w.beat()).unlink


async def test_a_worker_that_gives_a_block_up_does_not_kill_its_name() -> None:
    """It may not know by then that this master has lost something."""
    async with running(wanted=REBUILD) as w:
        await w.join(cluster=CLUSTER, minted=100)
        await w.report(held=[(address(1), 1)], dead=[address(1)], fence=0)
        await send(w, claim("a", 1, 4000))
        finish(w)
        assert tree(w) == {"a": 1}


async def test_an_operator_may_discard() -> None:
    async with running(wanted=DISCARD) as w:
        await w.join(**AHEAD)
        assert not (await w.beat()).send_names
        assert not await send(w, claim("a", 1, 4000))
        finish(w)
        node = await w.join(**AHEAD)
        assert (w.master.cluster_id, node.row.collects, tree(w)) == (CLUSTER, True, {})


async def test_workers_of_one_cluster_only() -> None:
    async with running(wanted=REBUILD) as w:
        await w.join(1, cluster="", seen=[])
        assert w.master.cluster_id == "", "one that belongs to none decides nothing"
        await w.join(2, **AHEAD)
        with pytest.raises(Denied, match="--rebuild"):
            await w.join(3, cluster="another")
        with pytest.raises(InvalidRequest, match="range"):
            await w.join(3, cluster=CLUSTER, sequence=1 << 63)


async def test_workers_that_are_refused_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    """`--rebuild` in a directory where a new master has run: it has another id, and its workers never come."""
    db = MemoryDb()
    async with running(db) as w:
        await w.join(3)
        own = w.master.cluster_id
    async with running(db, wanted=REBUILD) as w:
        for _ in range(3):
            for i in (1, 2):
                with pytest.raises(Denied, match="move its data directory away"):
                    await w.join(i, **AHEAD)
        finish(w)
        assert f"refused: n1 (of cluster {CLUSTER}), n2 (of cluster {CLUSTER})" in w.master.notice
        said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("refused: ")]
        assert len(said) == 2, "each once"
        assert all(own in line and CLUSTER in line and "move its data directory away" in line for line in said)
        await w.join(1, cluster=own)
        finish(w)
        assert "n1 (" not in w.master.notice, "it has another directory by now"


async def test_what_it_waits_for_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstore.master.recovery.rebuild")
    async with running(wanted=Wanted(Kind.REBUILD, wait_s=30.0)) as w:
        for _ in range(10):
            w.runtime.now_s += 1
            finish(w)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 5, "every few seconds"
        assert all("0 workers here" in line and "waiting for the first worker" in line for line in said)
        await w.join(1, **AHEAD)
        await send(w)
        w.runtime.now_s += 10
        finish(w)
        assert "others are awaited for 20 s more" in caplog.messages[-1]
        assert w.master.notice == caplog.messages[-1]


@pytest.mark.allow_errors("rolled back")
async def test_an_operator_hears_of_workers_that_are_not_collected_from() -> None:
    """An older copy of the database was put back, and nobody has said yet what that means."""
    db = MemoryDb()
    async with running(db) as w:
        await w.join()
        metric = MasterMetrics(w.master).metrics.render
        assert w.master.notice == ""
        assert b"kvstore_master_nodes_not_collected 0.0" in metric()
        await w.join(2, **{**AHEAD, "cluster": w.master.cluster_id})
        assert "nothing is collected on 1 workers (n2)" in w.master.notice
        assert "--rebuild" in w.master.notice
        assert b"kvstore_master_nodes_not_collected 1.0" in metric()
        for i in range(3, 10):
            await w.join(i, **{**AHEAD, "cluster": w.master.cluster_id})
        assert "8 workers (n2, n3, n4, n5, n6 and 3 more)" in w.master.notice
    async with running(db) as w:
        assert "8 workers" in w.master.notice, "a restart forgets nothing"


async def test_without_any_cluster_it_is_a_new_one() -> None:
    async with running(wanted=REBUILD) as w:
        await w.join()
        await send(w)
        finish(w)
        assert is_over(w)
        assert len(w.master.cluster_id) == 32


async def test_without_a_number_of_workers_it_waits_until_no_new_one_comes() -> None:
    async with running(wanted=Wanted(Kind.REBUILD, wait_s=30.0)) as w:
        for i in (1, 2):
            await w.join(i, **AHEAD)
            await send(w, i=i)
            w.runtime.now_s += 29
            finish(w)
            assert not is_over(w)
        w.runtime.now_s += 1
        finish(w)
        assert is_over(w)


@pytest.mark.allow_errors("rolled back")
async def test_a_worker_that_dies_before_it_has_told_all_is_not_waited_for() -> None:
    async with running(wanted=Wanted(Kind.REBUILD, workers=2)) as w:
        await w.join(1, **AHEAD)
        await w.join(2, **AHEAD)
        await send(w, claim("a", 1, 4000))
        for _ in range(w.master.settings.dead_ticks):
            await w.beat(1)
            finish(w)
            assert not is_over(w)
            w.master.tick()
        finish(w)
        assert is_over(w)
        assert not (await w.join(2, **AHEAD)).row.collects


async def test_workers_tell_their_names_a_few_at_a_time() -> None:
    """A hundred that send at once would wait for each other longer than a call may take."""
    async with running(wanted=Wanted(Kind.REBUILD, workers=20)) as w:
        for i in range(1, 21):
            await w.join(i, **AHEAD)
        asked = [i for i in range(1, 21) if (await w.beat(i)).send_names]
        assert asked == list(range(1, MAX_TELLING + 1))
        assert await send(w, i=20), "whoever begins all the same may go on"
        assert await send(w, i=3)
        assert (await w.beat(MAX_TELLING + 1)).send_names
        assert not (await w.beat(3)).send_names


@pytest.mark.allow_errors("rolled back")
async def test_workers_that_live_and_never_tell_hold_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    async with running(wanted=Wanted(Kind.REBUILD, workers=MAX_TELLING + 2)) as w:
        every = range(1, MAX_TELLING + 3)
        for i in every:
            await w.join(i, **AHEAD)
        assert [i for i in every if (await w.beat(i)).send_names] == list(range(1, MAX_TELLING + 1))
        w.runtime.now_s += STUCK_S / 2
        await send(w, claim("a", 1, 4000), i=1, is_last=False)
        w.runtime.now_s += STUCK_S / 2
        finish(w)
        assert "asked, and silent: n2, n3, n4, n5, n6 and 2 more" in w.master.notice
        assert caplog.text.count("has sent none for 60 s") == MAX_TELLING - 1
        assert [i for i in every if (await w.beat(i)).send_names] == list(every), "the others have their turn"
        for i in (1, 2, 9, 10):
            assert await send(w, i=i), "one that was stuck may tell all the same"
        finish(w)
        assert is_over(w)
        assert tree(w) == {"a": 1}
        assert "have not told all: n3, n4, n5, n6, n7 and 1 more" in w.master.notice
        assert [(await w.join(i, **AHEAD)).row.collects for i in (1, 2, 3)] == [True, True, False]


async def test_after_a_crash_in_the_middle_it_begins_anew_at_any_start() -> None:
    db = MemoryDb()
    async with running(db, wanted=REBUILD) as w:
        await w.join(**AHEAD)
        await send(w, claim("p", 1, 10), claim("q", 2, 20), is_last=False)
    async with running(db) as w:
        assert not is_over(w)
        await w.join(**AHEAD)
        w.runtime.now_s += 60
        await send(w, claim("p", 3, 30), claim("q", 4, 15))
        finish(w)
        assert tree(w) == {"p": 3, "q": 2}, "what the first try had found is judged by its sequence, too"
        assert db.get(Cf.META, META_REBUILD) is None
        assert not keys(db, Cf.CLAIMS)
    async with running(db) as w:
        assert is_over(w)


async def test_a_database_with_names_keeps_its_id_and_takes_what_it_lacks() -> None:
    db = MemoryDb()
    async with running(db) as w:
        await w.join()
        await w.put("here", address(1))
        seen, cluster = Seen(w.master.incarnations.current, w.master.counters().sequence), w.master.cluster_id
        inode = w.stat("here").inode
    async with running(db, wanted=REBUILD) as w:
        assert w.master.cluster_id == cluster
        await w.join(cluster=cluster, sequence=5000, seen=[Seen(seen.incarnation, 5000)], minted=100)
        now = w.runtime.now_ns
        known = _of(claim("here too", 1, seen.sequence), seen.incarnation, now + 1)
        older = _of(claim("here as well", 1, 4000), HISTORY, now - 1)
        await send(w, known, older, _of(claim("b", 2, 5000), seen.incarnation, now))
        finish(w)
        assert tree(w) == {"here": 1, "b": 2}
        assert w.stat("here").inode == inode
        assert w.stat("b").inode > inode


def _of(claim: Claim, incarnation: int, ctime_ns: int) -> Claim:
    assert claim.name is not None
    at = Seen(incarnation, claim.name.at.sequence)
    return claim._replace(name=claim.name._replace(at=at, ctime_ns=ctime_ns))


# ---- names for the notes ----


async def test_a_report_is_answered_with_the_names_that_it_asks_for() -> None:
    async with running() as w:
        await w.join()
        await w.put("d/a", address(1), parents=True, name={"mode": 0o600, "uid": 5, "gid": 6, "mtime_ns": 7})
        await w.put("b", address(2))
        await w.put("gone", address(3))
        await w.remove("gone")
        names = (await w.report(named=[address(9), address(2), address(1), address(3)])).names
        assert [(n.at, n.path, n.mode, n.uid, n.gid) for n in names.rows] == [
            (1, "b", 0o644, 0, 0),
            (2, "d/a", 0o600, 5, 6),
        ]
        assert names.rows[1].mtime_ns == 7
        assert names.sequence == w.master.counters().sequence, "as of which they are true"
        with pytest.raises(InvalidRequest, match="too many"):
            await w.report(named=[address(1)] * 4097)


async def test_holders_hear_that_a_file_was_renamed_or_has_other_attributes() -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2)
        await w.put("a", address(1))
        await w.report(2, held=[(address(1), 2)])

        async def told() -> list[list[bytes]]:
            orders = [list((await w.beat(i)).report_again) for i in (1, 2)]
            for i in (1, 2):
                await w.report(i, held=[(address(1), i)])
            return orders

        assert await told() == [[], []]
        await w.rename("a", "b")
        assert await told() == [[address(1).block.pack()]] * 2
        await w.master.set_attributes(0, "b", 0o600, None, None, None)
        assert await told() == [[address(1).block.pack()]] * 2
        await w.put("b", address(2, digest=1), name={"mode": 0o640})  # equal content: the entry stays, with this mode
        assert await told() == [[address(1).block.pack()]] * 2
        assert await told() == [[], []]


async def test_the_journal_is_trimmed_across_the_gap_that_a_rebuild_leaves() -> None:
    settings = Settings(journal=JournalLimits(10, 1 << 20))
    async with running(settings=settings, wanted=REBUILD) as w:
        await w.join(**{**AHEAD, "sequence": 1 << 40})
        await send(w)
        finish(w)
        for i in range(30):
            await w.mkdir(f"d{i}")
        assert len(keys(w.db, Cf.JOURNAL)) == 10
        events, first = await w.master.events(0, 100)
        assert (len(events), events[0].sequence) == (10, first)
