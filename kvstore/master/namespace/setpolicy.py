"""Saying what holds for a path, and telling it."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.master.namespace import blocks, policies, recount
from kvstore.master.namespace.policies import Policy, Wanted
from kvstore.master.namespace.tree import Live, Tree
from kvstore.master.storage import journal
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Reader
from kvstore.master.storage.records import PolicyRow


class Told(NamedTuple):
    """A policy as it is told. `path`: from the root, without slashes at its ends."""

    id: int
    row: PolicyRow
    path: str
    counting: bool
    """What lay there before it came is still being counted."""


class Holding(NamedTuple):
    """What holds for an inode, the nearest first."""

    inode: int
    policies: list[Told]


def set_policy(change: Change, live: Live, base: int, path: str, wanted: Wanted) -> Holding:
    """Raises NotFound, NotDirectory, Stale, InvalidRequest (see `policies.set_policy`)."""
    view = Tree(change, live)
    place = view.place(base, path)
    row = view.get(place)
    before = policies.own(change, row.inode)
    policy = policies.set_policy(change, row.inode, row.is_dir, wanted)
    if policy != before:
        if row.is_dir:
            recount.start(change, row.inode)
        elif row.block:
            blocks.relabel(change, row.block, row.length_bytes, policy or policies.nearest(change, place.parent))
    return holding(change, live, base, path)


def holding(reader: Reader, live: Live, base: int, path: str) -> Holding:
    """Raises NotFound, NotDirectory, Stale."""
    view = Tree(reader, live)
    place = view.place(base, path)
    row = view.get(place)
    nearest = policies.nearest_of(reader, row.inode)
    return Holding(row.inode, [_told(reader, policy) for policy in policies.chain(reader, nearest)])


def every(reader: Reader) -> list[Told]:
    """All that say something, in order of their paths."""
    told = [_told(reader, policy) for policy in policies.every(reader) if policy.row.inode]
    return sorted(told, key=lambda each: each.path)


def _told(reader: Reader, policy: Policy) -> Told:
    path = journal.directory_path(reader, policy.row.inode).rstrip("/")
    return Told(*policy, path, recount.is_pending(reader, policy.row.inode))
