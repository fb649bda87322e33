"""Publish: names for blocks that workers hold already, in transactions that happen wholly or not at all."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvstore.core import paths
from kvstore.core.errors import InvalidRequest, IsDirectory, KvError, NoSpace, Stale, TooLarge
from kvstore.core.types import U63_MAX, Address, Entry, Replica
from kvstore.master.namespace import blocks, policies, tree
from kvstore.master.namespace.cluster import Cluster
from kvstore.master.namespace.mkdir import make_directories
from kvstore.master.namespace.tree import Place, Tree
from kvstore.master.storage import journal
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf
from kvstore.master.storage.records import PERMISSIONS, S_IFREG, NameRow, pack_u64


class Mode(enum.Enum):
    REPLACE = 0
    IF_ABSENT = 1
    IF_PRESENT = 2


class Name(NamedTuple):
    """One name of a transaction. `address` None: an empty file. `mode` 0: 0644. `mtime_ns` 0: now."""

    path: str
    address: Address | None
    volume: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    keep_attributes: bool = False
    replace_equal: bool = False
    """The writer could not read what is there: equal content replaces it (its node may be dead, and nobody noticed)."""


class Transaction(NamedTuple):
    mode: Mode
    names: Sequence[Name]
    parents: bool = False


class Published(NamedTuple):
    """`created` is False when an existing entry was kept."""

    created: bool
    entry: Entry


def publish(
    change: Change, cluster: Cluster, base: int, transactions: Sequence[Transaction]
) -> list[list[Published] | KvError]:
    """A result per transaction, in order; each sees what those before it did."""
    results: list[list[Published] | KvError] = []
    for transaction in transactions:
        part = change.nested()
        try:
            results.append([_publish(part, cluster, base, transaction, name) for name in transaction.names])
        except KvError as error:
            if isinstance(error, NoSpace):
                _give_up(change, cluster, transaction)
                change.refused |= part.refused
            results.append(error)
        else:
            part.merge()
    return results


def _give_up(change: Change, cluster: Cluster, transaction: Transaction) -> None:
    """There is no room for its names. Its blocks die at once, or they would stay for as long as their writer lives,
    unowned and so nobody's victims. Who tries again stores the data again."""
    for name in transaction.names:
        if name.address is not None:
            blocks.bury_new(change, cluster, name.address.block.pack(), name.volume)


def _publish(change: Change, cluster: Cluster, base: int, transaction: Transaction, name: Name) -> Published:
    _check(name, cluster)
    view = Tree(change, cluster.live)
    place = _place(change, view, base, name.path, transaction.parents)
    stored = view.stored(place)
    if stored is not None and stored.is_dir:
        raise IsDirectory(f"{name.path!r} is a directory")
    if stored is not None and name.address is not None and stored.address == name.address:
        return Published(True, view.entry(place, stored))  # this very publish, sent again (rule 10)
    existing = stored if stored is not None and view.exists(stored) else None
    if existing is not None and _is_kept(existing, name, transaction.mode):
        return _keep(change, cluster, view, place, existing, transaction.mode, name)
    if transaction.mode is Mode.IF_PRESENT and stored is None:
        raise Stale(f"{name.path!r} was removed meanwhile")
    # A file that was open while its last replica's node died is still there for its own close: nobody removed it.
    model = stored if transaction.mode is Mode.IF_PRESENT else existing
    return _create(change, cluster, place, stored, model, name)


def _check(name: Name, cluster: Cluster) -> None:
    """What can be said of a name without looking. Raises InvalidRequest, TooLarge, Stale."""
    if not -U63_MAX <= name.mtime_ns <= U63_MAX:
        raise InvalidRequest(f"mtime_ns {name.mtime_ns} is out of range")
    if name.address is None:
        return
    length = name.address.length_bytes
    if length == 0:
        raise InvalidRequest("a file without bytes has no block: leave the address out")
    if length > cluster.max_block_bytes:
        raise TooLarge(f"a block of {length} bytes is too large; at most {cluster.max_block_bytes}")


