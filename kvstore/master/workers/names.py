"""What workers note beside their blocks (rule 22): the names of the entries that list them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.core.limits import MAX_PATH_BYTES
from kvstore.master.namespace import blocks
from kvstore.master.storage import journal
from kvstore.master.storage.db import Cf, Reader
from kvstore.master.storage.records import COUNTERS, META_COUNTERS, PERMISSIONS, Counters


class BlockName(NamedTuple):
    """`at`: its index in the ids that were asked for."""

    at: int
    path: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int


class Names(NamedTuple):
    """True as of `sequence`; nothing of blocks that nobody owns."""

    sequence: int = 0
    rows: Sequence[BlockName] = ()


def names_of(reader: Reader, ids: Sequence[bytes]) -> Names:
    """About 15 µs a block; nothing may be written meanwhile."""
    if not ids:
        return Names()
    stored = reader.get(Cf.META, META_COUNTERS)
    directories: dict[int, str] = {}
    found = (_name_of(reader, directories, at, block) for at, block in enumerate(ids))
    return Names((COUNTERS.load(stored) if stored else Counters()).sequence, [name for name in found if name])


def _name_of(reader: Reader, directories: dict[int, str], index: int, block: bytes) -> BlockName | None:
    row = blocks.read(reader, block)
    listed = blocks.owner(reader, block, row.inode) if row is not None and not row.dead else None
    if listed is None:
        return None
    at, entry = listed
    if at.parent not in directories:
        directories[at.parent] = journal.directory_path(reader, at.parent)
    path = directories[at.parent] + at.name
    if len(path.encode()) > MAX_PATH_BYTES:  # it came to be by renames; nobody could ask for it in one piece
        return None
    return BlockName(
        index, path, entry.mode & PERMISSIONS, entry.uid, entry.gid, entry.mtime_ns, entry.ctime_ns
    )  # fmt: skip
