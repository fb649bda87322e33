"""The cache in front of the master, the circuit to it, and what is served without it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from kvstore.client.meta import AsyncMeta
from kvstore.core.errors import KvError, NotFound, Stale, Unavailable
from kvstore.core.types import Entry
from kvstore.fuse.circuit import Master
from kvstore.fuse.inodes import EntryCache
from kvstore.fuse.tree import Tree
from kvstore.runtime import SystemRuntime

FILE, DIRECTORY = 0o100644, 0o040755


def entry(inode: int, mode: int = FILE) -> Entry:
    return Entry(inode, mode, 0, 0, 0, 0, 0, None)


class Meta:
    """Look-ups answered by `answer`; an Unavailable is raised, as the link does."""

    def __init__(self) -> None:
        self.row: Entry | KvError = entry(5)
        self.gate: asyncio.Event | None = None
        self.asked = 0

    async def lookup(self, paths: Sequence[str], *, base: int = 0, timeout_s: float = 0) -> list[Entry | KvError]:
        self.asked += 1
        row = self.row
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(row, Unavailable):
            raise row
        return [row]


class Clock(SystemRuntime):
    def __init__(self) -> None:
        super().__init__(1)
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


@pytest.fixture
def meta() -> Meta:
    return Meta()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tree(meta: Meta, clock: Clock) -> Tree:
    return Tree(Master(cast(AsyncMeta, meta), timeout_s=0.5), EntryCache(1.0, 60.0), clock)


KEY = (1, "f")


async def test_one_call_for_each_time_to_live(tree: Tree, meta: Meta, clock: Clock) -> None:
    assert (await tree.by_name(KEY)).entry == (await tree.by_inode(5)).entry == entry(5)
    assert meta.asked == 1
    clock.now_s += 1.0
    meta.row = entry(6)
    assert (await tree.by_name(KEY)).entry == entry(6)


async def test_a_miss_is_not_remembered(tree: Tree, meta: Meta) -> None:
    meta.row = NotFound()
    for _ in range(2):
        with pytest.raises(NotFound):
            await tree.by_name(KEY)
    assert meta.asked == 2


async def test_an_outdated_number_is_forgotten(tree: Tree, meta: Meta, clock: Clock) -> None:
    await tree.by_name(KEY)
    clock.now_s += 2
    meta.row = Stale()
    with pytest.raises(Stale):
        await tree.by_inode(5)
    assert tree.cache.by_name(KEY) is None


@pytest.mark.parametrize("removed", [False, True])
async def test_an_answer_older_than_a_change_made_here_is_not_kept(tree: Tree, meta: Meta, removed: bool) -> None:
    """Otherwise a look-up that was on its way during a put would hide the put for a second."""
    meta.gate = asyncio.Event()
    question = asyncio.create_task(tree.by_name(KEY))
    await asyncio.sleep(0)
    if removed:
        tree.gone(KEY)
    else:
        tree.learn(entry(9), KEY)
    meta.gate.set()
    answer = await question
    if removed:
        assert tree.left_s(answer) == 0
        assert tree.cache.by_name(KEY) is None
    else:
        assert answer.entry == entry(9)


async def test_a_listing_never_replaces_what_is_newer(tree: Tree, clock: Clock) -> None:
    asked_s = clock.now_s
    clock.now_s += 0.5
    tree.learn(entry(9), KEY)
    assert tree.listed(entry(5), KEY, asked_s).entry == entry(9)
    assert tree.listed(entry(7), (1, "g"), asked_s).entry == entry(7)


async def test_without_the_master(tree: Tree, meta: Meta, clock: Clock) -> None:
    await tree.by_name(KEY)
    meta.row = entry(6, DIRECTORY)
    await tree.by_name((1, "d"))
    meta.row = Unavailable()
    clock.now_s += 30
    assert (await tree.by_name(KEY)).entry == entry(5)
    assert (await tree.by_inode(5)).entry == entry(5)
    clock.now_s += 60
    with pytest.raises(NotFound) as missed:
        await tree.by_name(KEY)
    assert missed.value.reason == "unavailable"
    with pytest.raises(NotFound):
        await tree.by_name((1, "unknown"))
    assert (await tree.by_name((1, "d"))).entry.is_dir
    assert (await tree.by_inode(6)).entry.is_dir
    with pytest.raises(Unavailable):  # of unknown kind: never ENOENT
        await tree.by_inode(77)
    await tree.master.close()


async def test_the_circuit_asks_in_the_background_and_closes_again(meta: Meta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.fuse.circuit.PING_PAUSE_S", 0.001)
    master = Master(cast(AsyncMeta, meta))
    meta.row = Unavailable()
    with pytest.raises(Unavailable):
        await master.lookup(1)
    asked = meta.asked
    for _ in range(100):
        with pytest.raises(Unavailable):
            await master.lookup(1)
    assert meta.asked == asked  # none of them went out
    meta.row = entry(1)
    async with asyncio.timeout(10):
        while master.is_away:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
    assert await master.lookup(1) == entry(1)


async def test_a_master_that_does_not_answer_at_all_has_a_deadline(meta: Meta) -> None:
    meta.gate = asyncio.Event()
    master = Master(cast(AsyncMeta, meta), timeout_s=0.01)
    with pytest.raises(KvError):
        await master.lookup(1)
    assert master.is_away
    await master.close()
