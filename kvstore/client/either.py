"""Blocks with a local worker: by its files while it answers, and for new blocks while its disk works, else over the
network (`AsyncEitherBlocks`, and for threads `EitherBlocks`). Staging is sealed where it was made.

Every call to the local worker passes its breaker (rule 29, see `local.py`). While that is open nobody waits: what can
goes over the network, the rest (reserve, seal) is Unavailable at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvstore.client import files
from kvstore.client.blocks import AsyncBlocks, AsyncLocalBlocks, AsyncRemoteBlocks
from kvstore.client.deadline import MIN_STEP_S, Deadline
from kvstore.client.elsewhere import LocalWrites, is_no_local_worker
from kvstore.client.sockets import SealedBlock
from kvstore.client.staging import Loaded, Staging, Wish
from kvstore.client.sync_blocks import Blocks, LocalBlocks, RemoteBlocks
from kvstore.core.errors import KvError
from kvstore.core.limits import METADATA_TIMEOUT_S, fetch_timeout_s, store_timeout_s
from kvstore.core.types import Entry

T = TypeVar("T")


class AsyncEitherBlocks:
    """For asyncio."""

    def __init__(self, local: AsyncLocalBlocks, remote: AsyncRemoteBlocks, path: str) -> None:
        self._local, self._remote, self._path = local, remote, path
        self._writes = LocalWrites(path)

    @property
    def node(self) -> str:
        return self._local.node

    async def stage(self, size_hint: int = 0, *, timeout_s: float | None = None) -> Staging:
        left = Deadline.of(timeout_s, store_timeout_s(0))

        def use(blocks: AsyncBlocks) -> Awaitable[Staging]:
            # A temporary file takes no time: it is there, too, for who waited in vain all the time that he had.
            return blocks.stage(size_hint, timeout_s=left.left_s if blocks is self._local else MIN_STEP_S)

        return await self._write(use)

    def adopt(self, handle: int, fd: int) -> Staging:
        return self._local.adopt(handle, fd) if handle else self._remote.adopt(handle, fd)

    async def reserve(
        self, staging: Staging, size_bytes: int, *, evict: bool = True, timeout_s: float | None = None
    ) -> None:
        left = Deadline.of(timeout_s, store_timeout_s(0))
        await self._owner(staging, lambda b: b.reserve(staging, size_bytes, evict=evict, timeout_s=left.left_s))

    async def seal(
        self,
        staging: Staging,
        size_bytes: int,
        *,
        hash: int | None = None,
        mtime_ns: int | None = None,
        timeout_s: float | None = None,
    ) -> SealedBlock:
        left = Deadline.of(timeout_s, store_timeout_s(size_bytes))
        staging.close()  # also when the worker is not even asked

        def use(blocks: AsyncBlocks) -> Awaitable[SealedBlock]:
            return blocks.seal(staging, size_bytes, hash=hash, mtime_ns=mtime_ns, timeout_s=left.left_s)

        with self._writes.watched(staging.owner is self._local):
            return await self._owner(staging, use)

    async def seal_copy(self, staging: Staging, *, timeout_s: float | None = None) -> SealedBlock:
        fd = staging.fd if staging.kept_fd < 0 else staging.kept_fd
        left = Deadline.of(timeout_s, store_timeout_s(files.size_of(fd)))
        return await self._owner(staging, lambda b: b.seal_copy(staging, timeout_s=left.left_s))

    async def abort(self, staging: Staging, *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        await self._owner(staging, lambda b: b.abort(staging, timeout_s=timeout_s))

    async def give_up(self, blocks: Sequence[SealedBlock], *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        if elsewhere := [block for block in blocks if block.endpoint]:
            await self._remote.give_up(elsewhere)
        if here := [block for block in blocks if not block.endpoint]:
            await self._local.give_up(here, timeout_s=timeout_s)

    async def open(self, entry: Entry, *, timeout_s: float | None = None) -> int:
        left = Deadline.of(timeout_s, fetch_timeout_s(entry.length_bytes))
        return await self._first(lambda b: b.open(entry, timeout_s=left.left_s), left)

    async def touch(self, entries: Sequence[Entry], *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        left = Deadline(timeout_s)
        await self._first(lambda b: b.touch(entries, timeout_s=left.left_s), left)

    async def store(self, view: memoryview, *, timeout_s: float | None = None) -> SealedBlock:
        left = Deadline.of(timeout_s, store_timeout_s(len(view)))
        return await self._write(lambda b: b.store(view, timeout_s=left.left_s))

    async def load(self, wishes: Sequence[Wish], *, timeout_s: float | None = None) -> list[Loaded]:
        left = Deadline.of(timeout_s, fetch_timeout_s(sum(w.entry.length_bytes for w in wishes)))
        return await self._first(lambda b: b.load(wishes, timeout_s=left.left_s), left)

    async def _first(self, use: Callable[[AsyncBlocks], Awaitable[T]], deadline: Deadline) -> T:
        try:
            return await use(self._local)
        except KvError as error:
            if not is_no_local_worker(error, self._path) or deadline.passed:
                raise
        return await use(self._remote)

    async def _write(self, use: Callable[[AsyncBlocks], Awaitable[T]]) -> T:
        if not self._writes.work:
            return await use(self._remote)
        try:
            with self._writes.watched():
                return await use(self._local)
        except KvError as error:
            if not is_no_local_worker(error, self._path) and not self._writes.is_trouble(error):
                raise
        return await use(self._remote)

    async def _owner(self, staging: Staging, use: Callable[[AsyncBlocks], Awaitable[T]]) -> T:
        if staging.owner is self._local:
            return await use(self._local)
        return await use(self._remote)


class EitherBlocks:
    """For threads, see `AsyncEitherBlocks`."""

    def __init__(self, local: LocalBlocks, remote: RemoteBlocks, path: str) -> None:
        self._local, self._remote, self._path = local, remote, path
        self._writes = LocalWrites(path)

    @property
    def node(self) -> str:
        return self._local.node

    def stage(self, size_hint: int = 0, *, timeout_s: float | None = None) -> Staging:
        left = Deadline.of(timeout_s, store_timeout_s(0))

        def use(blocks: Blocks) -> Staging:
            return blocks.stage(size_hint, timeout_s=left.left_s if blocks is self._local else MIN_STEP_S)

        return self._write(use)

    def reserve(self, staging: Staging, size_bytes: int, *, timeout_s: float | None = None) -> None:
        left = Deadline.of(timeout_s, store_timeout_s(0))
        self._owner(staging, lambda b: b.reserve(staging, size_bytes, timeout_s=left.left_s))

    def seal(self, staging: Staging, size_bytes: int, *, timeout_s: float | None = None) -> SealedBlock:
        left = Deadline.of(timeout_s, store_timeout_s(size_bytes))
        staging.close()
        with self._writes.watched(staging.owner is self._local):
            return self._owner(staging, lambda b: b.seal(staging, size_bytes, timeout_s=left.left_s))

    def abort(self, staging: Staging, *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        self._owner(staging, lambda b: b.abort(staging, timeout_s=timeout_s))

    def give_up(self, blocks: Sequence[SealedBlock], *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        if elsewhere := [block for block in blocks if block.endpoint]:
            self._remote.give_up(elsewhere)
        if here := [block for block in blocks if not block.endpoint]:
            self._local.give_up(here, timeout_s=timeout_s)

    def open(self, entry: Entry, *, timeout_s: float | None = None) -> int:
        left = Deadline.of(timeout_s, fetch_timeout_s(entry.length_bytes))
        return self._first(lambda b: b.open(entry, timeout_s=left.left_s), left)

    def store(self, view: memoryview, *, timeout_s: float | None = None) -> SealedBlock:
        left = Deadline.of(timeout_s, store_timeout_s(len(view)))
        return self._write(lambda b: b.store(view, timeout_s=left.left_s))

    def load(self, wishes: Sequence[Wish], *, timeout_s: float | None = None) -> list[Loaded]:
        left = Deadline.of(timeout_s, fetch_timeout_s(sum(w.entry.length_bytes for w in wishes)))
        return self._first(lambda b: b.load(wishes, timeout_s=left.left_s), left)

    def _first(self, use: Callable[[Blocks], T], deadline: Deadline) -> T:
        try:
            return use(self._local)
        except KvError as error:
            if not is_no_local_worker(error, self._path) or deadline.passed:
                raise
        return use(self._remote)

    def _write(self, use: Callable[[Blocks], T]) -> T:
        if not self._writes.work:
            return use(self._remote)
        try:
            with self._writes.watched():
                return use(self._local)
        except KvError as error:
            if not is_no_local_worker(error, self._path) and not self._writes.is_trouble(error):
                raise
        return use(self._remote)

    def _owner(self, staging: Staging, use: Callable[[Blocks], T]) -> T:
        return use(self._local) if staging.owner is self._local else use(self._remote)
