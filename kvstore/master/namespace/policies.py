"""Quota, TTL and pin (rule 30): rows of directories and of pinned files, and what counts for them.

A block counts for the nearest policy above it, which its row names, and so for every policy above that: `count` walks
up. So a row has what is counted for all below it, and a quota needs one look. Where a policy comes, goes or moves,
`recount` follows: until then a block counts for the policy that its row names, and leaves its books with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from kvstore.config.units import format_size
from kvstore.core.errors import InvalidRequest, NoSpace
from kvstore.core.types import ROOT_INODE, U63_MAX
from kvstore.master.storage import journal
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, Reader
from kvstore.master.storage.records import INODE, POLICY, InodeRow, PolicyRow, dump, pack_u64, unpack_u64

MAX_POLICIES: Final = 4096
"""Every worker knows them all. Pin a directory, not each file in it."""
REFUSED_SHARE: Final = 1.1
"""Publish is refused above so much of a quota. Between the two the directory gives up its coldest blocks."""
MAX_TTL_S: Final = 10 * 365 * 86_400.0


class Policy(NamedTuple):
    id: int
    row: PolicyRow


class Wanted(NamedTuple):
    """What is to be said: None leaves it, 0 and False take it away."""

    quota_bytes: int | None = None
    ttl_s: float | None = None
    pinned: bool | None = None


def read(reader: Reader, policy: int) -> PolicyRow | None:
    stored = reader.get(Cf.POLICIES, pack_u64(policy))
    return None if stored is None else POLICY.load(stored)


def every(reader: Reader) -> list[Policy]:
    """All of them, those too that were taken away and still count something."""
    rows = reader.scan(Cf.POLICIES, b"", None, 2 * MAX_POLICIES)
    return [Policy(unpack_u64(key), POLICY.load(value)) for key, value in rows]


def own(change: Change, inode: int) -> int:
    """The policy of this very inode, or 0."""
    if not change.counters.policies:
        return 0
    row = _inode(change, inode)
    return row.policy if row is not None else 0


def nearest(change: Change, inode: int) -> int:
    """The policy that holds in a directory: its own, or that of the nearest one above it; 0 = none."""
    return nearest_of(change, inode) if change.counters.policies else 0


def nearest_of(reader: Reader, inode: int) -> int:
    while inode and (row := _inode(reader, inode)) is not None:
        if row.policy:
            return row.policy
        inode = row.parent
    return 0


def chain(reader: Reader, policy: int) -> Iterator[Policy]:
    """A policy and all above it, the nearest first."""
    while policy and (row := read(reader, policy)) is not None:
        yield Policy(policy, row)
        policy = row.parent


def count(change: Change, policy: int, size_bytes: int, files: int) -> None:
    """So many bytes in so many files more (or less) are published under a policy."""
    for id in _add(change, policy, size_bytes, files):
        change.grown[id] += max(0, size_bytes)


def check_quota(change: Change, policy: int, size_bytes: int, hidden: Mapping[int, int]) -> None:
    """Raises NoSpace when a quota is passed by far, with the `size_bytes` that were just counted for `policy`."""
    for id, row in chain(change, policy):
        used = row.used_bytes - hidden.get(id, 0)
        limit = row.quota_bytes * REFUSED_SHARE
        if row.quota_bytes and used > limit:
            change.refused[id] = size_bytes
            path = f"/{journal.directory_path(change, row.inode).rstrip('/')}"
            if size_bytes > limit:
                remedy = f"a file of {format_size(size_bytes)} never fits: raise the quota (kvstore fs quota)"
            else:
                remedy = "its coldest blocks are being evicted; retry later, or raise the quota (kvstore fs quota)"
            raise NoSpace(
                f"{path} has a quota of {format_size(row.quota_bytes)} and would hold {format_size(used)}: {remedy}"
            )


def set_policy(change: Change, inode: int, is_dir: bool, wanted: Wanted) -> int:
    """Say, change or take away what holds for an inode; its policy's id, 0 when it has none (any more). The caller
    recounts what lies below it when that came or went.

    Raises InvalidRequest for values that make no sense, and for too many policies.
    """
    _check(is_dir, wanted)
    place = _inode(change, inode)
    assert place is not None, "the caller has looked it up"
    before = read(change, place.policy) if place.policy else None
    if before is None:
        before = PolicyRow(inode, nearest(change, place.parent))
    row = msgspec.structs.replace(before, **{k: v for k, v in wanted._asdict().items() if v is not None})
    policy = 0 if row.says_nothing else place.policy or _mint(change)
    if policy:
        _put(change, policy, row)
    if policy != place.policy:
        change.put(Cf.INODES, pack_u64(inode), dump(InodeRow(place.parent, place.name, policy)))
        if not policy:
            forget(change, place.policy, is_dir=is_dir)
        elif is_dir:
            _adopt(change, policy, row)
    if row != before:
        journal.append(change, "policy", place.parent, place.name, inode, policy=row)
    return policy


def forget(change: Change, policy: int, *, is_dir: bool) -> None:
    """A policy is taken away, or its inode went. Its row goes with the last block that is counted for it."""
    row = read(change, policy) if policy else None
    if row is None:
        return
    for child in every(change) if is_dir else ():
        if child.row.parent == policy:
            put_below(change, child.id, row.parent)
    after = read(change, policy) or row
    _put(change, policy, PolicyRow(0, after.parent, used_bytes=after.used_bytes, files=after.files))


def follow(change: Change, policy: int, inode: int) -> None:
    """A file that has a policy was replaced: it is the new one's."""
    if policy and (row := read(change, policy)) is not None:
        _put(change, policy, msgspec.structs.replace(row, inode=inode))


