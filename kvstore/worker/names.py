"""Names noted beside blocks (rule 22): asked for with the reports, written in a thread, best effort.

Nobody waits for a note and nobody fails for one. The reply that calls a block owned brings its name as well; after a
registration all names are asked for once more, a few with each report, as files may have been renamed meanwhile. A
move between tiers takes the note along (`carry`), a fetched replica is asked about like any other block. While the
master is one that lost state, it does not get at notes that it may know less than.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.core.types import Address, BlockId
from kvstore.pb import master_pb2 as m
from kvstore.worker import note as notes
from kvstore.worker.background import Background
from kvstore.worker.block import Block
from kvstore.worker.disk import FULL_ERRNOS, Disk, Stamp
from kvstore.worker.note import Note
from kvstore.worker.store import Store
from kvstore.worker.volume import Volume

log = logging.getLogger(__name__)

MAX_NAMES: Final = 512
"""Asked for in one report: with the longest paths 2.2 MB of reply."""
MAX_SWEPT: Final = 64
"""... of those that nothing is known of: some 128 a second, as all workers ask after a restart of the master."""
_NO_ATTRIBUTES: Final = (errno.ENOTSUP, errno.EPERM, errno.ENOSYS)
_NO_ROOM: Final = (*FULL_ERRNOS, errno.E2BIG, errno.ERANGE)
"""ext4 says ENOSPC for an attribute that is too large, too."""


class _Job(NamedTuple):
    block: Block
    path: str
    note: Note
    is_trusted: bool
    """The master lacks nothing of what was noted before."""


class _Done(NamedTuple):
    """`before`, `after`: stamps of the file around the write, None when nothing was written."""

    errno: int = 0
    before: Stamp | None = None
    after: Stamp | None = None

    @property
    def is_only_the_note(self) -> bool:
        """Whether the file is what it was, but for its ctime, which an attribute changes."""
        if self.before is None or self.after is None:
            return False
        return self.after._replace(ctime_ns=self.before.ctime_ns) == self.before


class Names:
    """On the loop. `noted` and `failed` count, the latter by reason (no_room, unsupported, error)."""

    def __init__(
        self, store: Store, disk: Disk, background: Background, is_trusted: Callable[[], bool]
    ) -> None:  # fmt: skip
        self._store, self.disk, self._background = store, disk, background
        self._is_trusted = is_trusted
        self._wanted: dict[BlockId, None] = {}
        self._sweep: Iterator[Block] = iter(())
        self._turn = asyncio.Lock()
        self._without: set[int] = set()
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
        self._sweep = iter(list(self._store.all()))

    def take(self, held: Sequence[BlockId]) -> list[BlockId]:
        """Whose names the next report asks for, which tells of the blocks `held`."""
        asked = [block for block in self._take_wanted(MAX_NAMES // 2) if self._is_noteworthy(block)]
        new = [block for block in held if self._is_new(block)]
        asked += new[: MAX_NAMES // 2]
        self._wanted.update(dict.fromkeys(new[MAX_NAMES // 2 :]))
        for block in itertools.islice(self._sweep, MAX_SWEPT):
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
            if block is not None and not block.leaving:
                note = note_of(block.address, name, reply)
                jobs.append(_Job(block, block.path, note, self._is_trusted()))
        if jobs:
            self._background.start(self._write(jobs))

    async def carry(self, block: Block, target: str) -> None:
        """Put the note of a block beside a copy of it that lies at `target`."""
        try:
            await self._store.runtime.in_thread(self._carry, block.path, target)
        except OSError:
            block.noted = False  # it is asked for again when its new place is reported

    def _take_wanted(self, count: int) -> list[BlockId]:
        taken = list(itertools.islice(self._wanted, count))
        for block in taken:
            del self._wanted[block]
        return taken

    def _is_noteworthy(self, block: BlockId) -> bool:
        known = self._store.get(block)
        return known is not None and known.volume.id not in self._without

    def _is_new(self, block: BlockId) -> bool:
        known = self._store.get(block)
        return known is not None and not known.noted and known.volume.id not in self._without

    async def _write(self, jobs: Sequence[_Job]) -> None:
        async with self._turn:
            done = await self._store.runtime.in_thread(self._write_all, jobs)
        for job, result in zip(jobs, done, strict=True):
            self._finish(job, result)

    def _finish(self, job: _Job, done: _Done) -> None:
        block = job.block
        if self._store.get(block.id) is not block:
            return  # it went meanwhile
        if block.path != job.path:
            self.want(block.id)  # it was moved meanwhile, perhaps without this note
        elif done.errno:
            self._count_failure(block.volume, done.errno)
        else:
            self.noted += 1
            block.noted = True
            if done.is_only_the_note and block.stamp == done.before:
                block.stamp = done.after  # the bytes are still those that were hashed

    def _count_failure(self, volume: Volume, number: int) -> None:
        reason = "unsupported" if number in _NO_ATTRIBUTES else "no_room" if number in _NO_ROOM else "error"
        self.failed[reason] += 1
        if reason == "unsupported":
            self._without.add(volume.id)
        if (volume.id, reason) not in self._complained:
            self._complained.add((volume.id, reason))
            log.warning(
                "%s: names cannot be noted beside all blocks (%s): a master that loses its disk could not take "
                "these back", volume.path, errno.errorcode.get(number, number),
            )  # fmt: skip

    # ---- in threads

    def _write_all(self, jobs: Sequence[_Job]) -> list[_Done]:
        return [self._write_one(job) for job in jobs]

    def _write_one(self, job: _Job) -> _Done:
        try:
            stored = notes.decode(self.disk.attribute(job.path, notes.ATTRIBUTE), job.block.address)
            if stored is not None and not _is_replaced(stored, job):
                return _Done()
            before = self.disk.stat(job.path).stamp
            self.disk.set_attribute(job.path, notes.ATTRIBUTE, notes.encode(job.note))
            return _Done(0, before, self.disk.stat(job.path).stamp)
        except OSError as error:
            return _Done(error.errno or errno.EIO)

    def _carry(self, source: str, target: str) -> None:
        data = self.disk.attribute(source, notes.ATTRIBUTE)
        if data is not None:
            self.disk.set_attribute(target, notes.ATTRIBUTE, data)


def _is_replaced(stored: Note, job: _Job) -> bool:
    is_same_history = stored.incarnation == job.note.incarnation
    return not stored.says_the_same(job.note) and (job.is_trusted or is_same_history)


def note_of(address: Address, name: m.BlockName, reply: m.ReportReply) -> Note:
    return Note(
        name.path, name.mode, name.uid, name.gid, name.mtime_ns, name.ctime_ns, reply.incarnation,
        reply.names_sequence, address.block.pack(), address.length_bytes, address.hash,
    )  # fmt: skip
