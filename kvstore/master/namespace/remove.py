"""Removing names."""

from __future__ import annotations

import enum

from kvstore.core.errors import IsDirectory, NotDirectory, NotFound
from kvstore.master.namespace import tree
from kvstore.master.namespace.tree import Live, Tree
from kvstore.master.storage import journal
from kvstore.master.storage.change import Change


class Kind(enum.Enum):
    ANY = 0
    FILE = 1
    DIRECTORY = 2


def remove(change: Change, live: Live, base: int, path: str, kind: Kind = Kind.ANY, inode: int = 0) -> None:
    """A file, or a directory in which nothing exists.

    `inode`: the one that is meant, 0 = whatever is there; another one there is NotFound (rule 21).
    Raises NotFound, IsDirectory, NotDirectory, NotEmpty, InvalidRequest for the root, Stale; Overloaded: see
    `tree.make_empty`.
    """
    view = Tree(change, live)
    place = view.place(base, path)
    tree.check_not_root(place, "removed")
    row = view.get(place)
    if inode and row.inode != inode:
        raise NotFound(f"{path!r} is another one by now")
    if kind is Kind.FILE and row.is_dir:
        raise IsDirectory(f"{path!r} is a directory")
    if kind is Kind.DIRECTORY and not row.is_dir:
        raise NotDirectory(f"{path!r} is a file, not a directory")
    if row.is_dir:
        tree.make_empty(change, live, row.inode)
    tree.erase(change, place, row)
    tree.touch(change, place.parent)
    journal.append(change, "remove", *place, row.inode, row)
