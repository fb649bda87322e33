"""Names noted beside blocks (rule 22): asked for with the reports, written in a thread, best effort.

Nobody waits for a note and nobody fails for one. The reply that calls a block owned brings its name as well; after a
registration all names are asked for once more, a few with each report, as files may have been renamed meanwhile. A
move between tiers takes the note along (`carry`), a fetched replica is asked about like any other block. While the
master is one that lost state, it does not get at notes that it may know less than.

A note takes bytes of the volume, on ext4 a page. They are in its books before it is written, and what it really took
afterwards; a volume that has no room even when its coldest blocks go is left alone for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from kvstore.core.errors import NoSpace
from kvstore.core.types import Address, BlockId
from kvstore.pb import master_pb2 as m
from kvstore.worker.background import Background
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.store import Store
from kvstore.worker.capacity.room import Room
from kvstore.worker.reports import note as notes
from kvstore.worker.reports.note import Note
from kvstore.worker.volumes.disk import FATAL_ERRNOS, FULL_ERRNOS, Disk, FileState, disk_bytes
from kvstore.worker.volumes.volume import Volume, extra_bytes

log = logging.getLogger(__name__)

MAX_NAMES: Final = 512
"""Asked for in one report: with the longest paths 2.2 MB of reply."""
MAX_SWEPT: Final = 64
"""... of those that nothing is known of: some 128 a second, as all workers ask after a restart of the master."""
PORTION: Final = 16
"""Written in one go: so many take a little of even a small volume."""
ROOM_WAIT_S: Final = 1.0
"""For the room that a portion takes. Other notes wait meanwhile, nobody else does."""
PAUSE_S: Final = 30.0
"""A volume that had no room is not tried again before that."""
_NO_ATTRIBUTES: Final = (errno.ENOTSUP, errno.ENOSYS)
"""Said of a file system. EPERM is one file's own (``chattr +i``)."""
_NO_ROOM: Final = (*FULL_ERRNOS, errno.E2BIG, errno.ERANGE)
"""ext4 says ENOSPC for an attribute that is too large, too."""


class _Job(NamedTuple):
    block: Block
    volume: Volume
    path: str
    note: Note
    data: bytes
    """The note as it is written."""
    is_trusted: bool
    """The master lacks nothing of what was noted before."""

    @property
    def room_bytes(self) -> int:
        return room_bytes(self.data)


class _Written(NamedTuple):
    """The file around the write."""

    before: FileState
    after: FileState

    @property
    def is_only_the_note(self) -> bool:
        """Whether the file is what it was, but for its ctime, which an attribute changes."""
        return self.after.stamp._replace(ctime_ns=self.before.stamp.ctime_ns) == self.before.stamp


_Result = _Written | OSError | None
"""None: nothing needs to be written."""


