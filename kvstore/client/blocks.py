"""Blocks as files, for asyncio: what the SDK and the mount see, whether a local worker hands out its fds or a remote
one gets frames.

`AsyncBlocks` is the view. `AsyncLocalBlocks`: the worker's own files, no byte passes through a socket.
`AsyncRemoteBlocks`: staging in files without a name, frames to a worker that placement picks. Both together:
`either.py`.

Who owns fds: a `Staging` owns its fd, and `seal` and `abort` close it; the fd that `open` returns is the caller's.
Every method takes `timeout_s`, the deadline of the whole call (default by size, see `core.limits`), and raises KvError.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Protocol, TypeVar

from kvstore.client import files, sockets
from kvstore.client.connection import TOLD_S
from kvstore.client.deadline import Deadline
from kvstore.client.local import AsyncLocalWorker
from kvstore.client.remote import AsyncRemote
from kvstore.client.sockets import SealedBlock
from kvstore.client.staging import Loaded, Staging, Wish, block_of, empty_fd, in_parts, room_to_ask, sealable
from kvstore.core.errors import InvalidRequest, KvError, NoSpace, Timeout
from kvstore.core.hashing import hash_block
from kvstore.core.limits import METADATA_TIMEOUT_S, fetch_timeout_s, store_timeout_s
from kvstore.core.types import Entry
from kvstore.runtime import P, Runtime

log = logging.getLogger(__name__)
T = TypeVar("T")

INLINE_BYTES = 256 * 1024
"""Reads and writes up to here are done on the loop: from the page cache 10 µs, and 51 µs by way of a thread."""
ABANDON_TIMEOUT_S = 1.0
MAX_STREAMS = 4
"""Transfers to or from remote workers at the same time: two fill the loop's core (field notes)."""


