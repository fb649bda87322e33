"""The ordered log of metadata changes, in the same batch as the state they make.

Its sequence is the database's own (rule 16). It is bounded by records and by bytes and trimmed with every record, so
that no single change pays for it; recovery never needs it. It holds (parent inode, name), which says exactly what
happened and costs nothing; paths are put together when somebody reads.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.core.types import Address
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, Reader
from kvstore.master.storage.records import (
    COUNTERS,
    INODE,
    JOURNAL,
    META_COUNTERS,
    Counters,
    JournalRow,
    NameRow,
    PolicyRow,
    dump,
    pack_u64,
    unpack_u64,
)

TRIM_PER_RECORD = 2
"""More than one, so that a smaller bound is reached some day; few, so that no change is slow."""
MAX_DEPTH = 1024
"""Of directories when a path is put together."""


class Event(NamedTuple):
    sequence: int
    time_ns: int
    kind: str
    path: str
    """As its directory is called now; `?/name` when that is gone."""
    to_path: str
    inode: int
    address: Address | None


def append(
    change: Change, kind: str, parent: int, name: str, inode: int,
    entry: NameRow | None = None, to_parent: int = 0, to_name: str = "", policy: PolicyRow | None = None,
) -> None:  # fmt: skip
    """`kind`: publish, mkdir, remove, rename, setattr, policy, evict, node."""
    counters = change.counters
    counters.sequence += 1
    row = dump(JournalRow(change.now_ns, kind, parent, name, inode, entry, to_parent, to_name, policy))
    change.put(Cf.JOURNAL, pack_u64(counters.sequence), row)
    counters.journal_bytes += len(row)
    _trim(change)


def _trim(change: Change) -> None:
    counters, limits = change.counters, change.limits
    for _ in range(TRIM_PER_RECORD):
        kept = counters.sequence - counters.journal_first + 1
        if kept <= 1 or (kept <= limits.records and counters.journal_bytes <= limits.size_bytes):
            return
        key = pack_u64(counters.journal_first)
        stored = change.get(Cf.JOURNAL, key)
        if stored is None:  # a rebuild went on above the sequence that workers had seen
            counters.journal_first = unpack_u64(change.scan(Cf.JOURNAL, key, None, 1)[0][0])
            continue
        counters.journal_bytes -= len(stored)
        counters.journal_first += 1
        change.delete(Cf.JOURNAL, key)


def read(reader: Reader, after: int, limit: int) -> tuple[list[Event], int]:
    """(events behind sequence `after`, the oldest sequence still kept); after 0 = the last `limit` ones."""
    stored = reader.get(Cf.META, META_COUNTERS)
    counters = COUNTERS.load(stored) if stored else Counters()
    start = after + 1 if after else counters.sequence - limit + 1
    start = max(start, counters.journal_first)
    directories: dict[int, str] = {}
    rows = reader.scan(Cf.JOURNAL, pack_u64(min(start, 2**64 - 1)), None, limit)
    return [_event(reader, directories, unpack_u64(k), JOURNAL.load(v)) for k, v in rows], counters.journal_first


def _event(reader: Reader, directories: dict[int, str], sequence: int, row: JournalRow) -> Event:
    path = row.name if row.kind == "node" else _path(reader, directories, row.parent, row.name)
    to_path = _path(reader, directories, row.to_parent, row.to_name) if row.to_parent else ""
    address = row.entry.address if row.entry else None
    return Event(sequence, row.time_ns, row.kind, path, to_path, row.inode, address)


def _path(reader: Reader, directories: dict[int, str], parent: int, name: str) -> str:
    prefix = directories.get(parent)
    if prefix is None:
        prefix = directories[parent] = directory_path(reader, parent)
    return f"{prefix}{name}"


def directory_path(reader: Reader, inode: int) -> str:
    """``a/b/`` of a directory, "" of the root, ``?/`` of one that is gone."""
    names: list[str] = []
    while inode > 1 and len(names) < MAX_DEPTH:
        stored = reader.get(Cf.INODES, pack_u64(inode))
        if stored is None:
            return "?/" + "".join(reversed(names))
        row = INODE.load(stored)
        names.append(row.name + "/")
        inode = row.parent
    return "".join(reversed(names))