def _place(change: Change, view: Tree, base: int, path: str, parents: bool) -> Place:
    parts = paths.split(path)
    if not parents or len(parts) < 2:
        return view.place(base, path)
    return Place(make_directories(change, view, base, parts[:-1]), parts[-1])


def _is_kept(row: NameRow, name: Name, mode: Mode) -> bool:
    """Rule 9: equal content keeps the entry, unless the writer knows that it cannot be read. IF_ABSENT keeps any."""
    is_same = _same_content(row, name)
    if is_same and name.replace_equal and row.block:
        return False
    return is_same or mode is Mode.IF_ABSENT


def _same_content(row: NameRow, name: Name) -> bool:
    if name.address is None or not row.block:
        return name.address is None and not row.block
    return (row.length_bytes, row.hash) == (name.address.length_bytes, name.address.hash)


def _keep(
    change: Change, cluster: Cluster, view: Tree, place: Place, row: NameRow, mode: Mode, name: Name
) -> Published:
    """The entry stays, the new block goes (rule 9). Equal content may still bring other attributes."""
    if name.address is not None:
        blocks.bury_new(change, cluster, name.address.block.pack(), name.volume)
    if mode is not Mode.IF_ABSENT:
        new = _restamp(change, row, name)
        if new != row:
            tree.put(change, place, new)
            blocks.renamed(change, new.block)
            journal.append(change, "setattr", *place, row.inode, new)
            row = new
    return Published(False, view.entry(place, row))


def _restamp(change: Change, row: NameRow, name: Name) -> NameRow:
    """The attributes that the publish names; what it leaves to us (0) stays, so that a repeated put writes nothing."""
    uid, gid, mode = row.uid, row.gid, row.mode
    if not name.keep_attributes and name.mode:
        uid, gid, mode = name.uid, name.gid, S_IFREG | name.mode & PERMISSIONS
    mtime = name.mtime_ns or row.mtime_ns
    if (uid, gid, mode, mtime) == (row.uid, row.gid, row.mode, row.mtime_ns):
        return row
    return msgspec.structs.replace(row, uid=uid, gid=gid, mode=mode, mtime_ns=mtime, ctime_ns=change.now_ns)


def _create(
    change: Change, cluster: Cluster, place: Place, replaced: NameRow | None, model: NameRow | None, name: Name
) -> Published:
    row = _new_row(change, name, model)
    policy = policies.own(change, replaced.inode) if replaced is not None else 0
    replicas: tuple[Replica, ...] = ()
    if row.block:
        replica = cluster.live.get(name.volume)
        if replica is None:
            raise Stale(f"volume {name.volume:016x} is not in service; store the data again elsewhere")
        blocks.check_publishable(change, cluster, row.block)
        counts_for = policy or policies.nearest(change, place.parent)
        blocks.own(change, row.block, row.inode, name.volume, counts_for, row.length_bytes)
        replicas = (replica,)
    if replaced is None:
        change.counters.files += 1
    else:
        change.delete(Cf.INODES, pack_u64(replaced.inode))
        if replaced.block:
            blocks.bury(change, replaced.block)
    if row.block and (replaced is None or replaced.length_bytes < row.length_bytes):
        policies.check_quota(change, counts_for, row.length_bytes, cluster.hidden)
    tree.put_new(change, place, row, policy)
    policies.follow(change, policy, row.inode)
    tree.touch(change, place.parent)
    journal.append(change, "publish", *place, row.inode, row)
    return Published(True, tree.to_entry(row, place.parent, replicas))


def _new_row(change: Change, name: Name, model: NameRow | None) -> NameRow:
    """`model`: the existing file whose attributes stay if the publish says so."""
    if model is not None and name.keep_attributes:
        mode, uid, gid = model.mode, model.uid, model.gid
    else:
        mode, uid, gid = S_IFREG | (name.mode & PERMISSIONS or 0o644), name.uid, name.gid
    mtime = name.mtime_ns or change.now_ns
    if name.address is None:
        return NameRow(change.mint(), mode, uid, gid, 0, mtime, change.now_ns)
    block, length, digest = name.address
    return NameRow(change.mint(), mode, uid, gid, length, mtime, change.now_ns, block.pack(), digest)
