"""Walking the names: bases, paths, and what exists (rule 14). Reads only, but for what a directory's change does to
its times.

A file whose block has no live replica does not exist, for every operation: `find` and `get` do not see it, `stored`
does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvstore.core import paths
from kvstore.core.errors import InvalidRequest, NotDirectory, NotEmpty, NotFound, Overloaded, Stale
from kvstore.core.types import ROOT_INODE, Entry, Replica
from kvstore.master.namespace import blocks, policies
from kvstore.master.storage import journal
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, Pair, Reader
from kvstore.master.storage.records import (
    BLOCK,
    INODE,
    NAME,
    S_IFDIR,
    InodeRow,
    NameRow,
    dump,
    name_key,
    pack_u64,
    prefix_end,
)

HIDDEN_STEP = 4096
"""Entries without a live replica that one removal of a directory takes with it; more need another call (Overloaded)."""
HIDDEN_PAGES = 16
Live = Mapping[int, Replica]


class Place(NamedTuple):
    """Where an entry is, or would be."""

    parent: int
    name: str


ROOT = Place(0, "")


class Tree:
    """The names as `reader` has them, with the replicas that `live` counts."""

    def __init__(self, reader: Reader, live: Live) -> None:
        self.reader = reader
        self.live = live

    def stored(self, place: Place) -> NameRow | None:
        value = self.reader.get(Cf.NAMES, name_key(*place))
        return None if value is None else NAME.load(value)

    def replicas(self, row: NameRow) -> tuple[Replica, ...]:
        block = blocks.read(self.reader, row.block) if row.block else None
        live = self.live
        return tuple(live[v] for v in block.volumes if v in live) if block is not None else ()

    def exists(self, row: NameRow) -> bool:
        return not row.block or bool(self.replicas(row))

    def find(self, place: Place) -> NameRow | None:
        row = self.stored(place)
        return row if row is not None and self.exists(row) else None

    def get(self, place: Place) -> NameRow:
        """Raises NotFound with its reason: no_name or no_replica."""
        row = self.stored(place)
        if row is None:
            raise NotFound(f"{place.name!r} does not exist")
        if not self.exists(row):
            raise NotFound(f"{place.name!r} has no live replica", reason="no_replica")
        return row

    def entry(self, place: Place, row: NameRow) -> Entry:
        return to_entry(row, place.parent, self.replicas(row))

    def locate(self, inode: int) -> Place:
        """Where an inode is, 0 being the root. Raises Stale when it is gone."""
        if inode in (0, ROOT_INODE):
            return ROOT
        at = self.inode(inode)
        if at is None:
            raise Stale(f"inode {inode} does not exist any more; look it up again")
        return Place(at.parent, at.name)

    def inode(self, inode: int) -> InodeRow | None:
        value = self.reader.get(Cf.INODES, pack_u64(inode))
        return None if value is None else INODE.load(value)

    def base(self, inode: int) -> int:
        """The base of a path that is not empty. Raises Stale when it is gone, NotDirectory when it is a file."""
        if inode in (0, ROOT_INODE):
            return ROOT_INODE
        row = self.stored(self.locate(inode))
        if row is None:
            raise Stale(f"inode {inode} does not exist any more; look it up again")
        if not row.is_dir:
            raise NotDirectory(f"the base, inode {inode}, is a file")
        return inode

    def directory(self, base: int, parts: Sequence[str]) -> int:
        """The inode of an existing directory. Raises Stale, NotFound, NotDirectory."""
        at = self.base(base)
        for name in parts:
            row = self.get(Place(at, name))
            if not row.is_dir:
                raise NotDirectory(f"{name!r} is a file, not a directory")
            at = row.inode
        return at

    def place(self, base: int, path: str) -> Place:
        """Where `path` is or would be; its directory exists."""
        parts = paths.split(path)
        if not parts:
            return self.locate(base)
        return Place(self.directory(base, parts[:-1]), parts[-1])

    def children(self, directory: int, after: str, limit: int) -> list[Pair]:
        """Rows of a directory behind the name `after`, ordered by the bytes of their names, hidden ones too."""
        start = name_key(directory, after) + (b"\0" if after else b"")
        return self.reader.scan(Cf.NAMES, start, prefix_end(directory), limit)

    def visible(self, rows: Sequence[NameRow]) -> list[tuple[Replica, ...] | None]:
        """Per row its live replicas; None for one that does not exist (rule 14)."""
        ids = [row.block for row in rows if row.block]
        if not ids:
            return [()] * len(rows)
        found = iter(self.reader.get_many(Cf.BLOCKS, ids))
        live, load = self.live, BLOCK.load
        result: list[tuple[Replica, ...] | None] = []
        for row in rows:
            if not row.block:
                result.append(())
                continue
            stored = next(found)
            holders = () if stored is None else load(stored).volumes
            result.append(tuple([live[v] for v in holders if v in live]) or None)
        return result


def to_entry(row: NameRow, parent: int, replicas: tuple[Replica, ...]) -> Entry:
    return Entry(
        row.inode, row.mode, row.uid, row.gid, row.length_bytes, row.mtime_ns, row.ctime_ns,
        row.address, replicas, parent,
    )  # fmt: skip


def put(change: Change, place: Place, row: NameRow) -> None:
    change.put(Cf.NAMES, name_key(*place), dump(row))


def put_new(change: Change, place: Place, row: NameRow, policy: int = 0) -> None:
    """An entry where none is stored, or with a new inode. `policy`: its own."""
    put(change, place, row)
    change.put(Cf.INODES, pack_u64(row.inode), dump(InodeRow(place.parent, place.name, policy)))


def erase(change: Change, place: Place, row: NameRow) -> None:
    """Take an entry away: its block dies. A directory must be empty."""
    policies.forget(change, policies.own(change, row.inode), is_dir=row.is_dir)
    change.delete(Cf.NAMES, name_key(*place))
    change.delete(Cf.INODES, pack_u64(row.inode))
    if row.is_dir:
        change.counters.directories -= 1
    else:
        change.counters.files -= 1
    if row.block:
        blocks.bury(change, row.block)


def touch(change: Change, directory: int) -> None:
    """A name came or went: the directory's times, once in a change."""
    if directory in change.touched:
        return
    tree = Tree(change, {})
    place = tree.locate(directory)
    row = tree.stored(place)
    assert row is not None, "only existing directories change"
    put(change, place, msgspec.structs.replace(row, mtime_ns=change.now_ns, ctime_ns=change.now_ns))
    change.touched.add(directory)


