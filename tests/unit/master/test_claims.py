"""Names taken back from notes: what wins, in whatever order the workers tell."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvstore.core.errors import InvalidRequest, NotFound
from kvstore.core.types import Address, BlockId, Seen
from kvstore.master.namespace import blocks
from kvstore.master.recovery import claims, gather
from kvstore.master.recovery.claims import Claim, NotedName, Outcome, Unnamed
from kvstore.master.storage.db import Cf
from kvstore.master.storage.records import META_REBUILD, RebuildRow, dump
from tests.unit.master.world import World, address, keys, running

HISTORY = 99
"""Of an incarnation that the database does not know."""


def claim(
    path: str | None, counter: int, sequence: int = 1, *, volume: int = 1, ctime: int = 0, boot: int = 7
) -> Claim:
    name = NotedName(path, 0o640, 1, 2, 30, ctime or sequence, Seen(HISTORY, sequence)) if path is not None else None
    return Claim(address(counter, boot), volume, name)


def gathered(world: World, *page: Claim, node: str = "n1") -> Counter[Outcome]:
    change = world.master._change()
    found = gather.take(change, world.master.nodes.cluster, node, page, lambda seen: seen.incarnation == HISTORY)
    world.committer.write(change)
    return found


def place(world: World) -> Counter[Outcome]:
    """All that was gathered, from the beginning, as after a crash."""
    change, at, tally = world.master._change(), b"", Counter[Outcome]()
    while at := claims.place_step(change, at, tally):
        pass
    world.committer.write(change)
    return tally


def take(world: World, *page: Claim, node: str = "n1") -> Counter[Outcome]:
    """One page to its end. What becomes of those that are placed stands in place of `CLAIMED`."""
    found = gathered(world, *page, node=node)
    del found[Outcome.CLAIMED]
    return found + place(world)


def settle(world: World) -> dict[str, Unnamed]:
    """To the end of a rebuild."""
    unnamed: dict[str, Unnamed] = {}
    change, at = world.master._change(), b""
    while at := claims.settle_step(change, world.master.nodes.cluster, at, unnamed):
        pass
    while claims.clear_step(change):
        pass
    world.committer.write(change)
    assert not keys(world.db, Cf.CLAIMS)
    return unnamed


def dying(world: World) -> dict[int, list[int]]:
    """Volume → counters of the blocks that its worker is to unlink."""
    found = {volume: blocks.unlink_orders(world.db, [volume], 100) for volume in world.master.nodes.volumes}
    return {volume: [BlockId.unpack(id).counter for id in ids] for volume, ids in found.items() if ids}


def block_at(world: World, path: str) -> int:
    found = world.stat(path).address
    assert found is not None
    return found.block.counter


def tree(world: World) -> dict[str, int]:
    """Path → counter of its block, of all files."""
    found = {}
    waiting = [""]
    while waiting:
        base = waiting.pop()
        at = world.stat(base).inode
        for name in [key[8:].decode() for key in keys(world.db, Cf.NAMES) if key[:8] == at.to_bytes(8, "big")]:
            path = f"{base}/{name}" if base else name
            if world.stat(path).is_dir:
                waiting.append(path)
            else:
                found[path] = block_at(world, path)
    return found


async def test_a_name_comes_back_with_its_attributes_and_directories() -> None:
    async with running() as w:
        await w.join()
        assert take(w, claim("a/b/c", 5, sequence=700)) == {Outcome.NAMED: 1}
        entry = w.stat("a/b/c")
        assert entry.address == address(5)
        assert (entry.mode, entry.uid, entry.gid, entry.mtime_ns, entry.ctime_ns) == (0o100640, 1, 2, 30, 700)
        assert [replica.volume for replica in entry.replicas] == [1]
        assert w.stat("a/b").is_dir
        assert (w.master.counters().files, w.master.counters().directories) == (1, 3)
        assert w.master.counters().sequence > 700, "history goes on above what was noted"
        assert settle(w) == {}


async def test_the_same_claims_again_change_nothing() -> None:
    async with running() as w:
        await w.join()
        page = [claim("a/b", 1), claim("c", 2), claim(None, 3), claim("c", 4, 9)]
        take(w, *page)
        before = dict(w.db.scan(Cf.NAMES, b"", None, 100))
        take(w, *page)
        assert dict(w.db.scan(Cf.NAMES, b"", None, 100)) == before
        assert tree(w) == {"a/b": 1, "c": 4}
        assert settle(w) == {"n1": Unnamed(1, 10)}
        assert dying(w) == {1: [2]}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_of_two_blocks_of_one_path_the_later_note_wins(order: Sequence[int]) -> None:
    async with running() as w:
        await w.join()
        pair = [claim("a", 1, 10), claim("a", 2, 20)]
        take(w, *(pair[i] for i in order))
        assert tree(w) == {"a": 2}
        assert settle(w) == {}
        assert dying(w) == {1: [1]}, "nobody will ever name the other one"


async def test_a_block_that_a_later_one_has_replaced_dies_wherever_it_lies() -> None:
    """Also when the database had its name, or another worker has it without a note."""
    async with running() as w:
        await w.join(1)
        await w.join(2)
        await w.put("a", address(1))
        await w.report(2, held=[(address(1), 2)])
        take(w, claim(None, 3, volume=2), node="n2")
        take(w, claim("a", 2, 5, ctime=w.runtime.now_ns + 1), claim("a", 3, 4, ctime=w.runtime.now_ns + 1))
        assert tree(w) == {"a": 2}
        assert settle(w) == {}
        assert dying(w) == {1: [1, 3], 2: [1, 3]}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_of_two_paths_of_one_block_the_later_note_wins(order: Sequence[int]) -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2)
        pair = [("n1", claim("old", 1, 10, volume=1)), ("n2", claim("new", 1, 20, volume=2))]
        for i in order:
            take(w, pair[i][1], node=pair[i][0])
        assert tree(w) == {"new": 1}
        assert {replica.node for replica in w.stat("new").replicas} == {"n1", "n2"}
        assert settle(w) == {}


async def test_a_block_that_lost_its_path_may_have_another_one_later() -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2)
        take(w, claim("p", 1, 10))
        take(w, claim("p", 2, 20))
        take(w, claim("q", 1, 30, volume=2), node="n2")
        assert tree(w) == {"p": 2, "q": 1}
        assert settle(w) == {}
        assert {replica.node for replica in w.stat("q").replicas} == {"n1", "n2"}, "the first holder was not forgotten"


async def test_a_replica_without_a_note_holds_what_another_one_names() -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2)
        take(w, claim(None, 1, volume=2), node="n2")
        take(w, claim("p", 1))
        assert settle(w) == {}
        assert {replica.node for replica in w.stat("p").replicas} == {"n1", "n2"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_a_directory_takes_the_place_of_a_file(order: Sequence[int]) -> None:
    async with running() as w:
        await w.join()
        pair = [claim("a", 1, 50), claim("a/b", 2, 10)]
        take(w, *(pair[i] for i in order))
        assert tree(w) == {"a/b": 2}


async def test_what_is_no_path_is_no_name() -> None:
    async with running() as w:
        await w.join()
        wrong = ["", "/", "../x", "a/./b", "a\0", "n" * 256, "x/" * 300]
        found = take(w, *(claim(path, i + 1) for i, path in enumerate(wrong)))
        assert found == {Outcome.MALFORMED: len(wrong)}
        assert settle(w) == {"n1": Unnamed(len(wrong), 10 * len(wrong))}


async def test_one_bad_claim_does_not_refuse_its_page() -> None:
    """Its worker would send the page for ever, and the rebuild would not end."""
    async with running() as w:
        await w.join()
        good = claim("good", 9)
        assert good.name is not None
        wrong = [
            Claim(Address(BlockId(7, 1), 0, 1), 1, good.name),
            Claim(Address(BlockId(7, 2), 1 << 63, 1), 1, None),
            claim("a", 3, 1 << 63),
            Claim(address(4), 1, good.name._replace(mtime_ns=-(1 << 63))),
            Claim(address(5), 1, good.name._replace(ctime_ns=1 << 63)),
            Claim(address(6), 1, good.name._replace(mode=1 << 32)),
            Claim(address(7), 1, good.name._replace(path="\ud800")),
        ]
        gather.check(wrong)
        assert take(w, *wrong, good) == {Outcome.MALFORMED: len(wrong), Outcome.NAMED: 1}
        assert tree(w) == {"good": 9}
        assert settle(w)["n1"].blocks == len(wrong), "they are kept, as blocks without a note are"
        with pytest.raises(InvalidRequest, match="too many"):
            gather.check([good] * (gather.MAX_CLAIMS + 1))


async def test_a_database_that_is_old_knows_better_what_it_has_seen() -> None:
    async with running() as w:
        await w.join()
        await w.put("a", address(1))
        known = claim("b", 1)._replace(name=NotedName("b", 0, 0, 0, 0, 1 << 62, Seen(1, 1)))
        assert take(w, known) == {Outcome.KNOWN: 1}
        assert tree(w) == {"a": 1}


async def test_an_old_database_is_judged_by_the_time_of_the_last_change() -> None:
    async with running() as w:
        await w.join()
        now = w.runtime.now_ns
        for i, path in enumerate(("renamed since", "replaced since", "replaced here", "in the way", "older")):
            await w.put(path, address(i + 1))
        await w.policy("renamed since", pinned=True)
        take(
            w,
            claim("renamed/to", 1, 5, ctime=now + 1),
            claim("replaced since", 12, 5, ctime=now + 1),
            claim("replaced here", 13, 5, ctime=now - 1),
            claim("in the way/of this", 14, 5, ctime=now + 1),
            claim("older/and so gone", 15, 5, ctime=now - 1),
        )
        assert tree(w) == {
            "renamed/to": 1, "replaced since": 12, "replaced here": 3, "in the way/of this": 14, "older": 5,
        }  # fmt: skip
        assert [policy.row.pinned for policy in w.master.policies(0, "renamed/to").policies] == [True]
        settle(w)


async def test_what_goes_on_where_the_database_ends_is_later_whatever_the_clocks_say() -> None:
    """Nobody has changed anything since, but for a master that clients have changed something at afterwards."""
    async with running() as w:
        await w.join()
        for i, path in enumerate(("renamed", "replaced", "in the way")):
            await w.put(path, address(i + 1))
        change = w.master._change()
        change.put(Cf.META, META_REBUILD, dump(RebuildRow("rebuild", HISTORY)))
        w.committer.write(change)
        take(w, claim("to", 1, 5), claim("replaced", 12, 6), claim("in the way/of this", 14, 7))
        assert tree(w) == {"to": 1, "replaced": 12, "in the way/of this": 14}
        settle(w)


async def test_what_died_here_stays_dead() -> None:
    """Owned, dead, never back (rule 10)."""
    async with running() as w:
        await w.join()
        await w.put("a", address(1))
        await w.remove("a")
        assert take(w, claim("b", 1, 5)) == {Outcome.DEAD: 1}
        with pytest.raises(NotFound):
            w.stat("b")
        settle(w)


PATHS = ("a", "b", "a/x", "a/y", "b/x", "b/x/y", "c", "c/../d", "")
BLOCKS = 4
CLAIMS = st.builds(claim, st.sampled_from(PATHS) | st.none(), st.integers(1, BLOCKS), st.integers(1, 12))
"""Two of one block may be from the same moment, and differ."""


def expected_of(page: Sequence[Claim]) -> dict[str, int]:
    """The latest name of each block; of those the latest of each path; and no file where a directory is."""
    latest: dict[int, tuple[int, str]] = {}
    for told, _, name in page:
        if name is not None and name.path not in ("", "c/../d"):
            block = told.block.counter
            latest[block] = max(latest.get(block, (0, "")), (name.at.sequence, name.path))
    files = {path: block for block, (_, path) in sorted(latest.items(), key=lambda item: item[1])}
    return {path: block for path, block in files.items() if not any(other.startswith(f"{path}/") for other in files)}


@settings(deadline=None)
@given(st.lists(CLAIMS, min_size=1, max_size=10), st.data())
async def test_any_order_of_any_claims_gives_the_same_tree(page: list[Claim], data: st.DataObject) -> None:
    """Renames, replacements, notes without a path, in pages of any size, some of them told twice."""
    async with running() as w, running() as other:
        for world, told in ((w, page), (other, data.draw(st.permutations(page + page[:3])))):
            await world.join()
            size = data.draw(st.integers(1, len(page)))
            for at in range(0, len(told), size):
                gathered(world, *told[at : at + size])
            place(world)
        assert tree(w) == tree(other)
        names, others = (dict(world.db.scan(Cf.NAMES, b"", None, 100)) for world in (w, other))
        assert names == others, "directories, attributes and inode numbers included"
        assert settle(w) == settle(other)


@settings(deadline=None)
@given(st.lists(CLAIMS, min_size=1, max_size=10))
async def test_the_latest_name_of_a_block_and_the_latest_block_of_a_name(page: list[Claim]) -> None:
    """Where no two are from the same moment."""
    assume(len({c.name.at.sequence for c in page if c.name}) == sum(1 for c in page if c.name))
    async with running() as w:
        await w.join()
        expected = expected_of(page)
        take(w, *page)
        assert tree(w) == expected
        named = {c.address.block.counter for c in page if c.name and c.name.path not in ("", "c/../d")}
        others = {c.address.block.counter for c in page} - named
        assert settle(w).get("n1", Unnamed()).blocks == len(others)
        assert dying(w).get(1, []) == sorted(named - set(expected.values())), "what lost its name"


async def test_a_name_that_its_block_left_is_free_for_another_one() -> None:
    """Whichever of the three is told first."""
    page = [claim("a", 1, 10), claim("a", 2, 5), claim("c", 1, 30)]
    for told in itertools.permutations(page):
        async with running() as w:
            await w.join()
            assert gathered(w, *told) == {Outcome.CLAIMED: 3}
            place(w)
            assert tree(w) == {"a": 2, "c": 1}
            settle(w)
