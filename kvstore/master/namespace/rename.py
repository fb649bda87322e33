"""Rename, with the errors of rename(2). A directory moves in one step, whatever is in it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvstore.core.errors import AlreadyExists, InvalidRequest, IsDirectory, NotDirectory, NotFound, OtherPolicy
from kvstore.master.namespace import blocks, policies, recount, tree
from kvstore.master.namespace.tree import Live, Place, Tree
from kvstore.master.storage import journal
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf
from kvstore.master.storage.records import NameRow, name_key


class Move(NamedTuple):
    """`inode`: the one that is meant at the source, 0 = whatever is there (rule 21)."""

    from_base: int
    from_path: str
    to_base: int
    to_path: str
    no_replace: bool = False
    inode: int = 0


def rename(change: Change, live: Live, move: Move) -> None:
    """Raises NotFound, AlreadyExists, NotEmpty, NotDirectory, IsDirectory, Stale; InvalidRequest for the root and for a
    directory that is to move into itself; OtherPolicy for one that is to move to where another policy holds (rule 30).
    """
    view = Tree(change, live)
    source = view.place(move.from_base, move.from_path)
    target = view.place(move.to_base, move.to_path)
    tree.check_not_root(source, "renamed")
    row = view.get(source)
    if move.inode and row.inode != move.inode:
        raise NotFound(f"{move.from_path!r} is another one by now")
    replaced = None if target == tree.ROOT else view.find(target)
    if move.no_replace and (replaced is not None or target == tree.ROOT):
        raise AlreadyExists(f"{move.to_path!r} exists")
    if source == target:
        return
    if row.is_dir:
        _check_outside(view, row.inode, target)
        _check_policy(change, move, source, target)
    tree.check_not_root(target, "replaced")
    if replaced is not None:
        _check_replaceable(move, row, replaced)
    policy = _policy_after(change, view, target, row)
    _make_room(change, view, target)
    _move(change, source, target, row, policy)


def _check_outside(view: Tree, inode: int, target: Place) -> None:
    at = target.parent
    while at:
        if at == inode:
            raise InvalidRequest("a directory cannot be moved into itself")
        at = view.locate(at).parent


def _check_policy(change: Change, move: Move, source: Place, target: Place) -> None:
    if policies.nearest(change, source.parent) != policies.nearest(change, target.parent):
        raise OtherPolicy(
            f"{move.from_path!r} is a directory, and another quota, TTL or pin holds at {move.to_path!r}: copy it"
        )


def _check_replaceable(move: Move, row: NameRow, replaced: NameRow) -> None:
    if row.is_dir and not replaced.is_dir:
        raise NotDirectory(f"{move.to_path!r} is a file, and a directory cannot replace it")
    if not row.is_dir and replaced.is_dir:
        raise IsDirectory(f"{move.to_path!r} is a directory, and a file cannot replace it")


def _make_room(change: Change, view: Tree, target: Place) -> None:
    """What is stored at the target goes, hidden or not."""
    stored = view.stored(target)
    if stored is None:
        return
    if stored.is_dir:
        tree.make_empty(change, view.live, stored.inode)
    tree.erase(change, target, stored)


def _policy_after(change: Change, view: Tree, target: Place, row: NameRow) -> int:
    """The entry's own policy once it stands at the target: a file that replaces a pinned one takes over its pin, as
    with a publish."""
    policy = policies.own(change, row.inode)
    stored = view.stored(target)
    if policy or row.is_dir or stored is None or stored.is_dir:
        return policy
    return policies.take_off(change, stored.inode)


def _move(change: Change, source: Place, target: Place, row: NameRow, policy: int) -> None:
    change.delete(Cf.NAMES, name_key(*source))
    row = msgspec.structs.replace(row, ctime_ns=change.now_ns)
    tree.put_new(change, target, row, policy)
    _recount(change, target, row, policy)
    blocks.renamed(change, row.block)
    tree.touch(change, source.parent)
    tree.touch(change, target.parent)
    journal.append(change, "rename", *source, row.inode, row, *target)


def _recount(change: Change, target: Place, row: NameRow, policy: int) -> None:
    """A file counts for what holds at its new place. A directory may have been moved past a recount that runs."""
    if row.is_dir:
        recount.follow(change, row.inode)
        return
    above = policies.nearest(change, target.parent)
    if policy:
        policies.follow(change, policy, row.inode)
        policies.put_below(change, policy, above)
    if row.block:
        blocks.relabel(change, row.block, row.length_bytes, policy or above)
