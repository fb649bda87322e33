"""Reading names: many paths at once, and the pages of a directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvstore.core import paths
from kvstore.core.errors import KvError, NotFound, Stale
from kvstore.core.limits import MAX_NAME_BYTES
from kvstore.core.types import Entry, Replica
from kvstore.master.namespace.tree import Live, Tree, to_entry
from kvstore.master.storage.db import Cf, Reader
from kvstore.master.storage.records import NAME, NameRow, pack_u64

Row = Entry | KvError


@dataclasses.dataclass(slots=True)
class Lookups:
    """Names looked up since the start: whether the cache is warm. Workers cannot tell: a name that is not there never
    gets to one.
    """

    found: int = 0
    not_found: int = 0
    """No such name, or no live replica."""

    def count(self, rows: Sequence[Row]) -> None:
        """Rows that failed in another way (a path that is none, a base that is gone) tell nothing of the cache."""
        self.not_found += sum(isinstance(row, NotFound) for row in rows)
        self.found += sum(isinstance(row, Entry) for row in rows)


def lookup(reader: Reader, live: Live, base: int, wanted: Sequence[str]) -> list[Row]:
    """Entries in the order of the paths, or the error in its place. Three reads of the database in all, whatever the
    number of paths."""
    tree = Tree(reader, live)
    directories: dict[str, int | KvError] = {}
    places = [_place(tree, directories, base, path) for path in wanted]
    keys = [pack_u64(at[0]) + at[2] for at in places if not isinstance(at, KvError)]
    stored = reader.get_many(Cf.NAMES, keys) if keys else ()
    found = [None if value is None else NAME.load(value) for value in stored]
    replicas = iter(tree.visible([row for row in found if row is not None]))
    rows = iter(found)
    result: list[Row] = []
    for at in places:
        if isinstance(at, KvError):
            result.append(at)
            continue
        row = next(rows)
        result.append(NotFound(f"{at[1]!r} does not exist") if row is None else _row(at[0], at[1], row, next(replicas)))
    return result


def _row(parent: int, name: str, row: NameRow, replicas: tuple[Replica, ...] | None) -> Row:
    if replicas is None:
        return NotFound(f"{name!r} has no live replica", reason="no_replica")
    return to_entry(row, parent, replicas)


def _place(tree: Tree, directories: dict[str, int | KvError], base: int, path: str) -> tuple[int, str, bytes] | KvError:
    """(parent, name, the name's bytes); directories are walked once for all paths in them."""
    head, _, name = path.rpartition("/")
    raw = name.encode()
    if name in ("", ".", "..") or "\0" in name or len(raw) > MAX_NAME_BYTES:
        return _odd_place(tree, base, path)
    parent = directories.get(head)
    if parent is None:
        parent = directories[head] = _directory(tree, base, head)
    return parent if isinstance(parent, KvError) else (parent, name, raw)


def _directory(tree: Tree, base: int, head: str) -> int | KvError:
    try:
        return tree.directory(base, paths.split(head))
    except KvError as error:
        return error


def _odd_place(tree: Tree, base: int, path: str) -> tuple[int, str, bytes] | KvError:
    """The base itself, trailing slashes, and what is no path at all."""
    try:
        place = tree.place(base, path)
    except KvError as error:
        return error
    return place.parent, place.name, place.name.encode()


def list_page(
    reader: Reader, live: Live, directory: int, after: str, limit: int, names_only: bool
) -> tuple[list[str], list[Entry], str | None]:
    """(names, their entries, the name to go on behind, or None at the end) of at most `limit` rows; hidden ones are
    left out.

    With `names_only` an entry has its inode and mode only. Raises Stale when the directory is gone.
    """
    tree = Tree(reader, live)
    if directory != 1 and tree.inode(directory) is None:
        raise Stale("the directory was removed while it was listed")
    found = tree.children(directory, after, limit)
    rows = [NAME.load(value) for _, value in found]
    names: list[str] = []
    entries: list[Entry] = []
    for (key, _), row, replicas in zip(found, rows, tree.visible(rows), strict=True):
        if replicas is not None:
            names.append(key[8:].decode())
            entries.append(brief(row) if names_only else to_entry(row, directory, replicas))
    return names, entries, found[-1][0][8:].decode() if len(found) == limit else None


def brief(row: NameRow) -> Entry:
    return Entry(row.inode, row.mode, 0, 0, 0, 0, 0, None)


def stat(reader: Reader, live: Live, base: int, path: str) -> Entry:
    """One entry. Raises KvError."""
    tree = Tree(reader, live)
    place = tree.place(base, path)
    return tree.entry(place, tree.get(place))
