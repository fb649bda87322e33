"""A start after damage at the end of the log: the workers tell what it may have lost, and clients only read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from kvstore.core.errors import NotFound, Unavailable
from kvstore.core.types import Seen
from kvstore.master.recovery.claims import Claim
from kvstore.master.recovery.rebuild import MEND, MEND_MAX_S, MEND_QUIET_S, MEND_STUCK_S, Kind, Wanted
from kvstore.master.storage.db import Cf, MemoryDb
from kvstore.master.storage.records import META_REBUILD
from kvstore.master.workers.reports import Verdict
from tests.unit.master import test_rebuild
from tests.unit.master.test_claims import claim, dying, tree
from tests.unit.master.test_rebuild import is_over, refusals, send
from tests.unit.master.world import World, address, running


class Lost:
    """A database of two workers with one file and one removed one, which lost what came behind it. `seen`: by workers
    that heard of the last thing that it has; `beyond`: by those that heard of something later."""

    def __init__(self) -> None:
        self.db = MemoryDb()
        self.cluster = ""
        self.seen = self.beyond = Seen(0, 0)

    async def join(self, world: World, i: int, seen: Seen | None = None) -> bool:
        """Whether it is collected from."""
        seen = seen or self.seen
        node = await world.join(i, cluster=self.cluster, sequence=seen.sequence, seen=[seen], minted=100)
        return node.row.collects

    def noted(self, path: str, counter: int, world: World) -> Claim:
        """A name that the database has lost."""
        return self.continued(claim(path, counter, self.beyond.sequence, ctime=world.runtime.now_ns + 1))

    def continued(self, claim: Claim) -> Claim:
        """One of this database's history."""
        assert claim.name is not None
        at = self.beyond._replace(sequence=claim.name.at.sequence)
        return claim._replace(name=claim.name._replace(at=at))


@asynccontextmanager
async def cut(lost: Lost, wanted: Wanted | None = MEND) -> AsyncIterator[World]:
    async with running(lost.db) as w:
        for i in (1, 2):
            await w.join(i)
        await w.put("here", address(1))
        await w.put("removed", address(2))
        await w.remove("removed")
        lost.cluster = w.master.cluster_id
        lost.seen = Seen(w.master.incarnations.current, w.master.counters().sequence)
        lost.beyond = lost.seen._replace(sequence=lost.seen.sequence + 5)
    async with running(lost.db, wanted=wanted) as w:
        yield w


def finish(world: World) -> None:
    """What it can do when nothing new has come for a moment."""
    test_rebuild.finish(world)
    world.runtime.now_s += MEND_QUIET_S
    test_rebuild.finish(world)


@pytest.fixture
def lost() -> Lost:
    return Lost()


async def verdicts(world: World, *counters: int, dead: Sequence[int] = ()) -> Sequence[Verdict]:
    told = [(address(i), 1) for i in counters]
    return (await world.report(held=told, dead=[address(i) for i in dead], fence=0)).held.verdicts


async def test_names_come_back_by_themselves_and_nothing_is_changed_or_collected_meanwhile(lost: Lost) -> None:
    async with cut(lost) as w:
        assert not await lost.join(w, 1)
        assert not await lost.join(w, 2, lost.beyond)
        assert (await w.beat(1)).send_names
        assert w.stat("here").address == address(1)
        assert await w.names() == ["here"]
        assert w.master.statfs(0, "").files == 1
        assert await refusals(w) == [Unavailable] * 6 + [NotFound], "changes are refused, and what is lost is a miss"
        assert "a few seconds" in str(w.master.refusal())
        assert await verdicts(w, 1, 5, 2, dead=[5]) == [Verdict.OWNED, Verdict.UNKNOWN, Verdict.UNKNOWN]
        assert not (await w.beat(1)).unlink
        await send(w, lost.noted("lost", 5, w), i=1)
        finish(w)
        assert not is_over(w), "the other one has not told"
        await send(w, i=2)
        test_rebuild.finish(w)
        assert is_over(w), "nobody else is expected"
        assert tree(w) == {"here": 1, "lost": 5}
        assert [(await w.beat(i)).register for i in (1, 2)] == [True, True], "they hear of it by registering"
        assert await lost.join(w, 1)
        assert await lost.join(w, 2, lost.beyond)
        assert await lost.join(w, 1, Seen(w.master.incarnations.current, w.master.counters().sequence)), "it has heard"
        assert "mend complete" in w.master.notice
        assert "--discard" not in w.master.notice
        assert address(2).block.pack() in (await w.beat(1)).unlink
        assert lost.db.get(Cf.META, META_REBUILD) is None
        await w.put("new", address(150))


