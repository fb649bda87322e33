"""Lookup, mkdir, remove, rename, setattr, list; bases and what exists."""

from __future__ import annotations

import pytest

from kvstore.core.errors import (
    AlreadyExists,
    InvalidRequest,
    IsDirectory,
    KvError,
    NameTooLong,
    NotDirectory,
    NotEmpty,
    NotFound,
    Overloaded,
    Stale,
)
from kvstore.core.limits import MAX_BATCH
from kvstore.master.namespace import tree
from kvstore.master.namespace.lookup import Lookups
from kvstore.master.namespace.remove import Kind
from kvstore.master.namespace.rename import Move
from tests.unit.master.world import World, address, running


async def furnish(w: World) -> None:
    """file, other: files with content;  empty: a file;  dir/in: a file;  bare: an empty directory."""
    await w.join()
    await w.put("file", address(1))
    await w.put("other", address(2))
    await w.put("empty", None)
    await w.put("dir/in", address(3), parents=True)
    await w.mkdir("bare")


@pytest.mark.parametrize("path", ["dir/in", "/dir/in", "dir//in", "dir/in/"])
async def test_spellings_of_one_path(path: str) -> None:
    async with running() as w:
        await furnish(w)
        assert w.stat(path).address == address(3)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("no", NotFound), ("no/x", NotFound), ("file/x", NotDirectory), (".", InvalidRequest), ("a/..", InvalidRequest),
        ("x\0", InvalidRequest), ("x" * 256, NameTooLong), ("é" * 128, NameTooLong), ("x/" * 3000, NameTooLong),
        ("d/" * 300 + "x", NameTooLong),
    ],
)  # fmt: skip
async def test_rows_of_a_lookup_fail_alone(path: str, error: type[KvError]) -> None:
    async with running() as w:
        await furnish(w)
        good, bad, more = w.master.lookup(0, ["file", path, "dir/in"])
        assert not isinstance(good, KvError)
        assert not isinstance(more, KvError)
        assert type(bad) is error


async def test_bases() -> None:
    async with running() as w:
        await furnish(w)
        directory, file = w.stat("dir"), w.stat("file")
        assert w.stat("in", base=directory.inode).address == address(3)
        assert w.stat("", base=file.inode) == file
        assert w.stat("", base=0) == w.stat("/", base=1)
        with pytest.raises(NotDirectory):
            w.stat("x", base=file.inode)
        for path in ("", "x"):
            with pytest.raises(Stale):
                w.stat(path, base=12345)
        await w.rename("dir", "bare/moved")
        assert w.stat("in", base=directory.inode).address == address(3)
        await w.remove("bare/moved/in")
        await w.remove("", base=directory.inode)
        with pytest.raises(Stale):
            w.stat("in", base=directory.inode)


async def test_a_batch_that_is_too_large() -> None:
    async with running() as w:
        paths = ["x"] * (MAX_BATCH + 1)
        with pytest.raises(InvalidRequest):
            w.master.lookup(0, paths)
        with pytest.raises(InvalidRequest):
            await w.master.mkdir(0, paths, False, 0, 0, 0)
        with pytest.raises(InvalidRequest):
            await w.master.remove(0, [("x", Kind.ANY, 0)] * (MAX_BATCH + 1))
        with pytest.raises(InvalidRequest):
            await w.master.rename([Move(0, "a", 0, "b")] * (MAX_BATCH + 1))


# ---- mkdir


async def test_mkdir() -> None:
    async with running() as w:
        await furnish(w)
        assert (await w.mkdir("new", mode=0o700)).mode == 0o040700
        assert (await w.mkdir("deep/er/est", parents=True)).mode == 0o040755
        assert (await w.mkdir("deep/er", parents=True)).inode == w.stat("deep/er").inode
        assert (await w.mkdir("", parents=True)).inode == 1
        assert w.master.counters().directories == 7  # root, dir, bare, new, deep, er, est


@pytest.mark.parametrize(
    ("path", "parents", "error"),
    [
        ("dir", False, AlreadyExists), ("file", False, AlreadyExists), ("file", True, AlreadyExists),
        ("file/x", True, NotDirectory), ("no/x", False, NotFound), ("", False, AlreadyExists),
    ],
)  # fmt: skip
async def test_mkdir_refused(path: str, parents: bool, error: type[KvError]) -> None:
    async with running() as w:
        await furnish(w)
        with pytest.raises(error):
            await w.mkdir(path, parents=parents)