def take_off(change: Change, inode: int) -> int:
    """Part an inode, which is about to go, from its policy, and return that: another one will have it."""
    policy = own(change, inode)
    place = _inode(change, inode) if policy else None
    if place is not None:
        change.put(Cf.INODES, pack_u64(inode), dump(InodeRow(place.parent, place.name)))
    return policy


def put_below(change: Change, policy: int, above: int) -> None:
    """Hang a policy, with all that counts for it, under another one (0 = none)."""
    row = read(change, policy)
    if row is None or row.parent == above:
        return
    _add(change, row.parent, -row.used_bytes, -row.files)
    _add(change, above, row.used_bytes, row.files)
    _put(change, policy, msgspec.structs.replace(row, parent=above))


def _add(change: Change, policy: int, size_bytes: int, files: int) -> list[int]:
    """To the books of a policy and of all above it; returns which these are."""
    counted = []
    for id, row in chain(change, policy):
        _put(change, id, msgspec.structs.replace(row, used_bytes=row.used_bytes + size_bytes, files=row.files + files))
        counted.append(id)
    return counted


def _adopt(change: Change, policy: int, row: PolicyRow) -> None:
    """A new policy: those below it that hung under the one above it hang under this one now."""
    for child in every(change):
        if child.id != policy and child.row.parent == row.parent and is_below(change, child.row.inode, row.inode):
            put_below(change, child.id, policy)


def is_below(reader: Reader, inode: int, directory: int) -> bool:
    while inode and inode != directory:
        row = _inode(reader, inode)
        inode = row.parent if row is not None else 0
    return inode == directory


def _put(change: Change, policy: int, row: PolicyRow) -> None:
    if row.inode or row.files:
        change.put(Cf.POLICIES, pack_u64(policy), dump(row))
    else:  # taken away, and nothing counts for it any more
        change.delete(Cf.POLICIES, pack_u64(policy))
        change.counters.policies -= 1


def _mint(change: Change) -> int:
    if change.counters.policies >= MAX_POLICIES:
        raise InvalidRequest(
            f"there are {MAX_POLICIES} quotas, TTLs and pins already: take some away, or pin directories, not files"
        )
    change.counters.policies += 1
    policy = change.counters.next_policy
    change.counters.next_policy += 1
    return policy


def _check(is_dir: bool, wanted: Wanted) -> None:
    if not is_dir and (wanted.quota_bytes or wanted.ttl_s):
        raise InvalidRequest("a quota or TTL belongs to a directory; of a file only the pin can be set")
    if wanted.quota_bytes is not None and not 0 <= wanted.quota_bytes <= U63_MAX:
        raise InvalidRequest(f"a quota of {wanted.quota_bytes} bytes is out of range")
    if wanted.ttl_s is not None and not 0 <= wanted.ttl_s <= MAX_TTL_S:  # NaN too
        raise InvalidRequest(f"a TTL of {wanted.ttl_s} s is out of range: 0 to {MAX_TTL_S:.0f}")


def _inode(reader: Reader, inode: int) -> InodeRow | None:
    stored = reader.get(Cf.INODES, pack_u64(inode or ROOT_INODE))
    return None if stored is None else INODE.load(stored)
