"""Making directories."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core import paths
from kvstore.core.errors import AlreadyExists, InvalidRequest, NotDirectory
from kvstore.core.types import Entry
from kvstore.master.namespace import tree
from kvstore.master.namespace.tree import Live, Place, Tree
from kvstore.master.storage import journal
from kvstore.master.storage.change import Change
from kvstore.master.storage.records import PERMISSIONS, S_IFDIR, NameRow

DEFAULT_MODE = 0o755


def mkdir(
    change: Change,
    live: Live,
    base: int,
    path: str,
    *,
    parents: bool = False,
    mode: int = 0,
    uid: int = 0,
    gid: int = 0,
) -> Entry:
    """The new directory; with `parents` an existing one, too. Raises AlreadyExists, NotFound, NotDirectory, Stale."""
    view = Tree(change, live)
    parts = paths.split(path)
    if parents and len(parts) > 1:
        make_directories(change, view, base, parts[:-1])
    place = view.place(base, path)
    existing = view.find(place)
    if existing is None:
        if not place.name:
            raise InvalidRequest("a directory needs a name")
        return make_one(change, view, place, mode, uid, gid)
    if not (parents and existing.is_dir):
        raise AlreadyExists(f"{path!r} exists")
    return view.entry(place, existing)


def make_directories(change: Change, view: Tree, base: int, parts: Sequence[str]) -> int:
    """The inode of the directory at the end of `parts`, making those that are missing. Raises NotDirectory, Stale."""
    at = view.base(base)
    for name in parts:
        place = Place(at, name)
        row = view.find(place)
        if row is not None and not row.is_dir:
            raise NotDirectory(f"{name!r} is a file, not a directory")
        at = row.inode if row is not None else make_one(change, view, place, DEFAULT_MODE, 0, 0).inode
    return at


def make_one(change: Change, view: Tree, place: Place, mode: int, uid: int, gid: int) -> Entry:
    """A directory where nothing exists; a hidden file in its place goes (rule 14)."""
    hidden = view.stored(place)
    if hidden is not None:
        tree.erase(change, place, hidden)
    bits = mode & PERMISSIONS or DEFAULT_MODE
    row = NameRow(change.mint(), S_IFDIR | bits, uid, gid, 0, change.now_ns, change.now_ns)
    tree.put_new(change, place, row)
    tree.touch(change, place.parent)
    change.counters.directories += 1
    journal.append(change, "mkdir", *place, row.inode, row)
    return tree.to_entry(row, place.parent, ())