async def test_rows_of_one_mkdir_see_each_other() -> None:
    async with running() as w:
        results = await w.master.mkdir(0, ["a", "a/b", "no/c", "a"], False, 0, 0, 0)
        assert [type(r).__name__ for r in results] == ["Entry", "Entry", "NotFound", "AlreadyExists"]


# ---- remove


async def test_remove() -> None:
    async with running() as w:
        await furnish(w)
        await w.remove("file")
        await w.remove("bare", Kind.DIRECTORY)
        await w.remove("empty", Kind.FILE)
        assert await w.names() == ["dir", "other"]
        assert list((await w.beat()).unlink) == [address(1).block.pack()]
        assert w.master.counters().files == 2


@pytest.mark.parametrize(
    ("path", "kind", "error"),
    [
        ("no", Kind.ANY, NotFound), ("dir", Kind.ANY, NotEmpty), ("dir", Kind.FILE, IsDirectory),
        ("file", Kind.DIRECTORY, NotDirectory), ("", Kind.ANY, InvalidRequest), ("file/x", Kind.ANY, NotDirectory),
    ],
)  # fmt: skip
async def test_remove_refused(path: str, kind: Kind, error: type[KvError]) -> None:
    async with running() as w:
        await furnish(w)
        with pytest.raises(error):
            await w.remove(path, kind)


async def test_remove_of_the_one_that_is_meant() -> None:
    async with running() as w:
        await furnish(w)
        inode = w.stat("file").inode
        await w.put("file", address(9))
        with pytest.raises(NotFound, match="another one"):
            await w.remove("file", inode=inode)
        await w.remove("file", inode=w.stat("file").inode)


# ---- rename: the table of rename(2)


@pytest.mark.parametrize(
    ("source", "target", "error"),
    [
        ("no", "x", NotFound),
        ("file", "no/x", NotFound),
        ("file", "other/x", NotDirectory),
        ("file", "dir", IsDirectory),
        ("file", "bare", IsDirectory),
        ("dir", "file", NotDirectory),
        ("bare", "dir", NotEmpty),
        ("dir", "dir/sub", InvalidRequest),
        ("dir", "dir/in", InvalidRequest),
        ("dir/in", "dir", IsDirectory),
        ("", "x", InvalidRequest),
        ("dir", "", InvalidRequest),
        ("file", "", InvalidRequest),
        ("file", "x" * 256, NameTooLong),
        ("file", "..", InvalidRequest),
    ],
)
async def test_rename_refused(source: str, target: str, error: type[KvError]) -> None:
    async with running() as w:
        await furnish(w)
        before = await w.names()
        with pytest.raises(error):
            await w.rename(source, target)
        assert await w.names() == before


@pytest.mark.parametrize(
    ("source", "target"),
    [("file", "new"), ("file", "other"), ("file", "dir/in"), ("dir/in", "empty"), ("file", "dir/x")],
)
async def test_rename_of_a_file(source: str, target: str) -> None:
    async with running() as w:
        await furnish(w)
        moved = w.stat(source)
        files = w.master.counters().files - (0 if target in ("new", "dir/x") else 1)
        await w.rename(source, target)
        now = w.stat(target)
        assert (now.inode, now.address, now.mtime_ns) == (moved.inode, moved.address, moved.mtime_ns)
        assert w.master.counters().files == files
        with pytest.raises(NotFound):
            w.stat(source)


@pytest.mark.parametrize("target", ["new", "bare", "bare/sub"])
async def test_rename_of_a_directory_takes_everything_along(target: str) -> None:
    async with running() as w:
        await furnish(w)
        inode = w.stat("dir").inode
        await w.rename("dir", target)
        assert w.stat(target).inode == inode
        assert w.stat(f"{target}/in").address == address(3)


async def test_rename_replaces_and_the_replaced_block_dies() -> None:
    async with running() as w:
        await furnish(w)
        await w.rename("file", "other")
        assert list((await w.beat()).unlink) == [address(2).block.pack()]


