"""How puts and gets run: the jobs of `jobs.py` decide, `AsyncFlow` and (for threads) `Flow` do what they ask for."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import IO

import aiofiles
from aiofiles.threadpool.binary import AsyncBufferedReader

from kvstore.client import files
from kvstore.client.blocks import abandon, give_up, with_room
from kvstore.client.cache import MetadataCache
from kvstore.client.deadline import Deadline
from kvstore.client.files import Progress
from kvstore.client.jobs import GetJob, PutJob
from kvstore.client.sockets import SealedBlock
from kvstore.client.staging import Staging
from kvstore.client.sync_blocks import abandon as abandon_here
from kvstore.client.sync_blocks import give_up as give_up_here
from kvstore.client.sync_blocks import with_room as with_room_here
from kvstore.client.wiring import AsyncParts, Parts
from kvstore.core.errors import KvError
from kvstore.core.limits import METADATA_TIMEOUT_S, fetch_timeout_s

Store = Callable[[int], Awaitable[SealedBlock]]
"""Makes a block of value number i."""
SyncStore = Callable[[int], SealedBlock]
READER_S = METADATA_TIMEOUT_S
"""A reader waits no longer for an answer of the master, however long he would: a miss is nothing worse to him."""
COPY_BYTES = 4 << 20
"""One piece of a file: large enough that the hop to a thread does not show (0.1 ms beside 1 ms of copying)."""


class AsyncFlow:
    """Over the parts and the metadata cache of one client."""

    def __init__(self, parts: AsyncParts, cache: MetadataCache) -> None:
        self._parts, self._cache = parts, cache

    async def put(self, job: PutJob, store: Store, deadline: Deadline) -> None:
        await self._parts.start(deadline)
        job.refuse_larger(self._parts.cluster.max_block_bytes)
        try:
            await self._put_round(job, store, deadline)
            while (pause := job.pause(deadline)) is not None:
                await asyncio.sleep(pause)
                await self._put_round(job, store, deadline)
        finally:  # whatever came of it: it may have happened
            for name in job.names:
                self._cache.changed(name)

    async def look_up(self, job: GetJob, deadline: Deadline) -> None:
        self._parts.check_usable()
        if not (names := job.unknown()):
            return
        token = self._cache.token()
        try:
            await self._parts.start(Deadline(deadline.at_most(READER_S)))
            rows = await self._parts.meta.lookup(names, timeout_s=deadline.left_s, each_s=READER_S)
            job.looked_up(token, rows)
        except KvError as error:
            job.lookup_failed(error)

    async def get(self, job: GetJob, deadline: Deadline) -> None:
        await self.look_up(job, deadline)
        deadline.allow(fetch_timeout_s(job.total_bytes))
        await self._load(job, deadline)
        if job.again():
            await self.look_up(job, deadline)
            await self._load(job, deadline)

    async def store_file(
        self, source: str | os.PathLike[str], size: int, progress: Progress, deadline: Deadline
    ) -> SealedBlock:
        blocks = self._parts.blocks
        staging = await blocks.stage(size, timeout_s=deadline.left_s)
        try:
            async with aiofiles.open(source, "rb") as file, _filling(staging) as out:
                await _copy(file, partial(self._append, out, staging, size, deadline), size, progress, deadline)
            return await blocks.seal(staging, size, timeout_s=deadline.left_s)
        except BaseException:
            await abandon(blocks, staging, deadline)
            raise

    async def load_file(
        self, fd: int, target: str | os.PathLike[str], size: int, progress: Progress, deadline: Deadline
    ) -> None:
        """Copy a block to a local file, which is there as a whole or not at all. Closes the fd."""
        async with aiofiles.open(fd, "rb") as block:
            temporary = files.beside(target)
            try:
                # Buffered for its lock: a close waits for the write in a thread, also when the caller was cancelled.
                async with aiofiles.open(temporary, "wb") as out:
                    await _copy(block, out.write, size, progress, deadline)
                os.replace(temporary, target)
            except BaseException:
                files.remove_quietly(temporary)
                raise

    async def _append(self, out: _Filling, staging: Staging, size: int, deadline: Deadline, piece: bytes) -> None:
        await with_room(self._parts.blocks, staging, size, deadline, partial(out.append, piece))

    async def _put_round(self, job: PutJob, store: Store, deadline: Deadline) -> None:
        try:
            if job.if_absent:
                names, left_s = job.pending(), deadline.left_s
                job.looked_up(await self._parts.meta.lookup(names, timeout_s=left_s, each_s=deadline.answer_s))
            self._parts.check_master(deadline)
            await asyncio.gather(*(_store(job, i, store) for i in job.to_store()))
            if publications := job.publications():
                left_s, each_s = deadline.left_s, deadline.answer_s
                job.published(await self._parts.meta.publish(publications, timeout_s=left_s, each_s=each_s))
        except KvError as error:
            job.failed(error)
        finally:  # also when the caller was cancelled
            await give_up(self._parts.blocks, job.unpublished(), deadline)

    async def _load(self, job: GetJob, deadline: Deadline) -> None:
        if not (wishes := job.to_load()):
            return
        try:
            job.loaded(await self._parts.blocks.load(wishes, timeout_s=deadline.left_s))
        except KvError as error:
            job.load_failed(error)


class Flow:
    """For threads, see `AsyncFlow`."""

    def __init__(self, parts: Parts, cache: MetadataCache) -> None:
        self._parts, self._cache = parts, cache

    def put(self, job: PutJob, store: SyncStore, deadline: Deadline) -> None:
        self._parts.start(deadline)
        job.refuse_larger(self._parts.cluster.max_block_bytes)
        try:
            self._put_round(job, store, deadline)
            while (pause := job.pause(deadline)) is not None:
                time.sleep(pause)
                self._put_round(job, store, deadline)
        finally:
            for name in job.names:
                self._cache.changed(name)

    def look_up(self, job: GetJob, deadline: Deadline) -> None:
        self._parts.check_usable()
        if not (names := job.unknown()):
            return
        token = self._cache.token()
        try:
            self._parts.start(Deadline(deadline.at_most(READER_S)))
            rows = self._parts.meta.lookup(names, timeout_s=deadline.left_s, each_s=READER_S)
            job.looked_up(token, rows)
        except KvError as error:
            job.lookup_failed(error)

    def get(self, job: GetJob, deadline: Deadline) -> None:
        self.look_up(job, deadline)
        deadline.allow(fetch_timeout_s(job.total_bytes))
        self._load(job, deadline)
        if job.again():
            self.look_up(job, deadline)
            self._load(job, deadline)

    def store_file(
        self, source: str | os.PathLike[str], size: int, progress: Progress, deadline: Deadline
    ) -> SealedBlock:
        blocks = self._parts.blocks
        staging = blocks.stage(size, timeout_s=deadline.left_s)
        try:
            with open(source, "rb") as file:
                _copy_here(file, partial(self._write, staging, size, deadline), size, progress, deadline)
            return blocks.seal(staging, size, timeout_s=deadline.left_s)
        except BaseException:
            abandon_here(blocks, staging, deadline)
            raise

    def load_file(
        self, fd: int, target: str | os.PathLike[str], size: int, progress: Progress, deadline: Deadline
    ) -> None:
        with open(fd, "rb") as block:
            temporary = files.beside(target)
            try:
                with open(temporary, "wb") as out:
                    _copy_here(block, lambda piece, at: out.write(piece), size, progress, deadline)
                os.replace(temporary, target)
            except BaseException:
                files.remove_quietly(temporary)
                raise

    def _write(self, staging: Staging, size: int, deadline: Deadline, piece: memoryview, at: int) -> None:
        write = partial(files.write_all, staging.fd, piece, at)
        with_room_here(self._parts.blocks, staging, size, deadline, write)

    def _put_round(self, job: PutJob, store: SyncStore, deadline: Deadline) -> None:
        def store_one(index: int) -> None:
            try:
                job.stored(index, store(index))
            except KvError as error:
                job.stored(index, error)

        try:
            if job.if_absent:
                names, left_s = job.pending(), deadline.left_s
                job.looked_up(self._parts.meta.lookup(names, timeout_s=left_s, each_s=deadline.answer_s))
            self._parts.check_master(deadline)
            self._parts.threads.map(store_one, job.to_store(), deadline)
            if publications := job.publications():
                left_s, each_s = deadline.left_s, deadline.answer_s
                job.published(self._parts.meta.publish(publications, timeout_s=left_s, each_s=each_s))
        except KvError as error:
            job.failed(error)
        finally:
            give_up_here(self._parts.blocks, job.unpublished(), deadline)

    def _load(self, job: GetJob, deadline: Deadline) -> None:
        if not (wishes := job.to_load()):
            return
        try:
            job.loaded(self._parts.blocks.load(wishes, timeout_s=deadline.left_s))
        except KvError as error:
            job.load_failed(error)


async def _store(job: PutJob, index: int, store: Store) -> None:
    try:
        job.stored(index, await store(index))
    except KvError as error:
        job.stored(index, error)


class _Filling:
    """A staging file that is written from its start on, a piece at a time. Owns its fd; `close` waits for the piece
    under way, also when its caller was cancelled: the thread must not meet a reused number.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._at = fd, 0
        self._writing: asyncio.Future[None] | None = None

    async def append(self, piece: bytes) -> None:
        """One that failed half-way may be appended again. Raises NoSpace and what else `files.mapped` knows."""
        self._writing = asyncio.ensure_future(asyncio.to_thread(files.write_all, self._fd, memoryview(piece), self._at))
        await asyncio.shield(self._writing)
        self._at += len(piece)

    async def close(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        os.close(self._fd)


@asynccontextmanager
async def _filling(staging: Staging) -> AsyncIterator[_Filling]:
    filling = _Filling(staging.release())
    try:
        yield filling
    finally:
        await filling.close()


async def _copy(
    source: AsyncBufferedReader,
    write: Callable[[bytes], Awaitable[object]],
    size: int,
    progress: Progress,
    deadline: Deadline,
) -> None:
    left = size
    while left:
        piece = await source.read(min(COPY_BYTES, left))
        files.check_piece(piece, left)
        await write(piece)
        left -= len(piece)
        progress(len(piece))
        deadline.check()


def _copy_here(
    source: IO[bytes], write: Callable[[memoryview, int], object], size: int, progress: Progress, deadline: Deadline
) -> None:
    """`write` gets each piece and where it belongs."""
    at = 0
    while at < size:
        piece = source.read(min(COPY_BYTES, size - at))
        files.check_piece(piece, size - at)
        write(memoryview(piece), at)
        at += len(piece)
        progress(len(piece))
        deadline.check()
