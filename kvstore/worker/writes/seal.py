"""Seal: from a staging file to a block (rule 5). What anyone can still write is never sealed; a copy of it is."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import NamedTuple

from kvstore.core.errors import InvalidRequest, NoSpace, NotFound, TooLarge
from kvstore.core.limits import LEASE_WAIT_S
from kvstore.core.types import Address, BlockId
from kvstore.filecut import is_cut
from kvstore.filehash import hash_file
from kvstore.worker.background import Background
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.store import Store
from kvstore.worker.volumes import lease
from kvstore.worker.volumes.disk import Disk, FileState, Stamp, disk_bytes
from kvstore.worker.volumes.lease import Holders
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.writes.staging import PRIVATE, Staged, Staging

PROBE_S = 0.005
"""Between two looks at a file that is still open for writing; LEASE_WAIT_S of them, then a copy."""


class Claim(NamedTuple):
    """The hash that a client took, and the state of the file at that moment: it stands only if that still holds."""

    hash: int
    size_bytes: int
    mtime_ns: int


class Left(NamedTuple):
    """A file that a move has left behind; `used_bytes` are in its volume's books as a block's."""

    path: str
    volume: Volume
    used_bytes: int


class Sealer:
    """Every seal runs to its end, whoever asked for it: a file renamed and not recorded would be lost."""

    def __init__(self, store: Store, disk: Disk, staging: Staging, background: Background) -> None:
        self._store, self._disk, self._staging, self._background = store, disk, staging, background

    async def seal(self, staged: Staged, claim: Claim | None) -> Block:
        """The staging file becomes a block, or, while somebody can still write it, a copy does and the file goes.

        Raises InvalidRequest for an empty file, TooLarge, NoSpace (copy), Unavailable. Then the file stays in staging.
        """
        return await asyncio.shield(self.start(staged, claim))

    def start(self, staged: Staged, claim: Claim | None) -> asyncio.Task[Block]:
        """`seal`, to be awaited through `asyncio.shield` by all who want this block."""
        staged.check_whole()
        staged.busy = True  # here, not in the task: two requests may arrive together
        return self._background.spawn(self._claimed(staged, claim, keep=False))

    async def seal_copy(self, staged: Staged) -> Block:
        """A copy of the file becomes a block; the file stays in staging and goes on being written."""
        return await asyncio.shield(self.start_copy(staged))

    def start_copy(self, staged: Staged) -> asyncio.Task[Block]:
        """`seal_copy`, to be awaited through `asyncio.shield`."""
        staged.check_whole()
        staged.busy = True
        return self._background.spawn(self._claimed(staged, None, keep=True))

    async def install(
        self, staged: Staged, session: int, address_hash: int, length_bytes: int, state: FileState
    ) -> Block:
        """A private file whose bytes the worker itself has written and hashed becomes a block of a new id.

        `state`: of the file that was hashed.
        """
        staged.busy = True
        address = Address(self._store.fences.mint(), length_bytes, address_hash)
        return await self._background.run(self._rename(staged, address, session, state))

    async def install_replica(self, staged: Staged, address: Address, state: FileState) -> Block:
        """A private file that holds a block fetched from a peer takes its place here."""
        staged.busy = True
        block = await self._background.run(self._rename(staged, address, PRIVATE, state))
        block.fetched = True
        return block

    async def move_in(self, block: Block, staged: Staged, state: FileState, extra_bytes: int) -> Left:
        """A private file that holds a copy of a block of this worker, and takes `extra_bytes` beyond its length, takes
        its place.

        Returns what is of no use any more: the file where the block was, or the copy itself when the block went in the
        last moment. Raises NotFound when it went before, and like `seal`.
        """
        staged.busy = True
        return await self._background.run(self._move_in(block, staged, state, extra_bytes))

    async def _move_in(self, block: Block, staged: Staged, state: FileState, extra_bytes: int) -> Left:
        path = staged.volume.block_path(block.address)
        if self._is_over(block):  # another replica of it may have come and lie there by now
            staged.busy = False
            raise NotFound(f"{block.address}: it went while it was copied")
        try:
            stamp = await self._renamed(staged, path, state)
        except OSError as error:
            staged.busy = False
            raise self._store.explain(staged.volume, error, "renaming a copy to its address") from None
        used_bytes = block.data_bytes + extra_bytes
        self._staging.became_block(staged, used_bytes)
        if self._is_over(block) or not staged.volume.in_service:
            return Left(path, staged.volume, used_bytes)
        left = Left(block.path, block.volume, block.used_bytes)
        self._store.move(block, staged.volume, stamp, extra_bytes)
        return left

    def _is_over(self, block: Block) -> bool:
        return block.leaving or self._store.get(block.id) is not block

    async def _claimed(self, staged: Staged, claim: Claim | None, *, keep: bool) -> Block:
        try:
            block = await self._seal(staged, claim, keep)
        except BaseException:
            staged.busy = False
            raise
        staged.busy = not keep  # what was sealed stays busy: nobody reserves for it any more
        return block

    async def _seal(self, staged: Staged, claim: Claim | None, keep: bool) -> Block:
        try:
            fd = await self._store.runtime.in_thread(self._disk.open_read, staged.path)
        except OSError as error:
            raise self._store.explain(staged.volume, error, "opening a staging file") from None
        try:
            self._checked(staged, fd)
            if keep or not await self._nobody_writes(fd):
                return await self._copied(staged, fd, keep)
            state = self._checked(staged, fd)
            address = await self._address(staged, fd, state, claim)
            return await self._rename(staged, address, staged.session, state)
        finally:
            self._disk.close(fd)

    def _checked(self, staged: Staged, fd: int) -> FileState:
        try:
            state = self._disk.fstat(fd)
        except OSError as error:
            raise self._store.explain(staged.volume, error, "looking at a staging file") from None
        if is_cut(fd):  # by its client, who knows why
            raise NoSpace("the file was emptied for want of room; abort it, and write the block again")
        if state.size_bytes == 0:
            raise InvalidRequest(
                "an empty file is no block: publish the name without an address, and abort the staging"
            )
        if state.size_bytes > self._staging.max_block_bytes:
            raise TooLarge(
                f"{state.size_bytes} bytes are too many for a block; at most {self._staging.max_block_bytes}"
            )
        return state

    async def _nobody_writes(self, fd: int) -> bool:
        """Whether the last writer has gone; waits for it for LEASE_WAIT_S (a close may still be on its way)."""
        runtime = self._store.runtime
        end = runtime.monotonic_s() + LEASE_WAIT_S
        while (found := lease.writers(fd)) is Holders.SOME and runtime.monotonic_s() < end:
            await runtime.sleep(PROBE_S)
        return found is Holders.NONE

    async def _address(self, staged: Staged, fd: int, state: FileState, claim: Claim | None) -> Address:
        if claim is not None and (claim.size_bytes, claim.mtime_ns) == (state.size_bytes, state.mtime_ns):
            digest = claim.hash
        else:
            digest = await self._hash(staged, fd, state.size_bytes)
        return Address(self._store.fences.mint(), state.size_bytes, digest)

    async def _hash(self, staged: Staged, fd: int, length_bytes: int) -> int:
        try:
            return await hash_file(self._store.runtime, fd, length_bytes, self._disk.read_into)
        except OSError as error:
            raise self._store.explain(staged.volume, error, "reading a staging file") from None

    async def _copied(self, staged: Staged, fd: int, keep: bool) -> Block:
        size = self._checked(staged, fd).size_bytes
        async with self._staging.private(size) as (copy, sink):
            try:
                copied = partial(self._store.runtime.in_thread, self._copy, fd, sink.fd, size)
                length = await self._store.despite_full_disk(copy.volume, copied)
                state = sink.state()
            except OSError as error:
                raise self._store.explain(copy.volume, error, "copying a staging file") from None
            if length == 0:
                self._checked(staged, fd)
            digest = await self._hash(copy, sink.fd, length)
            block = await self.install(copy, staged.session, digest, length, state)
        if not keep:
            await self._staging.drop(staged)
        return block

    def _copy(self, source: int, target: int, size_bytes: int) -> int:
        """Returns the length of the copy. An attempt that failed may have left more behind than there is to copy now:
        the writer may have truncated the source since.
        """
        length_bytes = self._disk.copy(source, target, size_bytes)
        os.ftruncate(target, length_bytes)
        return length_bytes

    async def _rename(self, staged: Staged, address: Address, session: int, state: FileState) -> Block:
        target = staged.volume.block_path(address)
        try:
            stamp = await self._renamed(staged, target, state)
        except OSError as error:
            self._give_up(address.block)
            staged.busy = False
            raise self._store.explain(staged.volume, error, "renaming a staging file to its address") from None
        self._staging.became_block(staged, disk_bytes(address.length_bytes))
        if session != PRIVATE:
            self._store.counters.written_bytes += address.length_bytes
        else:
            self._store.counters.fetched_bytes += address.length_bytes
        return self._store.add(address, staged.volume, session, stamp)

    async def _renamed(self, staged: Staged, target: str, hashed: FileState) -> Stamp | None:
        """A rename may need a block for its directory."""
        move = partial(self._store.runtime.in_thread, self._move, staged, target, hashed)
        return await self._store.despite_full_disk(staged.volume, move)

    def _move(self, staged: Staged, target: str, hashed: FileState) -> Stamp | None:
        """Rename it. Returns its stamp from then on (a rename sets the ctime); None, to be verified at its first use,
        when it is not in the state that was hashed any more.
        """
        staged.volume.with_directories(lambda: self._disk.rename(staged.path, target))
        try:
            moved = self._disk.stat(target)
        except OSError:
            return None
        return moved.stamp if moved.stamp[:-1] == hashed.stamp[:-1] else None

    def _give_up(self, block: BlockId) -> None:
        if self._store.get(block) is None:
            self._store.fences.settle(block)
