"""What RocksDB does not notice in its own write-ahead logs, found before it opens them.

It opens, in silence, over a log that is missing or cut short in the middle of several, and over a newest log that lost
what was synced; it refuses garbage behind the last synced byte, which any power cut may leave. Here both are put right
(rule 20): *torn end tolerated, hole refused*. Three things tell the two apart: each write has the sequence behind the
one before it, across all logs; a whole record behind a broken one shows that this is no end; and a `Mark` says how long
each log was when it was last synced. Behind the mark the newest log may be damaged in any way (a power cut lets pages
reach the drive in any order): from the first record that is not whole on it is cut, and kept aside (`CUT`) unless that
was a torn write.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.core.errors import Corrupt
from kvstore.master.storage.logformat import (
    BATCH,
    BLOCK,
    FIRST,
    FULL,
    HEADER,
    LAST,
    Fragment,
    after,
    fragment,
    is_intact,
    records,
)

log = logging.getLogger(__name__)

SECTOR: Final = 512
"""Bytes that a drive writes as a whole, or not at all."""
CUT: Final = "CUT"
"""Bytes that were cut off a log though somebody may have been told that they are synced: what they said is to be asked
of the workers. It goes when that has been written down (`rebuild.Kind.MEND`)."""
REMEDY: Final = (
    "restore the directory from a backup, or move it away and start `kvstore master --rebuild`, "
    "which takes the names back from the workers"
)
_OLDEST_LOG, _LAST_SEQUENCE = 10, 4
_NUMBERS: Final = frozenset({2, 9, 3, 203, _OLDEST_LOG, _LAST_SEQUENCE})
"""Tags of an edit whose value is a number: log, previous log, next file, largest column, oldest log, last sequence."""
_TEXTS: Final = frozenset({1, 8193})
"""Comparator, database id."""
_EDIT_HEAD: Final = 256
"""Bytes of an edit that these fields do not exceed."""


class Synced(NamedTuple):
    """What is known to have reached the drive."""

    sequence: int = 0
    """Of the last write."""
    logs: Mapping[str, int] = {}
    """Name → bytes."""
    manifest: tuple[str, int] = ("", 0)
    """(name, bytes)"""


def newest_manifest(directory: Path) -> tuple[str, int]:
    """(name, bytes); ("", 0) when there is none."""
    for newest in sorted(directory.glob("MANIFEST-*"), reverse=True):
        with contextlib.suppress(FileNotFoundError):  # replaced by a newer one just now
            return newest.name, newest.stat().st_size
    return "", 0


def sizes(directory: Path) -> dict[str, int]:
    """The logs in a directory of RocksDB, and how long they are now; oldest first."""
    found: dict[str, int] = {}
    with os.scandir(directory) as files:
        for file in files:
            stem, _, suffix = file.name.partition(".")
            if suffix == "log" and stem.isdigit():
                with contextlib.suppress(FileNotFoundError):  # RocksDB removes logs that it needs no more
                    found[file.name] = file.stat().st_size
    return dict(sorted(found.items(), key=lambda item: number(item[0])))


def check(directory: Path, synced: Synced) -> None:
    """Raise Corrupt, with the name of the file, when something that was synced is not there any more; cut what follows
    the last whole record of the newest log. `synced`: what the last mark says."""
    lengths = sizes(directory)
    manifest = read_manifest(directory)
    if manifest is None:
        if lengths or synced.sequence or any(directory.glob("*.sst")):
            raise damaged(directory, "CURRENT is missing, or the MANIFEST that it names")
        return
    if manifest.name == synced.manifest[0] and manifest.length < synced.manifest[1]:
        raise damaged(directory, _shortage(manifest.name, synced.manifest[1], manifest.length))
    for name, length in synced.logs.items():
        if number(name) >= manifest.oldest_log and lengths.get(name, 0) < length:
            raise damaged(directory, _shortage(name, length, lengths.get(name)))
    needed = [name for name in lengths if number(name) >= manifest.oldest_log]
    whole = _check_logs(directory, needed, manifest, synced)
    if needed:
        _cut(directory, needed[-1], whole)


def _check_logs(directory: Path, needed: Sequence[str], manifest: Manifest, synced: Synced) -> int:
    """Whether these logs, oldest first, go on where the manifest ends, without a gap. Returns how many bytes of the
    newest one are whole. Raises Corrupt."""
    before, following, whole = manifest.name, manifest.sequence + 1, 0
    for name in needed:
        end = _check_log(directory, name, _safe(name, synced), is_newest=name == needed[-1])
        if end.first is not None and end.first > following:
            raise damaged(directory, _gap(before, following, name, end.first))
        if end.following is not None:
            before, following = name, end.following
        whole = end.whole
    if max(following, manifest.sequence + 1) <= synced.sequence:
        raise damaged(directory, f"{before} ends before write {following}, but {synced.sequence} were synced")
    return whole


def find_damage(directory: Path) -> str:
    """Which file RocksDB complains of, when it does not say: reads manifest and logs; "" when they are whole."""
    manifest = read_manifest(directory)
    if manifest is None:
        return ""
    logs = [name for name in sizes(directory) if number(name) >= manifest.oldest_log]
    for name in (manifest.name, *logs):
        broken = [record.end for record in records((directory / name).read_bytes(), 0) if not record.is_whole]
        if broken:
            return f"{name} is damaged at byte {broken[0]}"
    return ""


def damaged(directory: Path, what: str) -> Corrupt:
    return Corrupt(f"the database in {directory} is damaged and was not opened: {what}; {REMEDY}")


def number(name: str) -> int:
    """Numbers grow with time; whether a log is needed is a matter of its number."""
    return int(name.partition(".")[0])


class Manifest(NamedTuple):
    name: str
    length: int
    """Bytes."""
    oldest_log: int
    """The oldest log that holds what is in no table yet. Older ones may lie there until RocksDB has deleted them, in
    any order."""
    sequence: int
    """Of the last write when the manifest was last written: the logs go on from there, or begin before."""


def read_manifest(directory: Path) -> Manifest | None:
    """None when there is none; what is damaged in it is left to RocksDB to say."""
    try:
        name = (directory / "CURRENT").read_text().strip()
        data = (directory / name).read_bytes()
    except (OSError, ValueError):
        return None
    edits = [_numbers(edit.head) for edit in records(data, len(data), _EDIT_HEAD) if edit.is_whole]
    oldest = max((edit.get(_OLDEST_LOG, 0) for edit in edits), default=0)
    return Manifest(name, len(data), oldest, max((edit.get(_LAST_SEQUENCE, 0) for edit in edits), default=0))


def _numbers(edit: bytes) -> dict[int, int]:
    """Tag → value of the numbers at the head of an edit."""
    found: dict[int, int] = {}
    at = 0
    while at < len(edit):
        tag, at = _varint(edit, at)
        if tag not in _NUMBERS and tag not in _TEXTS:
            break
        value, at = _varint(edit, at)
        if tag in _TEXTS:
            at += value
        else:
            found[tag] = value
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends); cut off at the end of the data."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    return value, at


def _shortage(name: str, length: int, found: int | None) -> str:
    if found is None:
        return f"{name} is missing, {length} bytes of it were synced"
    return f"{name} has {found} bytes, {length} were synced"


def _gap(before: str, following: int, name: str, first: int) -> str:
    return (
        f"{before} ends before write {following}, and {name} begins with {first}: a log between them is missing, "
        f"or {before} was cut short"
    )


def _safe(name: str, synced: Synced) -> int | None:
    """Bytes of a log that the mark says were synced: none of one that is younger; None when there is no mark."""
    return synced.logs.get(name, 0) if synced.sequence else None


def _check_log(directory: Path, name: str, safe: int | None, *, is_newest: bool) -> _End:
    """Walk through a log of which `safe` bytes were synced; None: nobody knows. Bytes behind its last whole record: a
    torn end, damage of what may have been synced, or a hole?"""
    data = (directory / name).read_bytes()
    end = _walk(data, safe or 0 if is_newest else len(data))
    if end.whole < len(data):
        is_hole = (safe is None or not is_newest) and _goes_on(data, end)
        if end.whole < (safe or 0) or end.gap or is_hole:
            raise damaged(directory, f"{name} has a hole at byte {end.broken}")
    return end


def _cut(directory: Path, name: str, whole: int) -> None:
    """Cut what follows the whole records of a log. What is no torn write is kept in the file `CUT`, durably, before it
    goes: the start that looks there may be a later one."""
    data = (directory / name).read_bytes()
    if whole == len(data):
        return
    size, is_torn = len(data) - whole, _is_torn(data, whole)
    if not is_torn:
        keep(directory / CUT, data[whole:])
    os.truncate(directory / name, whole)
    if is_torn:
        log.warning("%s: cut %d bytes behind its last whole record, a write that was under way", name, size)
    else:
        log.warning(
            "%s: %d bytes at its end were damaged and are cut off; they may have been acknowledged: what the workers "
            "have noted of them is taken back now, the rest is lost", name, size,
        )  # fmt: skip


def keep(path: Path, data: bytes) -> None:
    """Write a file anew, durably, its name included: all of it or nothing."""
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _is_torn(data: bytes, at: int) -> bool:
    """Whether the bytes from `at` on are the beginning of a record whose rest is not there, or zeros from some sector
    on: it was never synced, so nobody was told of it. One that has its length is damaged, and may have been
    acknowledged."""
    written = len(data.rstrip(b"\0"))
    missing = min(len(data), -(-written // SECTOR) * SECTOR)
    while at < written:
        start = at + HEADER.size
        if start > missing:
            return True
        crc, length, kind = HEADER.unpack_from(data, at)
        if not FULL <= kind <= LAST or start + length > at - at % BLOCK + BLOCK:
            return False
        piece = Fragment(kind, start, min(start + length, len(data)), crc)
        if start + length > len(data):
            return not is_intact(data, piece)  # a length that is wrong behind bytes that are all there
        if not is_intact(data, piece):
            return missing < piece.end
        at = after(piece.end)
    return True


class _End(NamedTuple):
    """Where the whole records of a log end."""

    first: int | None
    """Sequence of its first write; None when it has none."""
    following: int | None
    """What the next write must have."""
    whole: int
    """Bytes of whole records."""
    broken: int
    """Where the first fragment lies that is none; it may belong to a record that begins before."""
    gap: bool
    """It stopped at a whole record that has a later sequence than it should."""


def _walk(data: bytes, checked_from: int) -> _End:
    """Follow the records. The checksums only of what reaches beyond `checked_from`: RocksDB checks them all, but would
    refuse a torn end."""
    first: int | None = None
    following: int | None = None
    whole = broken = 0
    for record in records(data, checked_from):
        if not record.is_whole or len(record.head) < BATCH.size:
            broken = record.end
            break
        sequence, count = BATCH.unpack(record.head)
        if following is not None and sequence > following:
            return _End(first, following, whole, whole, gap=True)
        first = sequence if first is None else first
        following, whole, broken = sequence + count, record.end, record.end
    return _End(first, following, whole, broken, gap=False)


def _goes_on(data: bytes, end: _End) -> bool:
    """Whether a whole fragment that begins a later record lies behind the broken one: byte by byte in its own block, by
    the structure in those behind it."""
    block_end = min(len(data), end.broken - end.broken % BLOCK + BLOCK)
    starts: Iterator[int] = iter(range(end.broken + 1, block_end))
    if any(_begins_later(data, at, end.following or 0) for at in starts):
        return True
    return any(
        _begins_later(data, at, end.following or 0)
        for block in range(block_end, len(data), BLOCK)
        for at in _headers(data, block)
    )


def _headers(data: bytes, block: int) -> Iterator[int]:
    at = block
    while at < block + BLOCK and (piece := fragment(data, at)) is not None:
        yield at
        at = after(piece.end)


def _begins_later(data: bytes, at: int, following: int) -> bool:
    piece = fragment(data, at)
    if piece is None or piece.kind not in (FULL, FIRST) or piece.end - piece.start < BATCH.size:
        return False
    return BATCH.unpack_from(data, piece.start)[0] >= following and is_intact(data, piece)
