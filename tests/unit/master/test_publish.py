"""Publish: rules 9, 10, 13, 14, and the three modes."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.core.errors import (
    InvalidRequest,
    IsDirectory,
    KvError,
    NotDirectory,
    NotFound,
    Stale,
    TooLarge,
)
from kvstore.core.limits import MAX_BATCH
from kvstore.core.types import ROOT_INODE, Address, BlockId
from kvstore.master.master import Settings
from kvstore.master.namespace.publish import Mode, Name, Transaction
from kvstore.master.storage.db import Cf
from kvstore.master.storage.records import JournalLimits
from kvstore.master.workers.reports import Verdict
from tests.unit.master.world import address, running


async def test_a_new_file() -> None:
    async with running() as w:
        await w.join()
        published = await w.put("f", address(1))
        assert published.created
        assert w.stat("f") == published.entry
        assert published.entry.address == address(1)
        assert [r.endpoint for r in published.entry.replicas] == ["h1:1"]
        assert (published.entry.mode, published.entry.length_bytes) == (0o100644, 10)
        assert (published.entry.mtime_ns, published.entry.directory) == (w.runtime.now_ns, ROOT_INODE)


async def test_each_change_mints_an_inode() -> None:
    async with running() as w:
        await w.join()
        first = (await w.put("f", address(1))).entry.inode
        second = (await w.put("f", address(2))).entry.inode
        assert second > first
        with pytest.raises(Stale):
            w.stat("", base=first)
        assert w.stat("", base=second).address == address(2)


async def test_an_empty_file_exists_and_has_no_block() -> None:
    async with running() as w:
        entry = (await w.put("f", None)).entry
        assert (entry.address, entry.replicas, entry.length_bytes) == (None, (), 0)
        assert await w.names() == ["f"]


async def test_the_replaced_block_dies_and_its_holder_is_told() -> None:
    async with running() as w:
        await w.join()
        await w.put("f", address(1))
        await w.put("f", address(2))
        orders = await w.beat()
        assert list(orders.unlink) == [address(1).block.pack()]
        assert (await w.beat()).unlink == orders.unlink, "repeated until it is reported nowhere"
        assert (await w.report(held=[(address(1), 1), (address(2), 1)])).held.verdicts == [Verdict.DEAD, Verdict.OWNED]
        await w.report(nowhere=[address(1)])
        assert (await w.beat()).unlink == []


async def test_the_same_publish_again_is_the_same_answer() -> None:
    async with running() as w:
        await w.join()
        first = await w.put("f", address(1))
        assert await w.put("f", address(1)) == first
        await w.report(held=[(address(1), 1)], fence=100)
        assert await w.put("f", address(1)) == first, "also when the fence has passed it meanwhile"


async def test_an_id_is_published_at_most_once() -> None:
    async with running() as w:
        await w.join()
        await w.put("f", address(1))
        with pytest.raises(Stale, match="published before"):
            await w.put("g", address(1))
        await w.put("f", address(2))
        for path in ("f", "g"):
            with pytest.raises(Stale, match="dead"):
                await w.put(path, address(1))


async def test_a_late_retry_of_a_publish_that_was_replaced_is_stale() -> None:
    async with running() as w:
        await w.join()
        await w.put("f", address(1))
        await w.put("f", address(2))
        with pytest.raises(Stale):
            await w.put("f", address(1))
        assert w.stat("f").address == address(2)


async def test_below_the_fence_and_from_an_unknown_start() -> None:
    async with running() as w:
        await w.join()
        await w.report(fence=5)
        with pytest.raises(Stale, match="given up"):
            await w.put("f", address(4))
        with pytest.raises(Stale, match="not known"):
            await w.put("f", address(9, boot=8))
        assert (await w.put("f", address(5))).created


async def test_a_volume_that_is_not_in_service() -> None:
    async with running() as w:
        await w.join()
        with pytest.raises(Stale, match="not in service"):
            await w.put("f", address(1), volume=99)
        w.die()
        with pytest.raises(Stale, match="not in service"):
            await w.put("f", address(1))


@pytest.mark.parametrize(("length", "error"), [(0, InvalidRequest), ((1 << 30) + 1, TooLarge), (2**64 - 1, TooLarge)])
async def test_lengths_that_cannot_be(length: int, error: type[KvError]) -> None:
    async with running() as w:
        await w.join()
        with pytest.raises(error):
            await w.put("f", address(1, length=length))


async def test_equal_content_keeps_the_entry_and_drops_the_block() -> None:
    async with running() as w:
        await w.join()
        first = await w.put("f", address(1, digest=5))
        second = await w.put("f", address(2, digest=5))
        assert not second.created
        assert second.entry == first.entry
        assert list((await w.beat()).unlink) == [address(2).block.pack()]


@pytest.mark.parametrize("mode", [Mode.REPLACE, Mode.IF_ABSENT])
async def test_equal_content_replaces_what_its_writer_could_not_read(mode: Mode) -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2)
        first = await w.put("f", address(1))
        equal = address(2, boot=14, digest=address(1).hash)
        again = await w.put("f", equal, 2, mode=mode, name={"replace_equal": True})
        assert again.created
        assert again.entry.inode != first.entry.inode
        assert [r.volume for r in w.stat("f").replicas] == [2]
        assert list((await w.beat(1)).unlink) == [address(1).block.pack()], "what nobody could read goes"


async def test_equal_content_without_a_live_replica_is_published() -> None:
    async with running() as w:
        await w.join(1)
        await w.join(2)
        await w.put("f", address(1, digest=5))
        for _ in range(5):
            w.master.tick()
            await w.beat(2)
        again = Address(BlockId(14, 1), 10, 5)
        assert (await w.put("f", again, volume=2)).created
        assert w.stat("f").address == again


async def test_equal_content_may_bring_other_attributes() -> None:
    async with running() as w:
        await w.join()
        first = (await w.put("f", address(1, digest=5))).entry
        second = await w.put("f", address(2, digest=5), name={"mode": 0o755, "uid": 3, "mtime_ns": 77})
        assert not second.created
        assert second.entry == first._replace(mode=0o100755, uid=3, mtime_ns=77)
        third = await w.put("f", address(3, digest=5), name={"mode": 0o600, "keep_attributes": True})
        assert third.entry == second.entry


async def test_if_absent_returns_what_is_there() -> None:
    async with running() as w:
        await w.join()
        first = await w.put("f", address(1), mode=Mode.IF_ABSENT)
        assert first.created
        second = await w.put("f", address(2), mode=Mode.IF_ABSENT)
        assert not second.created
        assert second.entry == first.entry
        assert list((await w.beat()).unlink) == [address(2).block.pack()], "nobody needs the loser's block"
        assert (await w.put("f", address(1), mode=Mode.IF_ABSENT)).created, "the winner's own retry"


async def test_if_absent_where_the_only_replica_is_gone() -> None:
    async with running() as w:
        await w.join(1)
        await w.put("f", address(1))
        w.die()
        await w.join(2)
        assert (await w.put("f", address(1, boot=14), volume=2, mode=Mode.IF_ABSENT)).created


async def test_if_present() -> None:
    async with running() as w:
        await w.join()
        await w.put("f", address(1), name={"mode": 0o600})
        await w.put("f", address(2), mode=Mode.IF_PRESENT, name={"keep_attributes": True})
        assert (w.stat("f").address, w.stat("f").mode) == (address(2), 0o100600)
        await w.remove("f")
        with pytest.raises(Stale, match="removed meanwhile"):
            await w.put("f", address(3), mode=Mode.IF_PRESENT)
        assert await w.names() == []


async def test_if_present_after_the_node_of_the_open_file_died() -> None:
    """Nobody removed the name: the close of the file brings new bytes, and must not lose them."""
    async with running() as w:
        await w.join(1)
        await w.put("f", address(1), name={"mode": 0o600})
        w.die()
        await w.join(2)
        name = {"keep_attributes": True}
        entry = (await w.put("f", address(1, boot=14), volume=2, mode=Mode.IF_PRESENT, name=name)).entry
        assert entry.mode == 0o100600


async def test_transactions_are_all_or_nothing_and_see_each_other() -> None:
    async with running() as w:
        await w.join()
        before = w.master.counters()
        results = await w.master.publish(
            0,
            [
                Transaction(Mode.REPLACE, [Name("a", address(1), 1), Name("b", address(2), 99)]),
                Transaction(Mode.REPLACE, [Name("d/x", address(3), 1), Name("d/y", address(4), 1)], parents=True),
                Transaction(Mode.IF_ABSENT, [Name("d/x", address(5), 1)]),
                Transaction(Mode.REPLACE, [Name("d/x", address(3), 1)]),
            ],
        )
        assert isinstance(results[0], Stale)
        assert [[p.created for p in r] for r in results[1:] if not isinstance(r, KvError)] == [
            [True, True], [False], [True]
        ]  # fmt: skip
        assert await w.names() == ["d"]
        assert await w.names("d") == ["x", "y"]
        after = w.master.counters()
        assert (after.files - before.files, after.directories - before.directories) == (2, 1)
        assert (await w.put("a", address(1))).created, "the failed transaction has not used up its blocks"


async def test_one_name_twice_in_a_transaction() -> None:
    async with running() as w:
        await w.join()
        names = [Name("f", address(1), 1), Name("f", address(2), 1)]
        [result] = await w.master.publish(0, [Transaction(Mode.REPLACE, names)])
        assert not isinstance(result, KvError)
        assert w.stat("f") == result[1].entry
        assert list((await w.beat()).unlink) == [address(1).block.pack()]


@pytest.mark.parametrize(
    ("path", "error"),
    [("d", IsDirectory), ("f/x", NotDirectory), ("no/x", NotFound), ("a/../b", InvalidRequest), ("", IsDirectory)],
)
async def test_where_it_cannot_go(path: str, error: type[KvError]) -> None:
    async with running() as w:
        await w.join()
        await w.mkdir("d")
        await w.put("f", None)
        with pytest.raises(error):
            await w.put(path, address(1))


async def test_too_many_names() -> None:
    async with running() as w:
        names = [Name(f"{i}", None) for i in range(MAX_BATCH + 1)]
        with pytest.raises(InvalidRequest, match="too many"):
            await w.master.publish(0, [Transaction(Mode.REPLACE, names)])
        assert await w.names() == []


async def test_a_directory_s_times_show_what_came_and_went() -> None:
    async with running() as w:
        await w.mkdir("d")
        for change in (w.put("d/f", None), w.rename("d/f", "d/g"), w.remove("d/g"), w.mkdir("d/s")):
            w.runtime.now_ns += 1000
            await change
            assert w.stat("d").mtime_ns == w.stat("d").ctime_ns == w.runtime.now_ns


async def test_reports_never_create() -> None:
    async with running() as w:
        await w.join()
        assert (await w.report(held=[(address(1), 1)])).held.verdicts == [Verdict.UNKNOWN]
        assert w.db.scan(Cf.BLOCKS, b"", None, 10) == []


async def test_a_row_of_the_journal_for_each_change() -> None:
    async with running() as w:
        await w.join()
        await w.mkdir("d")
        await w.put("d/f", address(1))
        await w.rename("d/f", "g")
        await w.remove("g")
        events, first = await w.master.events(0, 10)
        assert [(e.kind, e.path, e.to_path) for e in events] == [
            ("node", "n1", ""), ("mkdir", "d", ""), ("publish", "d/f", ""), ("rename", "d/f", "g"), ("remove", "g", ""),
        ]  # fmt: skip
        assert (first, [e.sequence for e in events]) == (1, [1, 2, 3, 4, 5])
        assert events[2].address == address(1)
        assert [e.sequence for e in (await w.master.events(3, 10))[0]] == [4, 5]
        assert [e.sequence for e in (await w.master.events(0, 2))[0]] == [4, 5]
        assert (await w.master.events(2**64 - 1, 2))[0] == []


async def test_the_journal_is_bounded() -> None:
    async with running(settings=Settings(journal=JournalLimits(10, 1 << 20))) as w:
        for i in range(50):
            await w.put(f"{i}", None)
        assert [e.path for e in (await w.master.events(0, 100))[0]] == [f"{i}" for i in range(40, 50)]
    async with running(settings=Settings(journal=JournalLimits(1000, 500))) as w:
        for i in range(50):
            await w.put(f"{i}", None)
        counters = w.master.counters()
        rows = w.db.scan(Cf.JOURNAL, b"", None, 100)
        assert sum(len(v) for _, v in rows) == counters.journal_bytes <= 500
        assert msgspec.structs.asdict(counters)["journal_first"] == counters.sequence - len(rows) + 1
