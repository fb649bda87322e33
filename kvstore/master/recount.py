"""What lies below a directory counts for another policy: said of it a bounded step at a time, across restarts.

A row in `recounts` is a directory to be looked through; directories below it that have no policy of their own follow.
New and renamed files count rightly at once, so whatever is looked at late is only looked at in vain.
"""

from __future__ import annotations

from typing import Final

from kvstore.master import blocks, policies
from kvstore.master.change import Change
from kvstore.master.db import Cf, Pair, Reader
from kvstore.master.records import INODE, NAME, pack_u64, prefix_end, unpack_u64

STEP: Final = 512
"""Names a step looks at: about 10 ms when all of them are to be counted anew."""
BEGIN: Final = b""


def start(change: Change, directory: int) -> None:
    """Look through it and what lies below it, from the beginning."""
    change.put(Cf.RECOUNTS, pack_u64(directory), BEGIN)


def follow(change: Change, directory: int) -> None:
    """It was moved: perhaps past a recount that runs."""
    if is_running(change):
        start(change, directory)


def is_running(reader: Reader) -> bool:
    return bool(reader.scan(Cf.RECOUNTS, b"", None, 1))


def is_pending(reader: Reader, directory: int) -> bool:
    """Whether this directory, or one below or above it, waits to be looked through."""
    for key, _ in reader.scan(Cf.RECOUNTS, b"", None, STEP):
        inode = unpack_u64(key)
        if policies.is_below(reader, inode, directory) or policies.is_below(reader, directory, inode):
            return True
    return False


def step(change: Change) -> bool:
    """Look at the next names; False when there is nothing to do."""
    jobs = change.scan(Cf.RECOUNTS, b"", None, 1)
    if not jobs:
        return False
    (key, after), directory = jobs[0], unpack_u64(jobs[0][0])
    start_key = pack_u64(directory) + after + (b"\0" if after else b"")
    found = change.scan(Cf.NAMES, start_key, prefix_end(directory), STEP)
    _count_anew(change, directory, found)
    if len(found) == STEP:
        change.put(Cf.RECOUNTS, key, found[-1][0][8:])
    else:
        change.delete(Cf.RECOUNTS, key)
    return True


def _count_anew(change: Change, directory: int, found: list[Pair]) -> None:
    above = policies.nearest(change, directory)
    entries = [NAME.load(value) for _, value in found]
    stored = change.get_many(Cf.INODES, [pack_u64(entry.inode) for entry in entries]) if entries else ()
    for entry, value in zip(entries, stored, strict=True):
        policy = INODE.load(value).policy if value is not None else 0
        if entry.is_dir:
            if not policy:
                start(change, entry.inode)
        elif entry.block:
            blocks.relabel(change, entry.block, entry.length_bytes, policy or above)
