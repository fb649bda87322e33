"""A publish is asked once more of a master that was only slow; of one that is away nobody asks again, nor waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast

import pytest

from kvstore.client.messages import Publication, PublishMode, PublishName, PublishResult
from kvstore.client.meta import AsyncMeta
from kvstore.core.errors import KvError, Stale, Timeout, Unavailable
from kvstore.core.types import Entry
from kvstore.fuse.circuit import LIFE_SIGN_S, PING_TIMEOUT_S, Master
from tests.support.worker_kit import until

ENTRY = Entry(5, 0o100644, 0, 0, 0, 0, 0, None)


class SlowMaster:
    """The first `late` publishes are not answered in time; `lives`: whether it answers pings."""

    def __init__(self, late: int, *, lives: bool) -> None:
        self._late, self._lives = late, lives
        self.publishes = 0

    async def publish(
        self, publications: Sequence[Publication], *, base: int, timeout_s: float
    ) -> list[PublishResult | KvError]:
        self.publishes += 1
        if self.publishes <= self._late:
            raise Timeout("no answer in time", fault="m:1")
        return [PublishResult([ENTRY], [True])]

    async def lookup(self, paths: Sequence[str], *, timeout_s: float) -> list[Entry]:
        if not self._lives:
            raise Timeout("no answer in time", fault="m:1")
        return [ENTRY]


async def publish(meta: SlowMaster) -> tuple[Entry, bool]:
    master = Master(cast("AsyncMeta", meta))
    try:
        return await master.publish(1, PublishName("f"), PublishMode.REPLACE)
    finally:
        await master.close()


async def test_a_slow_publish_is_asked_for_again() -> None:
    meta = SlowMaster(1, lives=True)
    assert await publish(meta) == (ENTRY, True)
    assert meta.publishes == 2


async def test_but_only_once() -> None:
    meta = SlowMaster(2, lives=True)
    with pytest.raises(Timeout):
        await publish(meta)
    assert meta.publishes == 2


async def test_a_master_that_is_away_is_not_asked_again() -> None:
    meta = SlowMaster(1, lives=False)
    async with asyncio.timeout(LIFE_SIGN_S + 2.0):
        with pytest.raises(Timeout):
            await publish(meta)
    assert meta.publishes == 1


DEADLINE_S = 5.0
"""Of the calls below: long enough to be told apart from what ends them earlier on a busy machine."""


class Stopped:
    """A master that answers nothing, or only what is named in `answered`; "" is what pings ask for."""

    def __init__(self) -> None:
        self.answered: set[str] = set()
        self.asked: list[str] = []
        self.fails: set[str] = set()

    async def lookup(self, paths: Sequence[str], *, timeout_s: float, base: int = 0) -> list[Entry]:
        (name,) = paths
        self.asked.append(name)
        if name in self.fails:
            raise Timeout("no answer in time", fault="m:1")
        try:
            async with asyncio.timeout(timeout_s):
                while name not in self.answered:  # noqa: ASYNC110 - it changes its mind
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise Timeout("no answer in time", fault="m:1") from None
        return [ENTRY]


async def test_what_is_under_way_when_the_circuit_opens_waits_no_longer() -> None:
    meta = Stopped()
    master = Master(cast("AsyncMeta", meta), DEADLINE_S)
    calls = [asyncio.create_task(master.lookup(1, name)) for name in "abc"]
    await until(lambda: len(meta.asked) == len(calls))
    meta.fails.add("late")
    began_s = time.monotonic()
    with pytest.raises(Timeout):
        await master.lookup(1, "late")
    assert master.is_away
    with pytest.raises(Unavailable):
        await master.lookup(1, "later")
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(r) for r in results] == [Timeout] * len(calls)
    assert time.monotonic() - began_s < LIFE_SIGN_S + 0.5 * DEADLINE_S
    assert "later" not in meta.asked
    meta.answered.add("")
    await until(lambda: not master.is_away)
    meta.answered.add("a")
    assert await master.lookup(1, "a") == ENTRY
    await master.close()


async def test_what_is_answered_soon_after_the_circuit_opened_is_an_answer() -> None:
    meta = Stopped()
    master = Master(cast("AsyncMeta", meta), DEADLINE_S)
    call = asyncio.create_task(master.lookup(1, "a"))
    await until(lambda: meta.asked == ["a"])
    meta.fails.add("late")
    with pytest.raises(Timeout):
        await master.lookup(1, "late")
    meta.answered.add("a")
    assert await call == ENTRY
    await master.close()


async def test_a_master_that_answers_others_is_slow_and_not_away() -> None:
    meta = Stopped()
    meta.answered = {"quick"}
    master = Master(cast("AsyncMeta", meta), 0.3)
    slow = asyncio.create_task(master.lookup(1, "slow"))
    while not slow.done():
        assert await master.lookup(1, "quick") == ENTRY
        await asyncio.sleep(0.001)
    with pytest.raises(Timeout):
        await slow
    assert not master.is_away, "the others go on"
    await until(lambda: "" in meta.asked)
    await until(lambda: master.is_away, PING_TIMEOUT_S + 5.0)  # the ping was not answered either
    await master.close()


class Moved:
    """A master at which the directory of the mount, `OLD`, has become `now`; `made`: paths that were asked for."""

    OLD = 7

    def __init__(self) -> None:
        self.now = 8
        self.bases: list[int] = []
        self.made: list[str] = []

    async def lookup(self, paths: Sequence[str], *, base: int, timeout_s: float) -> list[Entry | KvError]:
        self.bases.append(base)
        await asyncio.sleep(0)
        return [Stale("gone") if base == self.OLD else ENTRY._replace(inode=base)]

    async def mkdir(self, paths: Sequence[str], *, base: int, parents: bool, timeout_s: float) -> list[Entry]:
        assert (base, parents) == (0, True)
        self.made += paths
        await asyncio.sleep(0)
        return [ENTRY._replace(inode=self.now)]


async def test_the_directory_of_the_mount_is_followed_to_where_its_path_leads() -> None:
    meta = Moved()
    master = Master(cast("AsyncMeta", meta))
    master.shows(meta.OLD, "a/b")
    found = await asyncio.gather(*(master.lookup(meta.OLD) for _ in range(3)))
    assert {entry.inode for entry in found} == {meta.OLD}, "the mount goes on calling it so"
    assert await master.lookup(meta.OLD) == found[0]
    assert meta.bases[-1] == meta.now
    assert set(meta.made) == {"a/b"}
    await master.close()


async def test_what_is_stale_in_a_directory_that_is_still_there_stays_stale() -> None:
    meta = Moved()
    meta.now = meta.OLD
    master = Master(cast("AsyncMeta", meta))
    master.shows(meta.OLD, "a/b")
    with pytest.raises(Stale):
        await master.lookup(meta.OLD)
    master.shows(meta.OLD, "")  # the root of the store never moves
    with pytest.raises(Stale):
        await master.lookup(meta.OLD)
    assert meta.made == ["a/b"]
    await master.close()
