"""Changing attributes. The inode stays: the content does."""

from __future__ import annotations

import msgspec

from kvstore.core.errors import InvalidRequest
from kvstore.core.types import U63_MAX, Entry
from kvstore.master.namespace import blocks, tree
from kvstore.master.namespace.tree import Live, Tree
from kvstore.master.storage import journal
from kvstore.master.storage.change import Change
from kvstore.master.storage.records import PERMISSIONS


def set_attributes(
    change: Change, live: Live, base: int, path: str, *,
    mode: int | None = None, uid: int | None = None, gid: int | None = None, mtime_ns: int | None = None,
) -> Entry:  # fmt: skip
    """The entry as it is now; None leaves an attribute. Raises NotFound, NotDirectory, Stale, InvalidRequest."""
    if mtime_ns is not None and abs(mtime_ns) > U63_MAX:
        raise InvalidRequest(f"mtime_ns {mtime_ns} is out of range")
    view = Tree(change, live)
    place = view.place(base, path)
    row = view.get(place)
    new = msgspec.structs.replace(
        row,
        mode=row.mode if mode is None else row.mode & ~PERMISSIONS | mode & PERMISSIONS,
        uid=row.uid if uid is None else uid,
        gid=row.gid if gid is None else gid,
        mtime_ns=row.mtime_ns if mtime_ns is None else mtime_ns,
        ctime_ns=change.now_ns,
    )
    tree.put(change, place, new)
    blocks.renamed(change, new.block)
    journal.append(change, "setattr", *place, new.inode, new)
    return view.entry(place, new)
