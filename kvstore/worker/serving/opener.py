"""Fresh read-only fds of blocks: what is here and good at once, the rest after verifying or fetching it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from kvstore.core.errors import Corrupt, KvError, NotFound, Timeout, Unavailable
from kvstore.core.limits import open_timeout_s
from kvstore.core.types import Address, Replica
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.heat import NOBODY
from kvstore.worker.blocks.store import Store
from kvstore.worker.blocks.verify import Verifier
from kvstore.worker.serving.fetch import Fetcher
from kvstore.worker.volumes.disk import Disk

VERIFY_TRIES = 2
"""Of a file that was changed while, or right after, it was read."""


class OpenBlock(NamedTuple):
    """An fd that its receiver closes."""

    fd: int
    local: bool
    """The block was here already."""


class Opener:
    """Every fd is an `open()` of its own (rule 8)."""

    def __init__(self, store: Store, disk: Disk, verifier: Verifier, fetcher: Fetcher) -> None:
        self._store, self._disk, self._verifier, self._fetcher = store, disk, verifier, fetcher

    def open_now(self, address: Address, client: int = NOBODY) -> OpenBlock | None:
        """The hot path: a block that is here, verified and in memory. No await, no thread. Raises Stale."""
        block = self._store.find(address)
        if block is None or block.stamp is None:
            return None
        try:
            fd = self._disk.open_read(block.path)
        except OSError:
            return None  # the slow path finds out what it was
        if not self._verifier.is_good(block, fd):
            self._disk.close(fd)
            return None
        return self._opened(block, fd, client)

    async def open(
        self, address: Address, replicas: Sequence[Replica], timeout_s: float, client: int = NOBODY
    ) -> OpenBlock:
        """The block, wherever it is; `client` is the session that asks.

        Raises NotFound, Stale, Corrupt, Unavailable, Timeout, Overloaded.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._open(address, replicas, client)
        except TimeoutError:
            self._store.counters.misses += 1
            raise Timeout(f"{address}: not opened within {timeout_s:g} s") from None
        except KvError:
            self._store.counters.misses += 1
            raise

    async def _open(self, address: Address, replicas: Sequence[Replica], client: int) -> OpenBlock:
        if opened := self.open_now(address, client):
            return opened
        failure: KvError = NotFound(f"{address}: not on this worker", reason="no_replica")
        block = await self._find(address)
        if block is not None:
            try:
                return self._opened(block, await self._open_good(block), client)
            except (Corrupt, NotFound) as error:
                failure = error
        self._store.miss(address)
        if not replicas:
            raise failure
        return OpenBlock(await self._fetcher.fetch(address, replicas, self._open_good), local=False)

    async def _find(self, address: Address) -> Block | None:
        block = self._store.find(address)
        if block is None and not self._store.scanned.is_set():
            block = await self._store.adopt(address)
        return block

    async def _open_good(self, block: Block) -> int:
        """An fd of a file that is good as it is, else of the one that was verified: what lies under its name may change
        in between.
        """
        async with asyncio.timeout(open_timeout_s(block.address.length_bytes)):
            is_enough = self._verifier.is_good
            for _ in range(1 + VERIFY_TRIES):
                fd = await self._open_file(block)
                if fd is not None and is_enough(block, fd):
                    return fd
                if fd is not None:
                    self._disk.close(fd)
                await self._verifier.verify(block)
                is_enough = self._verifier.is_same
        raise Unavailable(f"{block.path}: changes while it is read; find out who writes there")

    async def _open_file(self, block: Block) -> int | None:
        opening = asyncio.ensure_future(self._store.runtime.in_thread(self._disk.open_read, block.path))
        try:
            return await asyncio.shield(opening)
        except OSError:
            return None  # verifying finds out what it was
        except asyncio.CancelledError:
            opening.add_done_callback(self._close_unclaimed)
            raise

    def _close_unclaimed(self, opening: asyncio.Future[int]) -> None:
        """The caller's time was over while a thread opened the file: nobody else would ever close it."""
        if not opening.cancelled() and opening.exception() is None:
            self._disk.close(opening.result())

    async def doubt(self, address: Address) -> NoReturn:
        """Somebody read other bytes than the hash says: verify the block, whatever is known of it. Raises Corrupt."""
        block = self._store.get(address.block)
        if block is not None and block.address == address:
            block.stamp = None
            await self._verifier.verify(block)
        raise Corrupt(f"{address}: other bytes than its hash says were read; try again")

    def _opened(self, block: Block, fd: int, client: int) -> OpenBlock:
        self._store.touch(block, client)
        self._store.counters.hit(block.volume.tier)
        return OpenBlock(fd, local=True)
