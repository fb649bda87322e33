"""A file system process takes over from a former one: its records become tables again (rule 28)."""

from __future__ import annotations

import logging
import os
from typing import Final

from kvstore.client.blocks import AsyncBlocks
from kvstore.client.files import reopened
from kvstore.client.local import AsyncLocalWorker
from kvstore.core.errors import KvError, from_wire
from kvstore.fuse.attached import TakeOver
from kvstore.fuse.files import Handle
from kvstore.fuse.handles import DIRECTORY_BIT, MAX_HANDLE
from kvstore.fuse.localfile import LocalFile
from kvstore.fuse.ops import Operations, Parts
from kvstore.fuse.repeats import Repeats
from kvstore.fuse.saved import FileRecord, HandleRecord, Recovered

log = logging.getLogger(__name__)

_NUMBER: Final = MAX_HANDLE | DIRECTORY_BIT
"""What of the kernel's number is ours."""


async def restore(
    operations: Operations,
    parts: Parts,
    blocks: AsyncBlocks,
    worker: AsyncLocalWorker | None,
    recovered: Recovered,
    taken: TakeOver,
) -> None:
    """Handles are those that the kernel still has: of a reply that it never got there is none. Whoever closed a file
    while nobody served was told EIO: what nobody has open any more is dropped, unless it was whole.
    """
    operations.repeats = Repeats(taken.table.again)
    for known in recovered.directories.values():
        parts.tree.remember(known.entry, known.key)
    files: dict[int, LocalFile] = {}
    for record in recovered.files:
        files[record.id] = _file(record, taken.kept.pop(record.id, -1), blocks)
        _add(parts, files[record.id], record)
    open_now = {o.handle & _NUMBER for o in taken.table.opens}
    _restore_handles(parts, files, recovered, open_now)
    _restore_listings(operations, parts, recovered, open_now)
    for id_, fd in taken.kept.items():
        os.close(fd)
        parts.area.backing.drop(id_)
    parts.local.resume_hand_shakes({i: w.count for i, w in recovered.wanted.items()}, parts.tree.now_s())
    await _drop_unfinished(parts)
    if worker is not None and recovered.facts is not None:
        await _abort_unknown(worker, {file.staged.handle for file in files.values() if file.staged is not None})
    parts.saved.commit()


def _restore_handles(parts: Parts, files: dict[int, LocalFile], recovered: Recovered, open_now: set[int]) -> None:
    for number, handle in recovered.handles.items():
        if number in open_now:
            _restore_handle(parts, files, number, handle)
        else:
            parts.saved.handle(number, None)
    for inode in recovered.removed:
        if (opened := parts.sealed.get(inode)) is not None:
            opened.removed = True
        else:
            parts.saved.removed(inode, still_open=False)


def _restore_listings(operations: Operations, parts: Parts, recovered: Recovered, open_now: set[int]) -> None:
    for number, listing in recovered.listings.items():
        if number | DIRECTORY_BIT in open_now:
            directory = operations.listing(listing.directory)
            directory.resume(listing.names, listing.after)
            operations.directories.restore(number, directory)
        else:
            parts.saved.listing(number, None)


def _file(record: FileRecord, kept_fd: int, blocks: AsyncBlocks) -> LocalFile:
    file = LocalFile(
        record.id, record.inode, record.key, record.temporary, record.mode, record.uid, record.gid, record.mtime_ns,
        record.ctime_ns, record.size_bytes, kept_fd,
    )  # fmt: skip
    if record.staging >= 0 and kept_fd >= 0:
        file.staged = blocks.adopt(record.staging, reopened(kept_fd, os.O_RDWR))
        file.reserved_bytes, file.seen = record.reserved_bytes, record.seen
    file.sealed, file.hashed, file.entry, file.published = (
        record.sealed, record.hashed, record.entry, record.published
    )  # fmt: skip
    file.failed = from_wire(*record.failed) if record.failed else None
    file.changes = 1 if record.dirty else 0
    if file.hashed is not None:
        file.hashed = file.hashed._replace(changes=file.changes)
    file.keep_mtime, file.temp_key, file.looked_up, file.expected_opens, file.mapped, file.process = (
        record.keep_mtime, record.temp_key, record.looked_up, record.expected_opens, record.mapped, record.process
    )  # fmt: skip
    return file


def _add(parts: Parts, file: LocalFile, record: FileRecord) -> None:
    parts.local.add(file)
    if file.key is None:
        return
    if file.temporary:
        parts.local.temps.restore(file.key, file, record.state)
    else:
        parts.local.by_key[file.key] = file


def _restore_handle(parts: Parts, files: dict[int, LocalFile], number: int, record: HandleRecord) -> None:
    if record.entry is not None:
        sealed = parts.sealed.restore(record.entry)
        sealed.handles += 1
        parts.files.handles.restore(number, Handle(sealed, record.inode))
        return
    file = files.get(record.file)
    if file is None:
        log.warning("handle %d: its file is not among what was saved", number)
        return
    parts.local.opened(file, record.inode, record.writes)
    file.fixed = file.staged is None and file.block_fd >= 0
    parts.files.handles.restore(number, Handle(file, record.inode, record.writes))


async def _drop_unfinished(parts: Parts) -> None:
    now_s = parts.tree.now_s()
    for file in parts.local.all():
        is_whole = file.temporary and file.key is not None and parts.local.temps.is_ready(file.key, file)
        if file.handles or is_whole or file.is_expected(now_s):
            continue
        try:
            await parts.files.discard(file)
        except KvError as error:
            log.warning("a file that nobody has open any more stays until the session ends: %s", error.message)


async def _abort_unknown(worker: AsyncLocalWorker, known: set[int]) -> None:
    """Spare staging files, and those of calls that the former process did not get to the end of."""
    try:
        for handle in await worker.unfinished():
            if handle not in known:
                await worker.abort(handle)
    except KvError as error:
        log.warning("staging files of the former process stay until the session ends: %s", error.message)
