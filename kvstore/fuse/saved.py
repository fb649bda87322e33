"""What a successor of this process needs (rule 28): records in a file that the keeper holds.

The file is a memfd, so a write is a copy and it lives as long as the keeper does, whoever is killed. Records are
appended, each a length and msgpack of (kind, key, value), a nil value ends one; the last of a key counts. `commit` runs
before each reply to the kernel and writes what was touched since the last one, in one `write` (a few µs). When the file
has grown far beyond what still counts, a compacted one takes its place.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeVar

import msgspec

from kvstore.client.sockets import SealedBlock
from kvstore.core.limits import MIB
from kvstore.core.types import Entry
from kvstore.fuse.localfile import Hashed, Key, LocalFile
from kvstore.fuse.names import NO_STATE, State

COMPACT_BYTES: Final = 4 * MIB
_LENGTH_BYTES: Final = 4

FACTS, FILE, HANDLE, LISTING, DIRECTORY, WANTED, REMOVED = range(7)
"""Kinds of records."""


class Facts(msgspec.Struct, array_like=True, frozen=True):
    """What the first process learned from the master: a successor starts without it."""

    root: Entry
    cluster: str
    max_block_bytes: int


class FileRecord(msgspec.Struct, array_like=True, frozen=True):
    """A `LocalFile`. Its bytes: a read-only fd in the keeper's hands, under `id`."""

    id: int
    inode: int
    key: Key | None
    temporary: bool
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    size_bytes: int
    staging: int
    """The worker's handle of the staging file; 0: a file without a name; -1: none."""
    reserved_bytes: int
    sealed: SealedBlock | None
    hashed: Hashed | None
    entry: Entry | None
    published: bool
    dirty: bool
    keep_mtime: bool
    temp_key: Key | None
    looked_up: bool
    expected_opens: int
    mapped: bool
    seen: tuple[int, int] | None
    state: State
    process: int = 0
    failed: tuple[int, str] | None = None
    """Code and message of the error that all who want to publish it get."""


class HandleRecord(msgspec.Struct, array_like=True, frozen=True):
    """An open file: of a local file, or of a sealed one (then its entry)."""

    inode: int
    """As which the kernel opened it."""
    file: int
    """`LocalFile.id`; 0 for a sealed one."""
    writes: bool
    entry: Entry | None


class ListingRecord(msgspec.Struct, array_like=True, frozen=True):
    """An open directory, and how far it was read."""

    directory: int
    names: int
    """Names of the master's list that were read."""
    after: str
    """The last of them: a listing goes on behind it."""


class DirectoryRecord(msgspec.Struct, array_like=True, frozen=True):
    """A directory that the mount knows: what it is called decides which names in it are temporary."""

    entry: Entry
    key: Key | None


class WantedRecord(msgspec.Struct, array_like=True, frozen=True):
    """Write-opens of a sealed file that were sent to look it up again."""

    count: int


class RemovedRecord(msgspec.Struct, array_like=True, frozen=True):
    """An inode that is open and has no name."""


class Recovered(NamedTuple):
    """What a former process left."""

    facts: Facts | None
    files: list[FileRecord]
    handles: dict[int, HandleRecord]
    listings: dict[int, ListingRecord]
    directories: dict[int, DirectoryRecord]
    wanted: dict[int, WantedRecord]
    removed: set[int]


class Saved:
    """Keeps nothing: without a keeper nobody takes over."""

    def touch(self, file: LocalFile) -> None:
        """It changed: its record is written with the next commit."""

    def remove(self, file: LocalFile) -> None: ...

    def facts(self, facts: Facts) -> None: ...

    def handle(self, number: int, record: HandleRecord | None) -> None: ...

    def removed(self, inode: int, still_open: bool) -> None:
        """The name of a sealed file went: whoever has it open has a file without links."""

    def listing(self, number: int, record: ListingRecord | None) -> None: ...

    def directory(self, inode: int, record: DirectoryRecord | None) -> None: ...

    def wanted(self, inode: int, count: int) -> None: ...

    def commit(self) -> None:
        """From here on a successor knows."""


NOTHING_SAVED: Final = Saved()
R = TypeVar("R", FileRecord, HandleRecord, ListingRecord, DirectoryRecord, WantedRecord, RemovedRecord)
_encoder = msgspec.msgpack.Encoder()
_line = msgspec.msgpack.Decoder(tuple[int, int, msgspec.Raw])
_NIL: Final = _encoder.encode(None)