async def test_rename_onto_itself() -> None:
    async with running() as w:
        await furnish(w)
        before = w.stat("file")
        await w.rename("file", "file")
        assert w.stat("file") == before
        with pytest.raises(AlreadyExists):
            await w.rename("file", "file", no_replace=True)


async def test_rename_without_replacing() -> None:
    async with running() as w:
        await furnish(w)
        for target in ("other", "dir", ""):
            with pytest.raises(AlreadyExists):
                await w.rename("file", target, no_replace=True)
        await w.rename("file", "new", no_replace=True)


async def test_rename_of_the_one_that_is_meant() -> None:
    async with running() as w:
        await furnish(w)
        inode = w.stat("file").inode
        await w.rename("other", "file")
        with pytest.raises(NotFound, match="another one"):
            await w.rename("file", "x", inode=inode)


# ---- attributes


async def test_set_attributes() -> None:
    async with running() as w:
        await furnish(w)
        before = w.stat("file")
        w.runtime.now_ns += 5
        after = await w.master.set_attributes(0, "file", 0o7777, 1, 2, 3)
        expected = before._replace(mode=0o107777, uid=1, gid=2, mtime_ns=3, ctime_ns=w.runtime.now_ns)
        assert after == expected == w.stat("file")
        assert await w.master.set_attributes(before.inode, "", None, None, None, None) == after
        assert (await w.master.set_attributes(0, "dir", 0o100000 | 0o700, None, None, None)).is_dir
        with pytest.raises(InvalidRequest):
            await w.master.set_attributes(0, "file", None, None, None, -(2**63))
        with pytest.raises(NotFound):
            await w.master.set_attributes(0, "no", 0, None, None, None)


# ---- list


async def test_list_is_ordered_by_bytes_and_resumable() -> None:
    async with running() as w:
        names = sorted(["a", "a-", "aa", "b", "é", "Z", "z\x7f", "日本"], key=str.encode)
        for name in reversed(names):
            await w.put(name, None)
        assert await w.names() == names
        for i, name in enumerate(names):
            assert await w.names(after=name) == names[i + 1 :]
            assert await w.names(limit=i + 1) == names[: i + 1]
        assert await w.names(after="aaa") == names[names.index("aa") + 1 :], "the name need not exist (any more)"


async def test_list_over_many_pages() -> None:
    async with running() as w:
        names = [f"{i:05d}" for i in range(2500)]
        await w.master.mkdir(0, names, False, 0, 0, 0)
        assert await w.names() == names
        pages = [page async for page, _ in w.master.list(0, "", "", 0, True)]
        assert [len(p) for p in pages] == [1024, 1024, 452]
        assert await w.names(limit=2000) == names[:2000]


async def test_list_of_names_only() -> None:
    async with running() as w:
        await furnish(w)
        [(names, entries)] = [page async for page in w.master.list(0, "", "", 0, True)]
        assert names == ["bare", "dir", "empty", "file", "other"]
        for name, entry in zip(names, entries, strict=True):
            full = w.stat(name)
            assert (entry.inode, entry.mode) == (full.inode, full.mode)
            assert (entry.address, entry.length_bytes) == (None, 0)


@pytest.mark.parametrize(
    ("path", "after", "error"),
    [("file", "", NotDirectory), ("no", "", NotFound), ("", "a/b", InvalidRequest), ("", "..", InvalidRequest)],
)
async def test_list_refused(path: str, after: str, error: type[KvError]) -> None:
    async with running() as w:
        await furnish(w)
        with pytest.raises(error):
            await w.names(path, after=after)


async def test_a_directory_that_goes_while_it_is_listed() -> None:
    async with running() as w:
        await w.mkdir("d")
        await w.master.mkdir(0, [f"d/{i}" for i in range(1500)], False, 0, 0, 0)
        pages = w.master.list(0, "d", "", 0, True)
        await anext(pages)
        await w.master.remove(0, [(f"d/{i}", Kind.ANY, 0) for i in range(1500)])
        await w.remove("d")
        with pytest.raises(Stale):
            await anext(pages)


# ---- rule 14: without a live replica it does not exist


