"""Quota, TTL and pin at the master: what counts for whom, what is refused, what workers are told (rule 30)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core.errors import InvalidRequest, KvError, NoSpace, NotFound, OtherPolicy, Stale
from kvstore.core.types import BlockId
from kvstore.master.namespace import policies, quotas, recount
from kvstore.master.namespace.setpolicy import Told
from kvstore.master.storage.db import Cf, MemoryDb
from kvstore.master.storage.records import BLOCK, COUNTERS, META_COUNTERS, NAME, POLICY
from kvstore.rpc.server import stop_all
from tests.unit.master.world import World, address, check_invariants, running

MIB = 1 << 20


def usage(told: Told) -> tuple[int, int]:
    return told.row.used_bytes, told.row.files


async def rest(w: World, held: Mapping[int, Mapping[int, int]]) -> None:
    """Nobody writes for some seconds. `held`: node → policy → bytes."""
    for _ in range(10):
        for i, own in held.items():
            await w.beat_with(i, held=own)
        w.master.tick()


async def test_what_is_published_below_counts_once_and_goes_again() -> None:
    async with running() as w:
        await w.join()
        await w.join(2)
        await w.mkdir("a")
        await w.policy("a", quota_bytes=1000)
        await w.put("a/x", address(1, length=100))
        await w.put("a/d/y", address(2, length=50), parents=True)
        await w.put("b", address(3, length=7))
        await w.report(2, held=[(address(1), 2)])  # a second replica
        [told] = w.master.policies(0, "a").policies
        assert (told.path, told.row.quota_bytes, *usage(told)) == ("a", 1000, 150, 2)
        await w.put("a/x", address(4, length=30))  # replaced
        await w.remove("a/d/y")
        assert usage(w.master.policies(0, "a").policies[0]) == (30, 1)
        await w.report(nowhere=[address(4)])  # evicted: the name went with its last replica
        assert usage(w.master.policies(0, "a").policies[0]) == (0, 0)


async def test_the_nearest_policy_is_told_first_and_those_above_count_too() -> None:
    async with running() as w:
        await w.join()
        await w.mkdir("a/b/c", parents=True)
        await w.put("a/b/c/x", address(1, length=100))
        await w.put("a/y", address(2, length=10))
        await w.policy("a", quota_bytes=1000)
        await w.policy("a/b", ttl_s=60.0)
        await w.policy("", pinned=True)  # set last, above all
        w.recount()
        holding = w.master.policies(0, "a/b/c/x")
        assert [(t.path, usage(t)) for t in holding.policies] == [("a/b", (100, 1)), ("a", (110, 2)), ("", (110, 2))]
        assert [t.path for t in w.master.policies(0, "a/y").policies] == ["a", ""]
        assert [t.path for t in w.master.all_policies()] == ["", "a", "a/b"]
        rows = {t.id: t.row.parent for t in w.master.all_policies()}
        assert [rows[t.id] for t in holding.policies] == [t.id for t in holding.policies[1:]] + [0]


async def test_what_lay_there_before_is_counted_step_by_step_across_a_restart() -> None:
    db = MemoryDb()
    async with running(db) as w:
        await w.join()
        for i in range(recount.STEP + 10):
            await w.put(f"a/{i:06d}", address(i, length=2), parents=True)
        await w.put("a/deep/down/x", address(10_000, length=5), parents=True)
        await w.policy("a", quota_bytes=1 << 30)
        assert w.master.recount()
        [told] = w.master.policies(0, "a").policies
        assert told.counting
        assert told.row.files == recount.STEP
        assert w.master.all_policies() == [told]
        await w.remove("a/000001")  # counted already
        await w.remove(f"a/{recount.STEP + 5:06d}")  # not yet
        await w.put("a/000002", address(20_000, length=1))
    async with running(db) as w:
        w.recount()
        [told] = w.master.policies(0, "a").policies
        assert not told.counting
        assert usage(told) == (2 * (recount.STEP + 7) + 1 + 5, recount.STEP + 9)


async def test_many_small_directories_take_few_steps() -> None:
    async with running() as w:
        await w.join()
        for i in range(100):
            await w.put(f"a/{i:03d}/x", address(i, length=1), parents=True)
        await w.policy("a", quota_bytes=1000)
        steps = 0
        while w.master.recount():
            steps += 1
        assert steps <= 4
        assert usage(w.master.policies(0, "a").policies[0]) == (100, 100)


async def test_a_policy_that_is_taken_away_leaves_its_blocks_to_the_one_above() -> None:
    async with running() as w:
        await w.join()
        await w.mkdir("a/b/c", parents=True)
        for i, directory in enumerate(("a", "a/b", "a/b/c")):
            await w.policy(directory, quota_bytes=1000 + i)
            await w.put(f"{directory}/x", address(i, length=10))
        await w.policy("a/b", quota_bytes=0)
        assert [t.path for t in w.master.policies(0, "a/b").policies] == ["a"]
        assert [usage(t) for t in w.master.policies(0, "a/b/c").policies] == [(10, 1), (30, 3)]
        w.recount()
        assert len(policies.every(w.db)) == 2
        assert [usage(t) for t in w.master.policies(0, "a/b/c").policies] == [(10, 1), (30, 3)]
        await w.remove("a/b/c/x")
        await w.remove("a/b/c")
        assert [t.path for t in w.master.all_policies()] == ["a"]


async def test_a_publish_far_above_the_quota_is_refused_as_a_whole() -> None:
    async with running() as w:
        await w.join()
        await w.mkdir("a/b", parents=True)
        await w.policy("a", quota_bytes=1000)
        await w.put("a/b/x", address(1, length=1000))
        await w.put("a/y", address(2, length=100))  # 110 %
        with pytest.raises(NoSpace, match=r"/a has a quota of 1000 B .*kvstore fs quota"):
            await w.put("a/z", address(3, length=1))
        with pytest.raises(NotFound):
            w.stat("a/z")
        assert usage(w.master.policies(0, "a").policies[0]) == (1100, 2)
        assert (await w.beat()).unlink == [address(3).block.pack()], "a refused block does not stay"
        with pytest.raises(Stale):
            await w.put("elsewhere", address(3, length=1))
        await w.put("a/b/x", address(9, length=999))  # a smaller one in place of a larger one is let in
        await w.put("a/b/x", address(4, length=500))
        await w.put("a/z", address(5, length=500))
        await w.put("elsewhere", address(6, length=5000))


async def test_blocks_of_dead_workers_do_not_use_up_a_quota() -> None:
    async with running() as w:
        await w.join()
        await w.join(2)
        await w.mkdir("a")
        [told] = (await w.policy("a", quota_bytes=1000)).policies
        await w.put("a/x", address(1, length=1000), volume=1)
        for _ in range(20):
            await w.beat_with(1, held={told.id: 1000})
            await w.beat_with(2, held={})
            w.master.tick()
        with pytest.raises(NoSpace):
            await w.put("a/y", address(1, boot=14, length=900), volume=2)
        for _ in range(20):
            await w.beat_with(2, held={})
            w.master.tick()  # node 1 is dead by now
        await w.put("a/y", address(2, boot=14, length=900), volume=2)
        assert w.master.statfs(0, "a").used_bytes == 900
        assert w.master.statfs(0, "a").free_bytes == 100


async def test_each_worker_is_told_its_share_until_nothing_is_over() -> None:
    async with running() as w:
        await w.join()
        await w.join(2)
        await w.mkdir("a/b", parents=True)
        [above] = (await w.policy("a", quota_bytes=1000)).policies
        below = (await w.policy("a/b", ttl_s=9.0)).policies[0]
        for i in range(12):
            await w.put(f"a/b/{i}", address(i, length=90))
        held = {1: {below.id: 900}, 2: {below.id: 180}}
        await rest(w, held)
        assert (await w.beat_with(1, held=held[1])).over == [(above.id, 80, 2.1)], "one block, of who holds most"
        assert (await w.beat_with(2, held=held[2])).over == []
        await w.report(nowhere=[address(0)])
        assert (await w.beat_with(1, held=held[1])).over == [], "asked of what is published now, not at the last tick"


async def test_where_a_block_is_large_beside_the_quota_room_is_made_for_who_tries_again() -> None:
    async with running() as w:
        await w.join()
        await w.mkdir("a")
        [told] = (await w.policy("a", quota_bytes=1000)).policies
        for i in range(5):
            await w.put(f"a/{i}", address(i, length=200))
        await rest(w, {1: {told.id: 1000}})
        assert (await w.beat_with(held={told.id: 1000})).over == [], "full, and not over"
        with pytest.raises(NoSpace):
            await w.put("a/5", address(5, length=200))
        w.master.tick()
        assert (await w.beat_with(held={told.id: 1000})).over == [(told.id, 200, 2.1)]
        await w.report(nowhere=[address(0)], fence=6)
        await w.put("a/5", address(6, length=200))
        await rest(w, {1: {told.id: 1000}})
        assert (await w.beat_with(held={told.id: 1000})).over == [], "nobody came again"
        with pytest.raises(NoSpace, match="never fits"):
            await w.put("a/6", address(7, length=5000))
        w.master.tick()
        assert (await w.beat_with(held={told.id: 1000})).over == [], "nothing goes for what never fits"


async def test_hot_blocks_do_not_go_in_the_place_of_new_ones() -> None:
    """Workers learn only with the reply to their next report what a new block counts for."""
    async with running() as w:
        await w.join()
        await w.mkdir("a")
        [told] = (await w.policy("a", quota_bytes=1000)).policies
        for i in range(10):
            await w.put(f"a/{i}", address(i, length=108))
        await rest(w, {1: {told.id: 900}})
        assert (await w.beat_with(held={told.id: 900})).over == []
        await rest(w, {1: {told.id: 1080}})
        assert (await w.beat_with(held={told.id: 1080})).over == [(told.id, 80, 2.1)]


async def test_where_much_is_written_some_room_is_kept_for_what_comes_next() -> None:
    async with running() as w:
        await w.join()
        await w.mkdir("a")
        [told] = (await w.policy("a", quota_bytes=1000)).policies
        for i in range(9):
            await w.put(f"a/{i}", address(i, length=100))
        await w.beat_with(held={told.id: 900})
        w.master.tick()
        assert (await w.beat_with(held={told.id: 900})).over == [(told.id, 100, 2.1)], "down to 80 %"
        await rest(w, {1: {told.id: 900}})
        assert (await w.beat_with(held={told.id: 900})).over == [], "all of it, where nobody writes"


@pytest.mark.parametrize(
    ("held", "blocks", "wanted"),
    [
        ({"a": (500, 1.0), "b": (500, 1.0)}, 4, {"a": 2, "b": 2}),
        ({"a": (900, 1.0), "b": (100, 1.0)}, 10, {"a": 9, "b": 1}),
        ({"a": (900, 8.0), "b": (100, 0.0)}, 3, {"b": 3}),
        ({"a": (500, 1.0), "b": (500, -1.0)}, 2, {"a": 2}),
        ({"a": (500, -1.0)}, 2, {}),
        ({}, 2, {}),
        ({str(i): (10, 1.0) for i in range(100)}, 1, {"0": 1}),
    ],
    ids=["alike", "by size", "the coldest", "nothing to evict", "nothing anywhere", "nobody", "less than one each"],
)
def test_shares(held: dict[str, tuple[int, float]], blocks: int, wanted: dict[str, int]) -> None:
    shares = quotas._shares({node: quotas.Held(*each) for node, each in held.items()}, blocks * 10, 10)
    assert shares == {node: count * 10 for node, count in wanted.items()}


async def test_a_worker_is_told_the_table_when_it_has_another_one() -> None:
    async with running() as w:
        await w.join()
        assert (await w.beat()).policies is None
        await w.mkdir("a/b", parents=True)
        [above] = (await w.policy("a", ttl_s=5.0)).policies
        [below, _] = (await w.policy("a/b", pinned=True)).policies
        table = (await w.beat_with(held={})).policies
        assert table is not None
        assert [tuple(rule) for rule in table.rules] == [(above.id, 0, 5.0, False), (below.id, above.id, 0.0, True)]
        assert (await w.beat_with(held={}, version=table.version)).policies is None
        await w.policy("a", ttl_s=6.0)
        changed = (await w.beat_with(held={}, version=table.version)).policies
        assert changed is not None
        assert changed.version not in (0, table.version)
        await w.policy("a", ttl_s=0.0)
        await w.policy("a/b", pinned=False)
        emptied = (await w.beat_with(held={}, version=changed.version)).policies
        assert emptied is not None
        assert (emptied.version, list(emptied.rules)) == (0, [])


async def test_reports_are_answered_with_the_policy_and_asked_for_again_when_it_changes() -> None:
    async with running() as w:
        await w.join()
        await w.put("a/x", address(1), parents=True)
        assert (await w.report(held=[(address(1), 1)])).held.policies == [0]
        [told] = (await w.policy("a", pinned=True)).policies
        w.recount()
        orders = await w.beat()
        assert orders.report_again == [address(1).block.pack()]
        assert (await w.beat()).report_again == [address(1).block.pack()], "the answer before may have been lost"
        assert (await w.report(held=[(address(1), 1)])).held.policies == [told.id]
        assert (await w.beat()).report_again == []


async def test_the_pin_of_a_file_follows_its_name() -> None:
    async with running() as w:
        await w.join()
        await w.put("a/x", address(1, length=10), parents=True)
        [pin] = (await w.policy("a/x", pinned=True)).policies
        await w.put("a/x", address(2, length=20))
        [told] = w.master.policies(0, "a/x").policies
        assert (told.id, told.path, usage(told)) == (pin.id, "a/x", (20, 1))
        await w.put("a/y", address(3, length=30))
        await w.rename("a/y", "a/x")  # a replacement by rename, too
        assert usage(w.master.policies(0, "a/x").policies[0]) == (30, 1)
        await w.mkdir("b")
        await w.policy("b", quota_bytes=1000)
        await w.rename("a/x", "b/z")
        assert [(t.path, usage(t)) for t in w.master.policies(0, "b/z").policies] == [("b/z", (30, 1)), ("b", (30, 1))]
        await w.remove("b/z")
        assert [t.path for t in w.master.all_policies()] == ["b"]
        assert usage(w.master.all_policies()[0]) == (0, 0)


async def test_a_file_that_moves_counts_for_what_holds_there() -> None:
    async with running() as w:
        await w.join()
        await w.mkdir("a")
        await w.mkdir("b")
        await w.policy("a", quota_bytes=1000)
        await w.policy("b", quota_bytes=1000)
        await w.put("a/x", address(1, length=10))
        await w.rename("a/x", "b/x")
        assert [usage(t) for t in w.master.all_policies()] == [(0, 0), (10, 1)]
        await w.rename("b/x", "x")
        assert [usage(t) for t in w.master.all_policies()] == [(0, 0), (0, 0)]


async def test_a_directory_does_not_move_to_where_another_policy_holds() -> None:
    async with running() as w:
        await w.join()
        await w.mkdir("a/b", parents=True)
        await w.mkdir("c")
        await w.policy("a", ttl_s=5.0)
        with pytest.raises(OtherPolicy, match="copy it"):
            await w.rename("a/b", "c/b")
        with pytest.raises(OtherPolicy):
            await w.rename("c", "a/c")
        await w.rename("a/b", "a/d")
        await w.rename("a", "e")  # with its own policy, to where the same holds
        assert [t.path for t in w.master.policies(0, "e/d").policies] == ["e"]


async def test_a_directory_that_moves_while_it_is_counted_is_not_forgotten() -> None:
    async with running() as w:
        await w.join()
        for i in range(recount.STEP):
            await w.put(f"a/m{i:04d}", address(i, length=1), parents=True)
        await w.put("a/z/x", address(9000, length=100), parents=True)
        await w.policy("a", quota_bytes=1 << 30)
        w.master.recount()  # all of a/m*; a/z comes with the next step
        await w.rename("a/z", "a/b")  # to where it has passed
        w.recount()
        assert usage(w.master.policies(0, "a").policies[0]) == (recount.STEP + 100, recount.STEP + 1)


async def test_values_that_make_no_sense_are_refused() -> None:
    async with running() as w:
        await w.join()
        await w.put("x", address(1))
        await w.mkdir("d")
        for wanted in ({"quota_bytes": 1}, {"ttl_s": 1.0}):
            with pytest.raises(InvalidRequest, match="of a file only the pin"):
                await w.policy("x", **wanted)
        for wanted in ({"ttl_s": -1.0}, {"ttl_s": float("nan")}, {"ttl_s": float("inf")}, {"quota_bytes": 1 << 63}):
            with pytest.raises(InvalidRequest, match="out of range"):
                await w.policy("d", **wanted)
        with pytest.raises(NotFound):
            await w.policy("nowhere", pinned=True)
        assert w.master.all_policies() == []
        assert w.master.counters().policies == 0


async def test_there_are_so_many_policies_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "MAX_POLICIES", 2)
    async with running() as w:
        await w.join()
        for name in "abc":
            await w.mkdir(name)
        await w.policy("a", pinned=True)
        await w.policy("b", pinned=True)
        with pytest.raises(InvalidRequest, match="take some away"):
            await w.policy("c", pinned=True)
        await w.policy("a", pinned=False)
        await w.policy("c", pinned=True)


async def test_a_policy_is_journaled_with_all_it_says_and_survives_a_restart() -> None:
    db = MemoryDb()
    async with running(db) as w:
        await w.mkdir("a")
        await w.policy("a", quota_bytes=5, ttl_s=2.5)
        await w.policy("a", pinned=True)
        await w.policy("a", pinned=True)  # says nothing new
        events, _ = await w.master.events(0, 10)
        assert [(e.kind, e.path) for e in events] == [("mkdir", "a"), ("policy", "a"), ("policy", "a")]
    async with running(db) as w:
        [told] = w.master.policies(0, "a").policies
        assert (told.row.quota_bytes, told.row.ttl_s, told.row.pinned) == (5, 2.5, True)


async def test_statfs_is_what_the_quota_leaves() -> None:
    async with running() as w:
        await w.join()
        whole = w.master.statfs(0, "")
        await w.mkdir("a/b", parents=True)
        await w.policy("a", quota_bytes=100 * MIB)
        await w.policy("a/b", quota_bytes=1 << 50)  # more than there is
        await w.put("a/b/x", address(1, length=30 * MIB))
        assert w.master.statfs(0, "")[:3] == whole[:3]
        assert w.master.statfs(0, "a/b/x")[:4] == (100 * MIB, 30 * MIB, 70 * MIB, 1)


NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


class PolicyMachine(RuleBasedStateMachine):
    """Whatever happens, the books fit the rows (`check_invariants`); and once all is recounted, they fit the names."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = World(MemoryDb())
        self.flusher = self.loop.create_task(self.world.committer.run())
        self.counter = 0
        for i in (1, 2):
            self.run(self.world.join(i))

    def run(self, work: Awaitable[object]) -> None:
        async def quietly() -> None:
            try:
                await work
            except KvError:
                pass

        self.loop.run_until_complete(quietly())

    @rule(path=PATHS, length=st.integers(1, 50), node=st.sampled_from([1, 2]))
    def publish(self, path: str, length: int, node: int) -> None:
        self.counter += 1
        block = address(self.counter, boot=7 * node, length=length)
        self.run(self.world.put(path, block, node, parents=True))

    @rule(path=PATHS)
    def empty(self, path: str) -> None:
        self.run(self.world.put(path, None, parents=True))

    @rule(path=PATHS)
    def remove(self, path: str) -> None:
        self.run(self.world.remove(path))

    @rule(source=PATHS, to=PATHS)
    def rename(self, source: str, to: str) -> None:
        self.run(self.world.rename(source, to))

    @rule(path=PATHS, quota=st.sampled_from([None, 0, 60, 1000]), pinned=st.sampled_from([None, True, False]))
    def say(self, path: str, quota: int | None, pinned: bool | None) -> None:
        self.run(self.world.policy(path, quota_bytes=quota, pinned=pinned))

    @rule(counter=st.integers(1, 30), node=st.sampled_from([1, 2]))
    def evict(self, counter: int, node: int) -> None:
        self.run(self.world.report(node, nowhere=[address(counter, boot=7 * node)]))

    @rule()
    def recount(self) -> None:
        self.world.master.recount()

    @invariant()
    def books_fit_the_rows(self) -> None:
        check_invariants(self.world.db)

    def teardown(self) -> None:
        self.world.recount()
        check_invariants(self.world.db)
        self.books_fit_the_names()
        self.world.committer.close()
        self.loop.run_until_complete(stop_all(self.flusher))
        self.loop.close()

    def books_fit_the_names(self) -> None:
        db = self.world.db
        for _, value in db.scan(Cf.NAMES, b"", None, 1 << 30):
            entry = NAME.load(value)
            stored = db.get(Cf.BLOCKS, entry.block) if entry.block else None
            if stored is not None:
                assert BLOCK.load(stored).policy == policies.nearest_of(db, entry.inode), BlockId.unpack(entry.block)
        left = [POLICY.load(value) for _, value in db.scan(Cf.POLICIES, b"", None, 1 << 30)]
        assert all(row.inode for row in left), "what was taken away has gone"
        assert not any(row.says_nothing for row in left)
        assert COUNTERS.load(db.get(Cf.META, META_COUNTERS) or b"").policies == len(left)


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
