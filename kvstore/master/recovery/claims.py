"""What a worker has noted beside a block claims a name for it, when names are taken back (rule 22). Pure.

A claim says: at sequence s the entry at this path listed this block. Of two that contradict each other (two blocks of
one path, two paths of one block) the later one holds: by sequence among claims. Against an entry that the database had
before, a claim that goes on where the database ends is the later one, as nobody has changed anything since; one of any
other history is judged by the time of its last change. A directory that is needed for a name takes the place of a file.
First they are gathered (`gather`), then placed in the tree in the order of their sequences.

The column `claims` holds what a crash in the middle must not lose, and goes at the end:

    "b" block id            sequence of the best claim for this block
    "c" sequence, block id  ClaimRow: that claim
    "n" inode               sequence of the claim that made this entry
    "u" volume, block id    length: a block for which no name was found yet
    "o" block id            "" : its name went to a later one. If it finds no other it dies
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from kvstore.core import paths
from kvstore.core.errors import InvalidRequest
from kvstore.core.types import ROOT_INODE, Address, BlockId, Seen
from kvstore.master.namespace import blocks, policies, tree
from kvstore.master.namespace.cluster import Cluster
from kvstore.master.namespace.mkdir import DEFAULT_MODE, make_one
from kvstore.master.namespace.tree import Place, Tree
from kvstore.master.storage import journal
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf
from kvstore.master.storage.records import (
    CLAIM,
    EMPTY,
    META_REBUILD,
    PERMISSIONS,
    REBUILD,
    S_IFREG,
    BlockRow,
    NameRow,
    name_key,
    pack_u64,
    replica_key,
    unpack_u64,
)

STEP: Final = 1024
"""Rows of the column `claims` that one step looks at: some 10 ms."""
PLACE_STEP: Final = 128
"""Claims: some 10 ms as well."""
BEST: Final = b"b"
CLAIMED: Final = b"c"
MADE: Final = b"n"
UNNAMED: Final = b"u"
OUSTED: Final = b"o"


class NotedName(NamedTuple):
    path: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    at: Seen
    """When it was true."""


class Claim(NamedTuple):
    """A block that lies in a volume; `name` None: nothing is noted beside it."""

    address: Address
    volume: int
    name: NotedName | None


class Outcome(enum.Enum):
    NAMED = enum.auto()
    """The entry lists the block."""
    WITHOUT_NOTE = enum.auto()
    CLAIMED = enum.auto()
    """It will be placed, unless there is a later one of the same block."""
    MALFORMED = enum.auto()
    """Nothing that a worker of ours can have noted: a path that is none, numbers out of range."""
    KNOWN = enum.auto()
    """Nothing that the database lacks: it knows better."""
    LOST = enum.auto()
    """A later claim, or a directory, has the path."""
    DEAD = enum.auto()


class _Lost(Exception):
    pass


def place_step(change: Change, start: bytes, tally: Counter[Outcome]) -> bytes:
    """Once all claims are in: entries for the best claim of each block, the earliest first, so that what the tree
    becomes is a matter of the claims and not of their order. Looks at PLACE_STEP rows, counts in `tally` what came of
    them; returns where to go on, b"" at the end."""
    rows = change.scan(Cf.CLAIMS, start or CLAIMED, _after(CLAIMED), PLACE_STEP)
    for key, value in rows:
        claim = _claim_of(key, value)
        assert claim.name is not None
        row = blocks.read(change, claim.address.block.pack())
        is_dead = row is not None and row.dead
        tally[Outcome.DEAD if is_dead else _claimed(change, claim, claim.name, row)] += 1
    return rows[-1][0] + b"\0" if len(rows) == PLACE_STEP else b""


def claim_key(sequence: int, block: bytes) -> bytes:
    return CLAIMED + pack_u64(sequence) + block


def _claim_of(key: bytes, value: bytes) -> Claim:
    row, sequence = CLAIM.load(value), unpack_u64(key, 1)
    name = NotedName(
        row.path, row.mode, row.uid, row.gid, row.mtime_ns, row.ctime_ns, Seen(row.incarnation, sequence)
    )  # fmt: skip
    return Claim(Address(BlockId.unpack(key, 9), row.length_bytes, row.hash), row.volume, name)


def _claimed(change: Change, claim: Claim, name: NotedName, row: BlockRow | None) -> Outcome:
    part = change.nested()
    part.counters.sequence = max(part.counters.sequence, name.at.sequence)
    try:
        _place(part, claim, name, row)
    except InvalidRequest:
        return Outcome.MALFORMED
    except _Lost:
        _oust(change, claim.address.block.pack())
        return Outcome.LOST
    part.merge()
    return Outcome.NAMED


def _place(change: Change, claim: Claim, name: NotedName, row: BlockRow | None) -> None:
    """Raises InvalidRequest for a path that is none, _Lost when something later has it."""
    *above, last = paths.split(name.path) or ("",)
    paths.check_name(last)
    listed = blocks.owner(change, claim.address.block.pack(), row.inode) if row is not None else None
    if listed is not None and not _is_later(change, name, listed[1]):
        return  # this very claim from another replica, or an earlier one
    view = Tree(change, {})
    place = Place(_directory(change, view, name, above), last)
    there = view.stored(place)
    if there is not None and not (listed is not None and listed[1].inode == there.inode):
        if there.is_dir or not _is_later(change, name, there):
            raise _Lost
        _withdraw(change, place, there)
    if listed is None:
        _create(change, place, claim, name)
    else:
        _move(change, Place(listed[0].parent, listed[0].name), place, listed[1], name)


def _directory(change: Change, view: Tree, name: NotedName, parts: Sequence[str]) -> int:
    """The inode of the directory for the name. A file in its way goes, if a claim made it or it is older."""
    at = ROOT_INODE
    for part in parts:
        place = Place(at, part)
        row = view.stored(place)
        if row is not None and not row.is_dir:
            if _made_at(change, row) is None and not _is_later(change, name, row):
                raise _Lost
            _withdraw(change, place, row)
            row = None
        at = row.inode if row is not None else make_one(change, view, place, DEFAULT_MODE, 0, 0).inode
    return at


def _is_later(change: Change, name: NotedName, entry: NameRow) -> bool:
    """Sequences of two histories cannot be compared: there an entry that the database had is judged by its time."""
    made_at = _made_at(change, entry)
    if made_at is not None:
        return name.at.sequence > made_at
    return _goes_on(change, name.at) or name.ctime_ns > entry.ctime_ns


def _goes_on(change: Change, at: Seen) -> bool:
    """Whether this point, which the database lacks, follows its end: of the last master that clients have changed
    anything at."""
    stored = change.get(Cf.META, META_REBUILD)
    served = REBUILD.load(stored).served if stored is not None else 0
    return served != 0 and at.incarnation == served


def _made_at(change: Change, entry: NameRow) -> int | None:
    """The sequence of the claim that made an entry; None: none did."""
    stored = change.get(Cf.CLAIMS, MADE + pack_u64(entry.inode))
    return None if stored is None else unpack_u64(stored)


def _create(change: Change, place: Place, claim: Claim, name: NotedName) -> None:
    block, length, digest = claim.address
    mode = S_IFREG | name.mode & PERMISSIONS
    row = NameRow(
        change.mint(), mode, name.uid, name.gid, length, name.mtime_ns, name.ctime_ns, block.pack(), digest
    )  # fmt: skip
    blocks.own(change, row.block, row.inode, claim.volume, policies.nearest(change, place.parent), length)
    change.counters.files += 1
    tree.put_new(change, place, row)
    tree.touch(change, place.parent)
    change.put(Cf.CLAIMS, MADE + pack_u64(row.inode), pack_u64(name.at.sequence))
    journal.append(change, "publish", *place, row.inode, row)


def _move(change: Change, source: Place, target: Place, entry: NameRow, name: NotedName) -> None:
    """The entry that lists the block already is called otherwise, or has other attributes."""
    policy = policies.own(change, entry.inode)
    mode = S_IFREG | name.mode & PERMISSIONS
    row = msgspec.structs.replace(
        entry, mode=mode, uid=name.uid, gid=name.gid, mtime_ns=name.mtime_ns, ctime_ns=name.ctime_ns
    )
    change.delete(Cf.NAMES, name_key(*source))
    tree.put_new(change, target, row, policy)
    above = policies.nearest(change, target.parent)
    if policy:
        policies.put_below(change, policy, above)
    blocks.relabel(change, row.block, row.length_bytes, policy or above)
    tree.touch(change, target.parent)
    change.put(Cf.CLAIMS, MADE + pack_u64(row.inode), pack_u64(name.at.sequence))
    if source == target:
        journal.append(change, "setattr", *target, row.inode, row)
    else:
        journal.append(change, "rename", *source, row.inode, row, *target)


def _withdraw(change: Change, place: Place, entry: NameRow) -> None:
    """An entry goes, but its block does not die: until all is known it may have another name."""
    row = blocks.read(change, entry.block) if entry.block else None
    if row is not None:
        for volume in row.volumes:
            change.delete(Cf.REPLICAS, replica_key(volume, entry.block))
            change.put(Cf.CLAIMS, unnamed_key(volume, entry.block), pack_u64(entry.length_bytes))
        change.delete(Cf.BLOCKS, entry.block)
        _oust(change, entry.block)
        policies.count(change, row.policy, -row.length_bytes, -1)
    policies.forget(change, policies.own(change, entry.inode), is_dir=False)
    for column, key in (
        (Cf.NAMES, name_key(*place)),
        (Cf.INODES, pack_u64(entry.inode)),
        (Cf.CLAIMS, MADE + pack_u64(entry.inode)),
    ):
        change.delete(column, key)
    change.counters.files -= 1
    journal.append(change, "remove", *place, entry.inode, entry)


def _oust(change: Change, block: bytes) -> None:
    change.put(Cf.CLAIMS, OUSTED + block, EMPTY)


def hold(change: Change, cluster: Cluster, node: str, block: bytes, row: BlockRow, volume: int) -> None:
    """A volume of the node holds a block that has a row."""
    if volume not in row.volumes:
        mine = [v for v in row.volumes if cluster.homes.get(v) == node]
        blocks.set_holders(change, cluster, node, block, row, [*mine, volume])


class Unnamed(NamedTuple):
    """Blocks on one worker for which no name was found."""

    blocks: int = 0
    bytes: int = 0


def settle_step(change: Change, cluster: Cluster, start: bytes, unnamed: dict[str, Unnamed]) -> bytes:
    """Once all claims are in: blocks without one get their holders, where another replica had a name; those that lost
    theirs die; the rest are counted in `unnamed`, by node. Looks at STEP rows; returns where to go on, b"" at the
    end."""
    rows = change.scan(Cf.CLAIMS, start or UNNAMED, _after(UNNAMED), STEP)
    for key, length in rows:
        volume, block = unpack_u64(key, 1), key[9:]
        node = cluster.homes.get(volume, "")
        row = blocks.read(change, block)
        if row is not None:
            hold(change, cluster, node, block, row, volume)
        elif change.get(Cf.CLAIMS, OUSTED + block) is not None:
            blocks.bury_found(change, block, [volume])
        else:
            count, size = unnamed.get(node, Unnamed())
            unnamed[node] = Unnamed(count + 1, size + unpack_u64(length))
    return rows[-1][0] + b"\0" if len(rows) == STEP else b""


def clear_step(change: Change) -> bool:
    """Empty the column, STEP rows at a time; whether there is more."""
    rows = change.scan(Cf.CLAIMS, b"", None, STEP)
    for key, _ in rows:
        change.delete(Cf.CLAIMS, key)
    return len(rows) == STEP


def unnamed_key(volume: int, block: bytes) -> bytes:
    return UNNAMED + pack_u64(volume) + block


def _after(prefix: bytes) -> bytes:
    return bytes((prefix[0] + 1,))
