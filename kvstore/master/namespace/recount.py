"""What lies below a directory counts for another policy: said of it a bounded step at a time, across restarts.

A row in `recounts` is a directory to be looked through, behind the inode at which its recount began; directories below
it that have no policy of their own follow. New and renamed files count rightly at once, so whatever is looked at late
is only looked at in vain.
"""

from __future__ import annotations

from typing import Final

from kvstore.master.namespace import blocks, policies
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, Pair, Reader
from kvstore.master.storage.records import INODE, NAME, pack_u64, prefix_end, unpack_u64

STEP: Final = 512
"""Names a step looks at: about 10 ms when all of them are to be counted anew."""
DIRECTORY_COST: Final = 16
"""Names; also of an empty one."""
BEGIN: Final = b""


def start(change: Change, directory: int) -> None:
    """Look through it and what lies below it, from the beginning."""
    _put(change, directory, directory, BEGIN)


def follow(change: Change, directory: int) -> None:
    """It was moved: perhaps past a recount that runs."""
    if change.scan(Cf.RECOUNTS, b"", None, 1):
        start(change, directory)


def is_pending(reader: Reader, began: int) -> bool:
    """Whether the recount that began at this directory still runs."""
    return bool(reader.scan(Cf.RECOUNTS, pack_u64(began), prefix_end(began), 1))


def step(change: Change) -> bool:
    """Look at the next names; False when there was nothing to do."""
    left, is_busy = STEP, False
    while left > 0 and (jobs := change.scan(Cf.RECOUNTS, b"", None, 1)):
        ((key, after),) = jobs
        left -= DIRECTORY_COST + _look_on(change, key, after, left)
        is_busy = True
    return is_busy


def _look_on(change: Change, key: bytes, after: bytes, limit: int) -> int:
    """At most `limit` names of one directory, behind `after`; how many it were."""
    began, directory = unpack_u64(key), unpack_u64(key, 8)
    first = pack_u64(directory) + after + (b"\0" if after else b"")
    found = change.scan(Cf.NAMES, first, prefix_end(directory), limit)
    _count_anew(change, began, directory, found)
    if len(found) == limit:
        change.put(Cf.RECOUNTS, key, found[-1][0][8:])
    else:
        change.delete(Cf.RECOUNTS, key)
    return len(found)


def _count_anew(change: Change, began: int, directory: int, found: list[Pair]) -> None:
    above = policies.nearest(change, directory)
    entries = [NAME.load(value) for _, value in found]
    stored = change.get_many(Cf.INODES, [pack_u64(entry.inode) for entry in entries]) if entries else ()
    for entry, value in zip(entries, stored, strict=True):
        policy = INODE.load(value).policy if value is not None else 0
        if entry.is_dir:
            if not policy:
                _put(change, began, entry.inode, BEGIN)
        elif entry.block:
            blocks.relabel(change, entry.block, entry.length_bytes, policy or above)


def _put(change: Change, began: int, directory: int, after: bytes) -> None:
    change.put(Cf.RECOUNTS, pack_u64(began) + pack_u64(directory), after)