async def test_what_has_no_name_goes_and_the_operator_is_told(lost: Lost) -> None:
    """Nothing can tell what it was."""
    async with cut(lost) as w:
        for i in (1, 2):
            await lost.join(w, i)
            await send(w, *([claim(None, 5)] if i == 1 else []), i=i)
        finish(w)
        assert [await lost.join(w, i) for i in (1, 2)] == [True, True]
        assert "1 blocks (10 B) have no name: they go" in w.master.notice
        assert "--discard" not in w.master.notice
        assert await verdicts(w, 5, dead=[5]) == [Verdict.DEAD]


async def test_what_was_lost_is_later_than_what_is_there_whatever_the_clocks_say(lost: Lost) -> None:
    """A replaced file, whose old block its worker still has; a renamed one, which is no reason to keep anything."""
    async with cut(lost) as w:
        for i in (1, 2):
            await lost.join(w, i, lost.beyond)
        await send(w, lost.continued(claim("here", 5, lost.beyond.sequence)), claim("here", 1), i=1)
        await send(w, i=2)
        finish(w)
        assert tree(w) == {"here": 5}
        assert dying(w)[1] == [1, 2], "the one that was replaced, and the one that had been removed"
        assert [await lost.join(w, i, lost.beyond) for i in (1, 2)] == [True, True]


async def test_what_was_lost_once_is_no_later_than_what_clients_changed_since(lost: Lost) -> None:
    async with cut(lost) as w:
        late = lost.noted("here", 5, w)._replace(volume=2)
        await lost.join(w, 1)
        await send(w, i=1)
        finish(w)
        w.runtime.now_ns += 10
        await w.put("here", address(150))
    async with running(lost.db, wanted=MEND) as w:
        for i in (1, 2):
            await lost.join(w, i, lost.beyond)
            await send(w, *([late] if i == 2 else []), i=i)
        test_rebuild.finish(w)
        assert "names that a later one has replaced 1" in w.master.notice
        finish(w)
        assert tree(w) == {"here": 150}


async def test_a_worker_that_comes_up_later_is_waited_for(lost: Lost) -> None:
    async with cut(lost) as w:
        await lost.join(w, 1)
        await send(w, i=1)
        w.runtime.now_s += MEND_QUIET_S - 1
        test_rebuild.finish(w)
        assert not is_over(w)
        assert "n2 are awaited" in w.master.notice
        await lost.join(w, 2)
        await send(w, lost.noted("lost", 5, w)._replace(volume=2), i=2)
        finish(w)
        assert tree(w) == {"here": 1, "lost": 5}


async def test_one_that_does_not_come_is_not_waited_for_for_ever_and_not_collected_from(lost: Lost) -> None:
    async with cut(lost) as w:
        await lost.join(w, 1)
        await send(w, i=1)
        w.runtime.now_s += MEND_QUIET_S
        test_rebuild.finish(w)
        assert is_over(w)
        assert not await lost.join(w, 2)
        assert "have not told all: n2" in w.master.notice
        assert "nothing is collected on 1 workers (n2)" in w.master.notice
        assert "--rebuild" in w.master.notice
    async with running(lost.db) as w:
        assert not await lost.join(w, 2), "a restart forgets nothing"


async def test_workers_that_are_dead_are_not_waited_for(lost: Lost) -> None:
    async with cut(lost) as w:
        await lost.join(w, 1)
        await send(w, i=1)
        for _ in range(w.master.settings.dead_ticks):
            test_rebuild.finish(w)
            assert not is_over(w)
            await w.beat(1)
            w.master.tick()
        test_rebuild.finish(w)
        assert is_over(w)


async def test_while_nobody_is_there_it_waits_longer(lost: Lost) -> None:
    """A rack that comes up again after a power cut."""
    async with cut(lost) as w:
        w.die()
        w.runtime.now_s += MEND_MAX_S - 1
        test_rebuild.finish(w)
        assert not is_over(w)
        assert "n1, n2 are awaited" in w.master.notice
        w.runtime.now_s += 1
        test_rebuild.finish(w)
        assert is_over(w)
        assert "have not told all: n1, n2" in w.master.notice