class Names:
    """On the loop. `noted` and `failed` count, the latter by reason (no_room, unsupported, error)."""

    def __init__(
        self, store: Store, disk: Disk, background: Background, room: Room, is_trusted: Callable[[], bool]
    ) -> None:  # fmt: skip
        self._store, self.disk, self._background, self._room = store, disk, background, room
        self._is_trusted = is_trusted
        self._wanted: dict[BlockId, None] = {}
        self._sweeps: dict[int, Iterator[Block]] = {}
        self._turn = asyncio.Lock()
        self._without: set[int] = set()
        self._paused_until_s: dict[int, float] = {}
        self._complained: set[tuple[int, str]] = set()
        self.noted = 0
        self.failed: Counter[str] = Counter(no_room=0, unsupported=0, error=0)

    def want(self, block: BlockId) -> None:
        """Ask for its name with the next report: it is another one by now, or not known yet."""
        known = self._store.get(block)
        if known is not None:
            known.noted = False
            self._wanted[block] = None

    def want_all(self) -> None:
        """Ask for the names of all blocks, a few at a time."""
        for volume in self._store.in_service:
            self._sweep(volume)

    def take(self, held: Sequence[BlockId]) -> list[BlockId]:
        """Whose names the next report asks for, which tells of the blocks `held`."""
        self._resume()
        asked = [block for block in self._take_wanted(MAX_NAMES // 2) if self._is_noteworthy(block)]
        new = [block for block in held if self._is_new(block)]
        asked += new[: MAX_NAMES // 2]
        self._wanted.update(dict.fromkeys(new[MAX_NAMES // 2 :]))
        sweeps = [sweep for volume, sweep in self._sweeps.items() if self._takes_notes(volume)]
        for block in itertools.islice(itertools.chain(*sweeps), MAX_SWEPT):
            if block.owned and self._is_noteworthy(block.id):
                asked.append(block.id)
        return list(dict.fromkeys(asked))

    def on_reply(self, asked: Sequence[BlockId], reply: m.ReportReply | None) -> None:
        """What the master says of the blocks that `take` gave; None: the report was lost."""
        if reply is None:
            self._wanted.update(dict.fromkeys(asked))
            return
        jobs = []
        for name in reply.names:
            block = self._store.get(asked[name.index]) if name.index < len(asked) else None
            if block is None or block.leaving:
                continue
            if block.moving:
                self.want(block.id)  # it takes along what stood beside it when it started
                continue
            note = note_of(block.address, name, reply)
            jobs.append(_Job(block, block.volume, block.path, note, notes.encode(note), self._is_trusted()))
        if jobs:
            self._background.start(self._write(jobs))

    async def beside(self, block: Block, target: Volume) -> bytes:
        """The note of a block that is about to move to `target`. b"" when there is none, or no room for it there: it is
        asked for again when its new place is reported.
        """
        data = None
        with contextlib.suppress(OSError):
            data = await self._store.runtime.in_thread(self.disk.attribute, block.path, notes.ATTRIBUTE)
        if data is None or target.books.free < block.data_bytes + room_bytes(data):
            block.noted = False
            return b""
        return data

    async def carry(self, block: Block, data: bytes, target: Volume, path: str) -> int:
        """Put its note beside a copy of a block, which lies at `path` on `target`. Returns the bytes that it takes
        there, for which there is room. Raises KvError when the drive fails.
        """
        try:
            return await self._store.runtime.in_thread(self._carry, data, path) if data else 0
        except OSError as error:
            block.noted = False
            if error.errno in FATAL_ERRNOS:
                raise self._store.explain(target, error, "noting a name beside a copy of a block") from None
            return 0

    def _sweep(self, volume: Volume) -> None:
        """Ask for the names of its blocks, those without a note first."""
        self._sweeps[volume.id] = iter(sorted(self._store.hold(volume), key=operator.attrgetter("noted")))

    def _resume(self) -> None:
        """Volumes that had no room are tried again in time."""
        now_s = self._store.runtime.monotonic_s()
        for volume in self._store.in_service:
            if self._paused_until_s.get(volume.id, math.inf) <= now_s:
                del self._paused_until_s[volume.id]
                self._sweep(volume)

    def _take_wanted(self, count: int) -> list[BlockId]:
        taken = list(itertools.islice(self._wanted, count))
        for block in taken:
            del self._wanted[block]
        return taken

    def _is_noteworthy(self, block: BlockId) -> bool:
        known = self._store.get(block)
        return known is not None and self._takes_notes(known.volume.id)

    def _is_new(self, block: BlockId) -> bool:
        known = self._store.get(block)
        return known is not None and not known.noted and self._takes_notes(known.volume.id)

    def _takes_notes(self, volume: int) -> bool:
        return volume not in self._without and volume not in self._paused_until_s

    async def _write(self, jobs: Sequence[_Job]) -> None:
        async with self._turn:
            stored = await self._store.runtime.in_thread(self._compare_all, jobs)
            due: dict[Volume, list[_Job]] = {}
            for job, result in zip(jobs, stored, strict=True):
                if result is True:
                    due.setdefault(job.volume, []).append(job)
                else:
                    self._finish(job, result)
            for volume, mine in due.items():
                for start in range(0, len(mine), PORTION):
                    await self._write_portion(volume, mine[start : start + PORTION])

    async def _write_portion(self, volume: Volume, jobs: Sequence[_Job]) -> None:
        """On a volume that has room for them, or makes it."""
        if not self._takes_notes(volume.id) or not volume.in_service:
            return
        size = sum(job.room_bytes for job in jobs)
        try:
            await self._room.grow(volume, lambda: size, ROOM_WAIT_S)
        except NoSpace as error:
            self._paused_until_s[volume.id] = self._store.runtime.monotonic_s() + PAUSE_S
            self._count_failures(volume, "no_room", error.message, len(jobs))
            return
        volume.books.begin_naming(size)
        written = await self._store.runtime.in_thread(self._write_all, jobs)
        for job, result in zip(jobs, written, strict=True):
            volume.books.end_naming(job.room_bytes, self._measure(job, result))
            self._finish(job, result)

    def _measure(self, job: _Job, result: _Result) -> int:
        """How much more its file takes than the books have."""
        is_there = self._store.get(job.block.id) is job.block and job.block.path == job.path
        if not is_there or not isinstance(result, _Written):
            return 0
        return self._store.measured(job.block, extra_bytes(job.block.address, result.after))

    def _finish(self, job: _Job, result: _Result) -> None:
        block = job.block
        if self._store.get(block.id) is not block:
            return  # it went meanwhile
        if block.path != job.path or block.moving:
            self.want(block.id)  # its new place may lack this note
        elif isinstance(result, OSError):
            self._failed(block.volume, result)
        else:
            self.noted += 1
            block.noted = True
        if isinstance(result, _Written) and result.is_only_the_note and block.stamp == result.before.stamp:
            block.stamp = result.after.stamp  # the bytes are still those that were hashed

    def _failed(self, volume: Volume, error: OSError) -> None:
        number = error.errno or errno.EIO
        reason = "unsupported" if number in _NO_ATTRIBUTES else "no_room" if number in _NO_ROOM else "error"
        if reason == "unsupported":
            self._without.add(volume.id)
        if number in FATAL_ERRNOS:
            self._store.explain(volume, error, "noting a name beside a block")
        self._count_failures(volume, reason, errno.errorcode.get(number, str(number)), 1)

    def _count_failures(self, volume: Volume, reason: str, why: str, count: int) -> None:
        self.failed[reason] += count
        if (volume.id, reason) not in self._complained:
            self._complained.add((volume.id, reason))
            log.warning(
                "%s: names cannot be noted beside all blocks (%s): a master that loses its disk could not take "
                "these back", volume.path, why,
            )  # fmt: skip

    # ---- in threads

    def _compare_all(self, jobs: Sequence[_Job]) -> list[Literal[True] | OSError | None]:
        """True: it is to be written."""
        return [self._compare(job) for job in jobs]

    def _compare(self, job: _Job) -> Literal[True] | OSError | None:
        try:
            stored = notes.decode(self.disk.attribute(job.path, notes.ATTRIBUTE), job.block.address)
        except OSError as error:
            return error
        return True if stored is None or _is_replaced(stored, job) else None

    def _write_all(self, jobs: Sequence[_Job]) -> list[_Written | OSError]:
        return [self._write_one(job) for job in jobs]

    def _write_one(self, job: _Job) -> _Written | OSError:
        try:
            before = self.disk.stat(job.path)
            self.disk.set_attribute(job.path, notes.ATTRIBUTE, job.data)
            return _Written(before, self.disk.stat(job.path))
        except OSError as error:
            return error

    def _carry(self, data: bytes, path: str) -> int:
        before = self.disk.stat(path)
        self.disk.set_attribute(path, notes.ATTRIBUTE, data)
        return max(0, self.disk.stat(path).used_bytes - before.used_bytes)


def room_bytes(data: bytes) -> int:
    """What a note may take on a disk; 0 for none."""
    return disk_bytes(len(data))


def _is_replaced(stored: Note, job: _Job) -> bool:
    is_same_history = stored.incarnation == job.note.incarnation
    return not stored.says_the_same(job.note) and (job.is_trusted or is_same_history)


def note_of(address: Address, name: m.BlockName, reply: m.ReportReply) -> Note:
    return Note(
        name.path, name.mode, name.uid, name.gid, name.mtime_ns, name.ctime_ns, reply.incarnation,
        reply.names_sequence, address.block.pack(), address.length_bytes, address.hash,
    )  # fmt: skip