class AsyncBlocks(Protocol):
    """Blocks of the store as files."""

    @property
    def node(self) -> str:
        """Node of the local worker, "" without one."""

    async def stage(self, size_hint: int = 0, *, timeout_s: float | None = None) -> Staging:
        """A new file to write to through `Staging.fd`, with room for `size_hint` bytes. Raises NoSpace."""

    def adopt(self, handle: int, fd: int) -> Staging:
        """Take over what a former process of this session staged: `Staging.handle` and a read-write fd of the file,
        which belongs to the result from then on. Raises InvalidRequest for a handle of another kind of staging.
        """

    async def reserve(
        self, staging: Staging, size_bytes: int, *, evict: bool = True, timeout_s: float | None = None
    ) -> None:
        """Room for `size_bytes` in all; to be asked before writing beyond what was reserved.

        Raises NoSpace; without `evict`, wherever that is not free now.
        """

    async def seal(
        self,
        staging: Staging,
        size_bytes: int,
        *,
        hash: int | None = None,
        mtime_ns: int | None = None,
        timeout_s: float | None = None,
    ) -> SealedBlock:
        """Make it a block, ready for Publish; closes `staging.fd`. `hash` was taken when it had this size and mtime.

        An empty file cannot be sealed (InvalidRequest): an empty value has no block.
        """

    async def seal_copy(self, staging: Staging, *, timeout_s: float | None = None) -> SealedBlock:
        """Make a block of what it holds now; the staging file stays and may be written on."""

    async def abort(self, staging: Staging, *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        """Throw it away; closes `staging.fd`."""

    async def give_up(self, blocks: Sequence[SealedBlock], *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        """Blocks that nobody will publish (any more): they go, unless an attempt to publish them succeeded after all.

        Remote workers are told in the background.
        """

    async def open(self, entry: Entry, *, timeout_s: float | None = None) -> int:
        """A read-only fd of the whole, verified block (of an empty file for an entry without one)."""

    async def touch(self, entries: Sequence[Entry], *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        """Tell the worker that blocks were used again through fds it gave earlier, in this order."""

    async def store(self, view: memoryview, *, timeout_s: float | None = None) -> SealedBlock:
        """stage, write, seal."""

    async def load(self, wishes: Sequence[Wish], *, timeout_s: float | None = None) -> list[Loaded]:
        """Read whole blocks, each into its view, or as bytes. An error stands in the place of its block."""


class AsyncLocalBlocks:
    """Over the local worker."""

    def __init__(self, worker: AsyncLocalWorker, runtime: Runtime) -> None:
        self._worker, self._runtime = worker, runtime

    @property
    def node(self) -> str:
        return self._worker.hello.node if self._worker.hello else ""

    async def stage(self, size_hint: int = 0, *, timeout_s: float | None = None) -> Staging:
        staged = await self._worker.stage(size_hint, timeout_s=timeout_s)
        return Staging(self, staged.fd, handle=staged.staging)

    def adopt(self, handle: int, fd: int) -> Staging:
        if not handle:
            raise InvalidRequest("a file without a handle was not staged at the local worker")
        return Staging(self, fd, handle=handle)

    async def reserve(
        self, staging: Staging, size_bytes: int, *, evict: bool = True, timeout_s: float | None = None
    ) -> None:
        await self._worker.reserve(staging.handle, size_bytes, evict=evict, timeout_s=timeout_s)

    async def seal(
        self,
        staging: Staging,
        size_bytes: int,
        *,
        hash: int | None = None,
        mtime_ns: int | None = None,
        timeout_s: float | None = None,
    ) -> SealedBlock:
        staging.close()
        return await self._worker.seal(staging.handle, size_bytes, hash=hash, mtime_ns=mtime_ns, timeout_s=timeout_s)

    async def seal_copy(self, staging: Staging, *, timeout_s: float | None = None) -> SealedBlock:
        size = files.size_of(staging.fd)
        return await self._worker.seal_copy(staging.handle, size_bytes=size, timeout_s=timeout_s)

    async def abort(self, staging: Staging, *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        staging.close()
        await self._worker.abort(staging.handle, timeout_s=timeout_s)

    async def give_up(self, blocks: Sequence[SealedBlock], *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        await self._worker.give_up([block.address for block in blocks], timeout_s=timeout_s)

    async def open(self, entry: Entry, *, timeout_s: float | None = None) -> int:
        if entry.address is None:
            return empty_fd()
        (fd,) = await self._worker.open([(entry.address, entry.replicas)], timeout_s=timeout_s)
        if isinstance(fd, KvError):
            raise fd
        return fd

    async def touch(self, entries: Sequence[Entry], *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        await self._worker.touch([e.address for e in entries if e.address], timeout_s=timeout_s)

    async def store(self, view: memoryview, *, timeout_s: float | None = None) -> SealedBlock:
        deadline = Deadline.of(timeout_s, store_timeout_s(len(view)))
        staging = await self.stage(len(view), timeout_s=deadline.left_s)
        try:
            digest, mtime_ns = await with_room(self, staging, len(view), deadline, partial(self._write, staging, view))
            return await self.seal(staging, len(view), hash=digest, mtime_ns=mtime_ns, timeout_s=deadline.left_s)
        except BaseException:
            await abandon(self, staging, deadline)
            raise

    async def load(self, wishes: Sequence[Wish], *, timeout_s: float | None = None) -> list[Loaded]:
        deadline = Deadline.of(timeout_s, fetch_timeout_s(sum(w.entry.length_bytes for w in wishes)))
        loaded: list[Loaded] = []
        for part in in_parts(wishes):
            loaded += await self._load_part(part, deadline)
        return loaded

    async def _load_part(self, wishes: Sequence[Wish], deadline: Deadline) -> list[Loaded]:
        wanted = [(block_of(w.entry), w.entry.replicas) for w in wishes]
        fds = await self._worker.open(wanted, timeout_s=deadline.left_s)
        try:
            return await _all([self._read(fds, i, wish) for i, wish in enumerate(wishes)])
        finally:  # those that a cancelled caller left untouched
            sockets.close_all(fd for fd in fds if isinstance(fd, int) and fd >= 0)

    async def _write(self, staging: Staging, view: memoryview) -> files.Written:
        if len(view) <= INLINE_BYTES:
            return files.write_hashed(staging.fd, view)
        # A duplicate: the thread closes its own, and when the disk was full there is another try.
        return await self._to_its_end(files.write_and_close, os.dup(staging.fd), view)

    async def _read(self, fds: sockets.Opened, index: int, wish: Wish) -> Loaded:
        fd = fds[index]
        if isinstance(fd, KvError):
            return fd
        fds[index] = -1
        if wish.entry.length_bytes <= INLINE_BYTES:
            return files.load_and_close(fd, wish.entry.length_bytes, wish.view)
        claim = files.Claim()
        loading = self._in_thread(files.load_and_close, fd, wish.entry.length_bytes, wish.view, claim)
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if claim.give_up() and wish.view is not None:
                await _ended(loading)  # the buffer is the caller's again, who may read something else into it
            raise

    async def _to_its_end(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In a thread that closes the fd itself, caller or not: closed under the thread, it may be another file."""
        return await asyncio.shield(self._in_thread(function, *args, **kwargs))

    def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        return asyncio.ensure_future(self._runtime.in_thread(function, *args, **kwargs))


class AsyncRemoteBlocks:
    """Without a local worker. Staging: files without a name in `directory` (None: the system's temporary one)."""

    node = ""

    def __init__(self, remote: AsyncRemote, runtime: Runtime, directory: str | None = None) -> None:
        self._remote, self._runtime, self._directory = remote, runtime, directory
        self._streams = asyncio.Semaphore(MAX_STREAMS)

    async def stage(self, size_hint: int = 0, *, timeout_s: float | None = None) -> Staging:
        kept = files.scratch_fd(self._directory)
        try:
            return Staging(self, files.reopened(kept, os.O_RDWR), kept_fd=kept)
        except BaseException:
            os.close(kept)
            raise

    def adopt(self, handle: int, fd: int) -> Staging:
        if handle:
            raise InvalidRequest(f"staging {handle:x} belongs to a local worker, and this client has none")
        return Staging(self, fd, kept_fd=files.reopened(fd, os.O_RDWR))

    async def reserve(
        self, staging: Staging, size_bytes: int, *, evict: bool = True, timeout_s: float | None = None
    ) -> None:
        """Nothing to do: the directory's file system says NoSpace by itself, the worker at the seal."""

    async def seal(
        self,
        staging: Staging,
        size_bytes: int,
        *,
        hash: int | None = None,
        mtime_ns: int | None = None,
        timeout_s: float | None = None,
    ) -> SealedBlock:
        staging.close()
        sealed = await self._send(staging, size_bytes, hash, mtime_ns, timeout_s)
        staging.drop()
        return sealed

    async def seal_copy(self, staging: Staging, *, timeout_s: float | None = None) -> SealedBlock:
        return await self._send(staging, files.size_of(staging.kept_fd), None, None, timeout_s)

    async def abort(self, staging: Staging, *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        staging.drop()

    async def give_up(self, blocks: Sequence[SealedBlock], *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        self._remote.give_up(blocks)

    async def open(self, entry: Entry, *, timeout_s: float | None = None) -> int:
        """Fetches the whole block into a file without a name."""
        if entry.address is None:
            return empty_fd()
        deadline = Deadline.of(timeout_s, fetch_timeout_s(entry.length_bytes))
        view = memoryview(bytearray(entry.length_bytes))
        async with self._stream(deadline):
            await self._remote.load(entry.address, entry.replicas, view, timeout_s=deadline.left_s)
        made = asyncio.ensure_future(self._runtime.in_thread(files.scratch_of, self._directory, view))
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(_close_result)
            raise

    async def touch(self, entries: Sequence[Entry], *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        """Nothing to do: workers see the reads themselves."""

    async def store(self, view: memoryview, *, timeout_s: float | None = None) -> SealedBlock:
        deadline = Deadline.of(timeout_s, store_timeout_s(len(view)))
        digest = await self._hash(view)
        async with self._stream(deadline):
            return await self._remote.store(len(view), digest, lambda: files.frames_of(view), timeout_s=deadline.left_s)

    async def load(self, wishes: Sequence[Wish], *, timeout_s: float | None = None) -> list[Loaded]:
        deadline = Deadline.of(timeout_s, fetch_timeout_s(sum(w.entry.length_bytes for w in wishes)))
        return await asyncio.gather(*(self._load(w, deadline) for w in wishes))

    async def _load(self, wish: Wish, deadline: Deadline) -> Loaded:
        address, view = block_of(wish.entry), wish.view
        target = memoryview(bytearray(address.length_bytes)) if view is None else view
        try:
            async with self._stream(deadline):
                await self._remote.load(address, wish.entry.replicas, target, timeout_s=deadline.left_s)
        except KvError as error:
            return error
        return bytes(target) if view is None else b""

    @asynccontextmanager
    async def _stream(self, deadline: Deadline) -> AsyncIterator[None]:
        """One of the streams, waited for no longer than the caller's time: who has them may have more of it."""
        try:
            async with asyncio.timeout(deadline.left_s):
                await self._streams.acquire()
        except TimeoutError:
            raise Timeout(f"no free stream to a worker within {deadline.timeout_s:g} s") from None
        try:
            yield
        finally:
            self._streams.release()

    async def _send(
        self, staging: Staging, size_bytes: int, digest: int | None, mtime_ns: int | None, timeout_s: float | None
    ) -> SealedBlock:
        deadline = Deadline.of(timeout_s, store_timeout_s(size_bytes))
        fd = sealable(staging, size_bytes)
        if digest is None or os.fstat(fd).st_mtime_ns != mtime_ns:
            digest = await self._runtime.in_thread(files.hash_fd, fd, size_bytes)
        sum_, frames = digest, lambda: files.frames_of_fd(fd, size_bytes)
        async with self._stream(deadline):
            return await self._remote.store(size_bytes, sum_, frames, timeout_s=deadline.left_s)

    async def _hash(self, view: memoryview) -> int:
        return hash_block(view) if len(view) <= INLINE_BYTES else await self._runtime.in_thread(hash_block, view)


async def _all(work: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Results in order. Unlike `gather` it ends, when it is cancelled, after the last of them."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for task in tasks:
            await _ended(task)
        raise


async def _ended(work: asyncio.Future[T]) -> None:
    """Wait for its end, however often the caller is cancelled meanwhile."""
    while not work.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([work])


def _close_result(made: asyncio.Future[int]) -> None:
    """Of a thread whose caller was cancelled meanwhile."""
    if not made.cancelled() and made.exception() is None:
        os.close(made.result())


async def with_room(
    blocks: AsyncBlocks, staging: Staging, size_bytes: int, deadline: Deadline, write: Callable[[], Awaitable[T]]
) -> T:
    """`write()`, to a staging file of `size_bytes` in all. When the disk turns out to be full (others filled it, and
    its worker does not know yet), the worker is asked to make room, and it is done once more. Raises NoSpace.
    """
    try:
        return await write()
    except NoSpace as full:
        try:
            await blocks.reserve(staging, room_to_ask(size_bytes), timeout_s=deadline.left_s)
        except NoSpace:
            raise  # it says more of why
        except KvError:
            raise full from None
    return await write()


async def abandon(blocks: AsyncBlocks, staging: Staging, deadline: Deadline) -> None:
    """Abort on the way out of a failure: whatever goes wrong here is left to the session's grace."""
    staging.close()
    try:
        await blocks.abort(staging, timeout_s=abandon_timeout_s(deadline))
    except KvError as error:
        log.debug("staging was left behind: %s", error)


async def give_up(blocks: AsyncBlocks, unpublished: Sequence[SealedBlock], deadline: Deadline) -> None:
    """After a failed publish: whoever cannot be told has the blocks until the session's grace is over."""
    if not unpublished:
        return
    try:
        await blocks.give_up(unpublished, timeout_s=abandon_timeout_s(deadline))
    except KvError as error:
        log.debug("blocks were left behind: %s", error)


def abandon_timeout_s(deadline: Deadline) -> float:
    """Of the caller's time, so that a call which failed at its end ends then."""
    return deadline.at_most(ABANDON_TIMEOUT_S) if deadline.has_more_than(TOLD_S) else TOLD_S