async def test_one_that_lives_and_never_tells_is_named_and_not_waited_for(
    lost: Lost, caplog: pytest.LogCaptureFixture
) -> None:
    async with cut(lost) as w:
        for i in (1, 2):
            await lost.join(w, i)
        await send(w, i=1)
        assert (await w.beat(2)).send_names
        w.runtime.now_s += MEND_STUCK_S - 1
        test_rebuild.finish(w)
        assert not is_over(w)
        w.runtime.now_s += 1
        assert (await w.beat(2)).send_names
        test_rebuild.finish(w)
        assert is_over(w)
        assert [await lost.join(w, i) for i in (1, 2)] == [True, False]
        assert "have not told all: n2" in w.master.notice
        assert "worker n2 is asked for its names and has sent none for 10 s" in caplog.text


@pytest.mark.allow_errors("rolled back")
async def test_who_is_still_telling_is_waited_for_and_nobody_else(lost: Lost) -> None:
    async with cut(lost) as w:
        for i in (1, 2):
            await lost.join(w, i)
        await send(w, i=2)
        for _ in range(int(2 * MEND_MAX_S)):
            await w.beat(1)
            await send(w, lost.noted("lost", 5, w), i=1, is_last=False)
            w.runtime.now_s += 1
            test_rebuild.finish(w)
            assert not is_over(w)
        w.runtime.now_s += MEND_STUCK_S
        test_rebuild.finish(w)
        assert is_over(w)
        assert tree(w) == {"here": 1, "lost": 5}
        assert [await lost.join(w, i) for i in (1, 2)] == [False, True]
        assert "have not told all: n1" in w.master.notice


async def test_a_crash_in_the_middle_loses_nothing(lost: Lost) -> None:
    async with cut(lost) as w:
        await lost.join(w, 1, lost.beyond)
        await send(w, lost.noted("lost", 5, w), i=1)
    async with running(lost.db) as w:
        assert not is_over(w)
        assert w.master.refusal() is not None
        for i in (1, 2):
            await lost.join(w, i, lost.beyond)
            late = lost.continued(claim("here", 6, lost.beyond.sequence, volume=2))
            await send(w, *([late] if i == 2 else []), i=i)
        finish(w)
        assert tree(w) == {"here": 6, "lost": 5}, "no client has changed anything between"


async def test_an_operators_word_comes_first(lost: Lost) -> None:
    async with cut(lost):
        pass
    async with running(lost.db, wanted=Wanted(Kind.DISCARD, workers=1)) as w:
        assert w.master.refusal() is not None
        await lost.join(w, 1, lost.beyond)
        finish(w)
        assert await lost.join(w, 1, lost.beyond)


async def test_a_rebuild_that_has_begun_is_not_made_less_by_a_cut(lost: Lost) -> None:
    async with cut(lost, Wanted(Kind.REBUILD)):
        pass
    async with running(lost.db, wanted=MEND) as w:
        assert w.master.refusal() is not None


async def test_puts_that_are_under_way_are_no_reason_to_distrust_their_worker(lost: Lost) -> None:
    """Their blocks are sealed and not yet published when their worker tells what it has."""
    async with cut(lost) as w:
        for i in (1, 2):
            await lost.join(w, i)
            await send(w, claim(None, 100, boot=7 * i, volume=i), i=i)
        finish(w)
        assert [await lost.join(w, i) for i in (1, 2)] == [True, True]
        await w.put("new", address(100))


async def test_a_put_that_the_restart_interrupted_may_be_tried_again_afterwards(lost: Lost) -> None:
    async with cut(lost) as w:
        for i in (1, 2):
            await lost.join(w, i)
            await send(w, *([claim(None, 50)] if i == 1 else []), i=i)
        with pytest.raises(Unavailable):
            await w.put("interrupted", address(50))
        finish(w)
        assert [await lost.join(w, i) for i in (1, 2)] == [True, True]
        await w.put("interrupted", address(50))


async def test_a_worker_that_never_met_this_cluster_has_nothing_to_tell(lost: Lost) -> None:
    async with cut(lost) as w:
        assert (await w.join(3)).row.collects


async def test_without_any_worker_there_is_nothing_to_mend() -> None:
    async with running(wanted=MEND) as w:
        cluster = w.master.cluster_id
        finish(w)
        assert is_over(w)
        assert w.master.cluster_id == cluster != ""
