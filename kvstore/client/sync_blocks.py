"""Blocks as files, for threads: the part of `blocks.py` that the synchronous SDK needs, see there.

`LocalBlocks` over the local worker, `RemoteBlocks` without one; both together: `either.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from kvstore.client import files, sockets
from kvstore.client.blocks import abandon_timeout_s
from kvstore.client.deadline import Deadline
from kvstore.client.remote import Remote
from kvstore.client.sockets import SealedBlock
from kvstore.client.staging import Loaded, Staging, Wish, block_of, empty_fd, in_parts, room_to_ask, sealable
from kvstore.client.sync_local import LocalWorker
from kvstore.client.threads import Threads
from kvstore.core.errors import KvError, NoSpace
from kvstore.core.hashing import hash_block
from kvstore.core.limits import METADATA_TIMEOUT_S, fetch_timeout_s, store_timeout_s
from kvstore.core.types import Entry

log = logging.getLogger(__name__)
T = TypeVar("T")


class Blocks(Protocol):
    """Blocks of the store as files; the methods are those of `AsyncBlocks`."""

    @property
    def node(self) -> str: ...

    def stage(self, size_hint: int = 0, *, timeout_s: float | None = None) -> Staging: ...

    def reserve(self, staging: Staging, size_bytes: int, *, timeout_s: float | None = None) -> None: ...

    def seal(self, staging: Staging, size_bytes: int, *, timeout_s: float | None = None) -> SealedBlock: ...

    def abort(self, staging: Staging, *, timeout_s: float = METADATA_TIMEOUT_S) -> None: ...

    def give_up(self, blocks: Sequence[SealedBlock], *, timeout_s: float = METADATA_TIMEOUT_S) -> None: ...

    def open(self, entry: Entry, *, timeout_s: float | None = None) -> int: ...

    def store(self, view: memoryview, *, timeout_s: float | None = None) -> SealedBlock: ...

    def load(self, wishes: Sequence[Wish], *, timeout_s: float | None = None) -> list[Loaded]: ...


class LocalBlocks:
    """Over the local worker."""

    def __init__(self, worker: LocalWorker, threads: Threads) -> None:
        self._worker, self._threads = worker, threads

    @property
    def node(self) -> str:
        return self._worker.hello.node if self._worker.hello else ""

    def stage(self, size_hint: int = 0, *, timeout_s: float | None = None) -> Staging:
        staged = self._worker.stage(size_hint, timeout_s=timeout_s)
        return Staging(self, staged.fd, handle=staged.staging)

    def reserve(self, staging: Staging, size_bytes: int, *, timeout_s: float | None = None) -> None:
        self._worker.reserve(staging.handle, size_bytes, timeout_s=timeout_s)

    def seal(self, staging: Staging, size_bytes: int, *, timeout_s: float | None = None) -> SealedBlock:
        staging.close()
        return self._worker.seal(staging.handle, size_bytes, timeout_s=timeout_s)

    def abort(self, staging: Staging, *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        staging.close()
        self._worker.abort(staging.handle, timeout_s=timeout_s)

    def give_up(self, blocks: Sequence[SealedBlock], *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        self._worker.give_up([block.address for block in blocks], timeout_s=timeout_s)

    def open(self, entry: Entry, *, timeout_s: float | None = None) -> int:
        if entry.address is None:
            return empty_fd()
        (fd,) = self._worker.open([(entry.address, entry.replicas)], timeout_s=timeout_s)
        if isinstance(fd, KvError):
            raise fd
        return fd

    def store(self, view: memoryview, *, timeout_s: float | None = None) -> SealedBlock:
        deadline = Deadline.of(timeout_s, store_timeout_s(len(view)))
        staging = self.stage(len(view), timeout_s=deadline.left_s)
        try:
            write = partial(files.write_hashed, staging.fd, view)
            digest, mtime_ns = with_room(self, staging, len(view), deadline, write)
            staging.close()
            return self._worker.seal(
                staging.handle, len(view), hash=digest, mtime_ns=mtime_ns, timeout_s=deadline.left_s
            )
        except BaseException:
            abandon(self, staging, deadline)
            raise

    def load(self, wishes: Sequence[Wish], *, timeout_s: float | None = None) -> list[Loaded]:
        deadline = Deadline.of(timeout_s, fetch_timeout_s(sum(w.entry.length_bytes for w in wishes)))
        return [loaded for part in in_parts(wishes) for loaded in self._load_part(part, deadline)]

    def _load_part(self, wishes: Sequence[Wish], deadline: Deadline) -> list[Loaded]:
        wanted = [(block_of(w.entry), w.entry.replicas) for w in wishes]
        fds = self._worker.open(wanted, timeout_s=deadline.left_s)

        def read(index: int) -> Loaded:
            fd, wish = fds[index], wishes[index]
            if isinstance(fd, KvError):
                return fd
            fds[index] = -1
            return files.load_and_close(fd, wish.entry.length_bytes, wish.view)

        try:
            return self._threads.map(read, range(len(wishes)), deadline)
        finally:  # those that an interrupted caller left untouched
            sockets.close_all(fd for fd in fds if isinstance(fd, int) and fd >= 0)


class RemoteBlocks:
    """Without a local worker. Staging: files without a name in `directory` (None: the system's temporary one)."""

    node = ""

    def __init__(self, remote: Remote, threads: Threads, directory: str | None = None) -> None:
        self._remote, self._threads, self._directory = remote, threads, directory

    def stage(self, size_hint: int = 0, *, timeout_s: float | None = None) -> Staging:
        kept = files.scratch_fd(self._directory)
        try:
            return Staging(self, files.reopened(kept, os.O_RDWR), kept_fd=kept)
        except BaseException:
            os.close(kept)
            raise

    def reserve(self, staging: Staging, size_bytes: int, *, timeout_s: float | None = None) -> None:
        """Nothing to do: the directory's file system says NoSpace by itself, the worker at the seal."""

    def seal(self, staging: Staging, size_bytes: int, *, timeout_s: float | None = None) -> SealedBlock:
        deadline = Deadline.of(timeout_s, store_timeout_s(size_bytes))
        staging.close()
        fd = sealable(staging, size_bytes)
        digest = files.hash_fd(fd, size_bytes)
        sealed = self._remote.store(
            size_bytes, digest, lambda: files.frames_of_fd(fd, size_bytes), timeout_s=deadline.left_s
        )
        staging.drop()
        return sealed

    def abort(self, staging: Staging, *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        staging.drop()

    def give_up(self, blocks: Sequence[SealedBlock], *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        self._threads.start(partial(self._remote.give_up, blocks))

    def open(self, entry: Entry, *, timeout_s: float | None = None) -> int:
        if entry.address is None:
            return empty_fd()
        view = memoryview(bytearray(entry.length_bytes))
        deadline = Deadline.of(timeout_s, fetch_timeout_s(entry.length_bytes))
        self._remote.load(entry.address, entry.replicas, view, timeout_s=deadline.left_s)
        return files.scratch_of(self._directory, view)

    def store(self, view: memoryview, *, timeout_s: float | None = None) -> SealedBlock:
        deadline = Deadline.of(timeout_s, store_timeout_s(len(view)))
        digest = hash_block(view)
        return self._remote.store(len(view), digest, lambda: files.frames_of(view), timeout_s=deadline.left_s)

    def load(self, wishes: Sequence[Wish], *, timeout_s: float | None = None) -> list[Loaded]:
        deadline = Deadline.of(timeout_s, fetch_timeout_s(sum(w.entry.length_bytes for w in wishes)))
        return self._threads.map(lambda wish: self._load(wish, deadline), wishes, deadline)

    def _load(self, wish: Wish, deadline: Deadline) -> Loaded:
        address, view = block_of(wish.entry), wish.view
        target = memoryview(bytearray(address.length_bytes)) if view is None else view
        try:
            self._remote.load(address, wish.entry.replicas, target, timeout_s=deadline.left_s)
        except KvError as error:
            return error
        return bytes(target) if view is None else b""


def with_room(blocks: Blocks, staging: Staging, size_bytes: int, deadline: Deadline, write: Callable[[], T]) -> T:
    """See `blocks.with_room`."""
    try:
        return write()
    except NoSpace as full:
        try:
            blocks.reserve(staging, room_to_ask(size_bytes), timeout_s=deadline.left_s)
        except NoSpace:
            raise
        except KvError:
            raise full from None
    return write()


def abandon(blocks: Blocks, staging: Staging, deadline: Deadline) -> None:
    """Abort on the way out of a failure: whatever goes wrong here is left to the session's grace."""
    staging.close()
    try:
        blocks.abort(staging, timeout_s=abandon_timeout_s(deadline))
    except KvError as error:
        log.debug("staging was left behind: %s", error)


def give_up(blocks: Blocks, unpublished: Sequence[SealedBlock], deadline: Deadline) -> None:
    """See `blocks.give_up`."""
    if not unpublished:
        return
    try:
        blocks.give_up(unpublished, timeout_s=abandon_timeout_s(deadline))
    except KvError as error:
        log.debug("blocks were left behind: %s", error)
