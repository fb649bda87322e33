"""Bytes that arrive in order into a file, hashed on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvstore.core.hashing import BlockHasher
from kvstore.runtime import Runtime
from kvstore.worker.volumes.disk import Disk, FileState

Guard = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]


class Sink:
    """Owns an fd. Writes run in threads; `close` waits for the one under way, so that no thread meets a reused
    number.

    `guard` carries out each write, and may do so again: a write that failed half-way is repeated from where it began.
    """

    def __init__(self, runtime: Runtime, disk: Disk, fd: int) -> None:
        self.fd = fd
        self.guard: Guard = _once
        self._runtime, self._disk = runtime, disk
        self._hasher = BlockHasher()
        self._writing: asyncio.Future[None] | None = None

    @property
    def length_bytes(self) -> int:
        return self._hasher.length_bytes

    def state(self) -> FileState:
        """Of the file, as it is now. Raises OSError."""
        return self._disk.fstat(self.fd)

    def digest(self) -> int:
        """The block hash of what was written; ask once, at the end."""
        return self._hasher.digest()

    async def write(self, data: bytes) -> None:
        """Append. Raises OSError."""
        await self.guard(lambda: self._append(data))

    async def _append(self, data: bytes) -> None:
        self._writing = asyncio.ensure_future(self._runtime.in_thread(self._write, data))
        await asyncio.shield(self._writing)

    async def close(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        self._disk.close(self.fd)

    def _write(self, data: bytes) -> None:
        self._disk.write(self.fd, data, self._hasher.length_bytes)
        self._hasher.update(data)


async def _once(write: Callable[[], Awaitable[None]]) -> None:
    await write()
