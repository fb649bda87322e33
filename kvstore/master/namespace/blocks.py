"""The life of a block at the master: absent → owned → dead, never back (rules 9 to 14).

A row lists the volumes that hold the block; `replicas` holds the same pairs by volume. Of a dead block each pair is
an unlink order until its worker says "nowhere"; without pairs it is a grave, which goes when the fence of its boot
has passed it: from then on the fence refuses what the row refused before.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvstore.core.errors import Stale
from kvstore.core.types import BlockId
from kvstore.master.namespace import policies
from kvstore.master.namespace.cluster import Cluster
from kvstore.master.storage import journal
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, Reader
from kvstore.master.storage.records import (
    BLOCK,
    EMPTY,
    INODE,
    NAME,
    BlockRow,
    InodeRow,
    NameRow,
    dump,
    name_key,
    pack_u64,
    replica_key,
)

DEAD = 0


def read(reader: Reader, block: bytes) -> BlockRow | None:
    stored = reader.get(Cf.BLOCKS, block)
    return None if stored is None else BLOCK.load(stored)


def check_publishable(change: Change, cluster: Cluster, block: bytes) -> None:
    """Rule 10: raises Stale unless this id may be published now, for the first time."""
    boot, counter = BlockId.unpack(block)
    if boot not in cluster.fences:
        raise Stale(f"block {BlockId(boot, counter)}: its worker's start is not known (any more); store the data again")
    if not cluster.publishable(boot, counter):
        raise Stale(f"block {BlockId(boot, counter)} was given up by its worker; store the data again")
    if change.get(Cf.BLOCKS, block) is not None:
        raise Stale(f"block {BlockId(boot, counter)} was published before or is dead; store the data again")


def own(change: Change, block: bytes, inode: int, volume: int, policy: int = 0, length_bytes: int = 0) -> None:
    """Make `inode` the owner of a block that has no row yet, with its first replica. It counts for `policy`."""
    change.put(Cf.BLOCKS, block, dump(BlockRow(inode, [volume], policy, length_bytes if policy else 0)))
    change.put(Cf.REPLICAS, replica_key(volume, block), EMPTY)
    policies.count(change, policy, length_bytes, 1)


def relabel(change: Change, block: bytes, length_bytes: int, policy: int) -> None:
    """An owned block counts for this policy from here on."""
    row = read(change, block)
    if row is None or row.dead or row.policy == policy:
        return
    policies.count(change, policy, length_bytes, 1)  # first: a policy that was taken away goes with its last block
    policies.count(change, row.policy, -row.length_bytes, -1)
    new = msgspec.structs.replace(row, policy=policy, length_bytes=length_bytes if policy else 0)
    change.put(Cf.BLOCKS, block, dump(new))
    change.relabelled.append((block, row.volumes))


def renamed(change: Change, block: bytes) -> None:
    """The entry of an owned block has another name, or other attributes: its holders note them (rule 22)."""
    row = read(change, block) if block else None
    if row is not None and not row.dead:
        change.relabelled.append((block, row.volumes))


def bury(change: Change, block: bytes) -> None:
    """An owned block dies: everyone who holds it gets an unlink order."""
    row = read(change, block)
    if row is not None and not row.dead:
        policies.count(change, row.policy, -row.length_bytes, -1)
        _put_dead(change, block, row.volumes)


def bury_new(change: Change, cluster: Cluster, block: bytes, volume: int) -> None:
    """A block that was sealed and will not be needed dies unpublished; one that has a row, or that cannot be
    published, is left."""
    if cluster.publishable(*BlockId.unpack(block)) and change.get(Cf.BLOCKS, block) is None:
        bury_found(change, block, [volume] if volume in cluster.homes else [])


def bury_found(change: Change, block: bytes, volumes: list[int]) -> None:
    """A block without a row, which lies in these volumes, dies."""
    for volume in volumes:
        change.put(Cf.REPLICAS, replica_key(volume, block), EMPTY)
    _put_dead(change, block, volumes)


def set_holders(
    change: Change, cluster: Cluster, node: str, block: bytes, row: BlockRow, volumes: Iterable[int]
) -> None:
    """On `node` the block lies in exactly these volumes. With its last replica an owned block's entry falls (rule
    12)."""
    before = [v for v in row.volumes if cluster.homes.get(v) == node]
    after = list(dict.fromkeys(volumes))
    if set(before) == set(after):
        return
    elsewhere = [v for v in row.volumes if v not in before]
    for volume in set(before) - set(after):
        change.delete(Cf.REPLICAS, replica_key(volume, block))
        change.delete(Cf.UNLINKS, replica_key(volume, block))
    for volume in set(after) - set(before):
        change.put(Cf.REPLICAS, replica_key(volume, block), EMPTY)
    _put_holders(change, block, row, elsewhere + after)


def drop_holder(change: Change, block: bytes, volume: int) -> None:
    """The block is not (or no longer) in this volume."""
    change.delete(Cf.REPLICAS, replica_key(volume, block))
    change.delete(Cf.UNLINKS, replica_key(volume, block))
    row = read(change, block)
    if row is not None and volume in row.volumes:
        _put_holders(change, block, row, [v for v in row.volumes if v != volume])


def _put_holders(change: Change, block: bytes, row: BlockRow, volumes: list[int]) -> None:
    if row.dead:
        _put_dead(change, block, volumes)
    elif volumes:
        change.put(Cf.BLOCKS, block, dump(msgspec.structs.replace(row, volumes=volumes)))
    else:
        policies.count(change, row.policy, -row.length_bytes, -1)
        _drop_entry(change, block, row.inode)
        _put_dead(change, block, [])


def _put_dead(change: Change, block: bytes, volumes: list[int]) -> None:
    change.put(Cf.BLOCKS, block, dump(BlockRow(DEAD, volumes)))
    for volume in volumes:
        change.put(Cf.UNLINKS, replica_key(volume, block), EMPTY)
    if volumes:
        change.delete(Cf.GRAVES, block)
    else:
        change.put(Cf.GRAVES, block, EMPTY)


def owner(reader: Reader, block: bytes, inode: int) -> tuple[InodeRow, NameRow] | None:
    """Where the entry is that lists this block; None when `inode` is gone or lists another one by now."""
    place = reader.get(Cf.INODES, pack_u64(inode))
    if place is None:
        return None
    at = INODE.load(place)
    stored = reader.get(Cf.NAMES, name_key(at.parent, at.name))
    entry = None if stored is None else NAME.load(stored)
    return (at, entry) if entry is not None and entry.inode == inode and entry.block == block else None


def _drop_entry(change: Change, block: bytes, inode: int) -> None:
    found = owner(change, block, inode)
    if found is None:
        return
    at, entry = found
    change.delete(Cf.NAMES, name_key(at.parent, at.name))
    change.delete(Cf.INODES, pack_u64(inode))
    policies.forget(change, at.policy, is_dir=False)
    change.counters.files -= 1
    journal.append(change, "evict", at.parent, at.name, inode, entry)


def sweep_graves(change: Change, cluster: Cluster, start: bytes, limit: int) -> bytes:
    """Look at `limit` graves from `start` on and close those that the fence has passed; returns where to go on (b"" =
    all seen)."""
    rows = change.scan(Cf.GRAVES, start, None, limit)
    for block, _ in rows:
        if not cluster.publishable(*BlockId.unpack(block)):
            change.delete(Cf.GRAVES, block)
            change.delete(Cf.BLOCKS, block)
    return rows[-1][0] + b"\0" if len(rows) == limit else b""


def forget_volume(change: Change, volume: int, limit: int) -> bool:
    """Drop `limit` replicas of a volume that will not come back; True when none was left."""
    start = pack_u64(volume)
    rows = change.scan(Cf.REPLICAS, start, start + b"\xff" * 17, limit)
    for key, _ in rows:
        drop_holder(change, key[8:], volume)
    return not rows


def unlink_orders(reader: Reader, volumes: Iterable[int], limit: int) -> list[bytes]:
    """Ids of dead blocks that these volumes still hold, at most `limit`."""
    ids: list[bytes] = []
    for volume in volumes:
        start = pack_u64(volume)
        ids += [k[8:] for k, _ in reader.scan(Cf.UNLINKS, start, start + b"\xff" * 17, limit - len(ids))]
    return ids