async def hide(w: World) -> None:
    await furnish(w)
    w.die()
    await w.join(2)


async def test_what_a_dead_node_hides() -> None:
    async with running() as w:
        await hide(w)
        with pytest.raises(NotFound) as caught:
            w.stat("file")
        assert caught.value.reason == "no_replica"
        with pytest.raises(NotFound) as caught:
            w.stat("no")
        assert caught.value.reason == "no_name"
        assert await w.names() == ["bare", "dir", "empty"]
        assert await w.names("dir") == []
        for refused in (w.remove("file"), w.rename("file", "x"), w.put("file/x", None)):
            with pytest.raises(NotFound):
                await refused


async def test_hidden_names_are_free() -> None:
    async with running() as w:
        await hide(w)
        await w.rename("empty", "file", no_replace=True)
        await w.mkdir("other")
        await w.remove("dir", Kind.DIRECTORY)
        assert await w.names() == ["bare", "file", "other"]
        await w.join(1, boot=70, fences={7: 0, 70: 0})
        assert await w.names() == ["bare", "file", "other"], "what was replaced does not come back"


async def test_what_goes_with_a_directory_is_in_the_journal() -> None:
    async with running() as w:
        await hide(w)
        await w.remove("dir", Kind.DIRECTORY)
        events, _ = await w.master.events(0, 100)
        assert [(e.kind, e.path) for e in events[-2:]] == [("remove", "?/in"), ("remove", "dir")]


async def test_a_death_hides_and_never_deletes() -> None:
    async with running() as w:
        await hide(w)
        await w.beat(1)
        assert w.stat("file").address == address(1)
        assert await w.names("dir") == ["in"]


async def test_a_rmdir_that_fails_takes_nothing_with_it() -> None:
    async with running() as w:
        await hide(w)
        await w.put("dir/visible", None)
        with pytest.raises(NotEmpty):
            await w.remove("dir")
        await w.beat(1)
        assert await w.names("dir") == ["in", "visible"]


async def test_a_rmdir_that_cannot_see_all_hidden_entries_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "HIDDEN_STEP", 2)
    monkeypatch.setattr(tree, "HIDDEN_PAGES", 2)
    async with running() as w:
        await w.join(1)
        await w.join(2)
        await w.mkdir("d")
        for i in range(5):
            await w.put(f"d/{i}", address(i + 1))
        await w.put("d/z", address(1, boot=14, digest=99), 2)
        for _ in range(w.master.settings.dead_ticks):
            w.master.tick()
            await w.beat(2)
        with pytest.raises(NotEmpty, match="more than 4 names"):
            await w.remove("d")
        await w.beat(1)
        assert all(w.stat(f"d/{i}").replicas for i in range(5)), "the node is back, and so are its names"


async def test_a_rmdir_of_very_many_hidden_entries_goes_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "HIDDEN_STEP", 10)
    async with running() as w:
        await w.join()
        await w.mkdir("d")
        for i in range(25):
            await w.put(f"d/{i}", address(i))
        w.die()
        for left in (15, 5):
            with pytest.raises(Overloaded):
                await w.remove("d")
            assert w.master.counters().files == left
        await w.remove("d")
        assert await w.names() == []


async def test_lookup_counts_the_caller_s_own_node() -> None:
    async with running() as w:
        await hide(w)
        assert [r.node for r in w.stat("file", node="n1").replicas] == ["n1"]
        with pytest.raises(NotFound):
            w.stat("file", node="n2")
        with pytest.raises(NotFound):
            w.stat("file", node="stranger")


async def test_lookups_are_counted_by_whether_the_cache_had_them() -> None:
    async with running() as w:
        await w.join()
        await w.put("here", address(1))
        await w.put("hidden", address(2))
        w.master.lookup(0, ["here", "none", "no/directory", "here/below", "../bad"])
        assert w.master.lookups == Lookups(found=1, not_found=2), "what is no name tells nothing"
        w.die()
        w.master.lookup(0, ["here", "hidden"])
        assert w.master.lookups == Lookups(found=1, not_found=4), "a name without a live replica is a miss"
        w.master.lookup(0, [""])
        assert w.master.lookups == Lookups(found=2, not_found=4)