class SavedState(Saved):
    """In the keeper's file. `replace` hands over a compacted one. `state_of` tells a temporary version's place."""

    def __init__(self, fd: int, replace: Callable[[int], None]) -> None:
        self._fd, self._replace = _appending(fd), replace
        self.state_of: Callable[[LocalFile], State] = lambda file: NO_STATE
        self._live: dict[tuple[int, int], bytes] = {}
        self._touched: dict[int, LocalFile] = {}
        self._pending: list[bytes] = []
        self._size = self._live_bytes = 0

    def recover(self) -> Recovered:
        """Read the file. A torn record at its end is what the former process did not get to write: it had not replied
        yet.
        """
        self._live, self._live_bytes = {}, 0
        for kind, key, line in _lines(os.pread(self._fd, os.fstat(self._fd).st_size, 0)):
            self._count(kind, key, line)
        facts = self._live.get((FACTS, 0))
        return Recovered(
            msgspec.msgpack.decode(_value(facts), type=Facts) if facts else None,
            list(self._records(FILE, FileRecord).values()),
            self._records(HANDLE, HandleRecord),
            self._records(LISTING, ListingRecord),
            self._records(DIRECTORY, DirectoryRecord),
            self._records(WANTED, WantedRecord),
            set(self._records(REMOVED, RemovedRecord)),
        )

    def touch(self, file: LocalFile) -> None:
        self._touched[file.id] = file

    def remove(self, file: LocalFile) -> None:
        self._touched.pop(file.id, None)
        self._put(FILE, file.id, None)

    def facts(self, facts: Facts) -> None:
        self._put(FACTS, 0, facts)

    def handle(self, number: int, record: HandleRecord | None) -> None:
        self._put(HANDLE, number, record)

    def removed(self, inode: int, still_open: bool) -> None:
        self._put(REMOVED, inode, RemovedRecord() if still_open else None)

    def listing(self, number: int, record: ListingRecord | None) -> None:
        self._put(LISTING, number, record)

    def directory(self, inode: int, record: DirectoryRecord | None) -> None:
        self._put(DIRECTORY, inode, record)

    def wanted(self, inode: int, count: int) -> None:
        self._put(WANTED, inode, WantedRecord(count) if count else None)

    def commit(self) -> None:
        if self._touched:
            touched, self._touched = self._touched, {}
            for file in touched.values():
                self._put(FILE, file.id, record_of(file, self.state_of(file)))
        if self._pending:
            data, self._pending = b"".join(self._pending), []
            os.write(self._fd, data)
            self._size += len(data)
            if self._size > COMPACT_BYTES + 2 * self._live_bytes:
                self._compact()

    def _put(self, kind: int, key: int, value: msgspec.Struct | None) -> None:
        if value is None and (kind, key) not in self._live:
            return
        line = _encoder.encode((kind, key, value))
        if self._live.get((kind, key)) != line:
            self._count(kind, key, line)
            self._pending.append(len(line).to_bytes(_LENGTH_BYTES, "little") + line)

    def _count(self, kind: int, key: int, line: bytes) -> None:
        self._live_bytes -= len(self._live.pop((kind, key), b""))
        if not line.endswith(_NIL) or _value(line) != _NIL:
            self._live[kind, key] = line
            self._live_bytes += len(line)

    def _records(self, kind: int, type_: type[R]) -> dict[int, R]:
        decoder = msgspec.msgpack.Decoder(type_)
        return {key: decoder.decode(_value(line)) for (k, key), line in self._live.items() if k == kind}

    def _compact(self) -> None:
        fd = _appending(os.memfd_create("kvstore-mount-state", os.MFD_CLOEXEC))
        data = b"".join(len(line).to_bytes(_LENGTH_BYTES, "little") + line for line in self._live.values())
        os.write(fd, data)
        self._replace(fd)
        os.close(self._fd)
        self._fd, self._size = fd, len(data)


def record_of(file: LocalFile, state: State) -> FileRecord:
    return FileRecord(
        file.id, file.inode, file.key, file.temporary, file.mode, file.uid, file.gid, file.mtime_ns, file.ctime_ns,
        file.size_bytes, -1 if file.staged is None else file.staged.handle, file.reserved_bytes, file.sealed,
        file.hashed, file.entry, file.published, file.is_dirty, file.keep_mtime, file.temp_key, file.looked_up,
        file.expected_opens, file.mapped, file.seen, State("closed", 0.0) if file.renaming else state,
        file.process, (file.failed.code, file.failed.message) if file.failed else None,
    )  # fmt: skip


def _appending(fd: int) -> int:
    """Two processes may have it, one after the other."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def _value(line: bytes) -> bytes:
    return bytes(_line.decode(line)[2])


def _lines(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    while at + _LENGTH_BYTES <= len(data):
        end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        if end > len(data):
            return
        line = data[at + _LENGTH_BYTES : end]
        kind, key, _ = _line.decode(line)
        yield kind, key, line
        at = end