def make_root(change: Change) -> None:
    row = NameRow(ROOT_INODE, S_IFDIR | 0o755, 0, 0, 0, change.now_ns, change.now_ns)
    put_new(change, ROOT, row)
    change.counters.directories += 1


def make_empty(change: Change, live: Live, directory: int) -> None:
    """Take hidden entries out of a directory that is to go.

    Raises NotEmpty when something in it exists, and Overloaded when there were too many hidden ones for one step:
    what was taken out by then is worth keeping, and the caller comes again.
    """
    tree = Tree(change, live)
    check_nothing_visible(tree, directory)
    found = tree.children(directory, "", HIDDEN_STEP)
    for key, value in found:
        place, row = Place(directory, key[8:].decode()), NAME.load(value)
        erase(change, place, row)
        journal.append(change, "remove", *place, row.inode, row)
    if len(found) == HIDDEN_STEP:
        raise Overloaded("the directory holds very many entries without a live replica; try again to remove the rest")


def check_nothing_visible(tree: Tree, directory: int) -> None:
    """Raises NotEmpty at the first entry that exists, and behind HIDDEN_STEP × HIDDEN_PAGES hidden ones (0.2 s): more
    may exist there, and hidden names must not go for a rmdir that then fails.
    """
    after = ""
    for _ in range(HIDDEN_PAGES):
        found = tree.children(directory, after, HIDDEN_STEP)
        if any(replicas is not None for replicas in tree.visible([NAME.load(value) for _, value in found])):
            raise NotEmpty("the directory is not empty")
        if len(found) < HIDDEN_STEP:
            return
        after = found[-1][0][8:].decode()
    raise NotEmpty(
        f"the directory holds more than {HIDDEN_STEP * HIDDEN_PAGES} names whose nodes are away; "
        "remove it when they are back or forgotten"
    )


def check_not_root(place: Place, what: str) -> None:
    if place == ROOT:
        raise InvalidRequest(f"the root cannot be {what}")
