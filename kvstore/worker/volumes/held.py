"""Files that were unlinked while somebody had them open: their bytes stay in the books until nobody holds them (rule
8).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvstore.runtime import Runtime
from kvstore.worker.volumes import lease
from kvstore.worker.volumes.books import Books
from kvstore.worker.volumes.disk import SHORT_ERRNOS, Disk, NotAFile
from kvstore.worker.volumes.lease import Holders

PROBE_INTERVAL_S = 0.25
"""A probe costs two system calls; a put that waits for room (5 s) sees many."""


class Holding(Protocol):
    """Whoever has the bytes of an unlinked file in his books. Called on the loop."""

    def resized(self, size_bytes: int) -> None:
        """The file takes so many bytes now: who holds it open for writing may write on, or truncate it."""

    def released(self) -> None:
        """Nobody holds it any more: its bytes are free."""


@dataclasses.dataclass(slots=True)
class HeldBytes:
    """An unlinked file of a volume: `Books.held` counts what it takes at every moment."""

    books: Books
    size_bytes: int
    on_free: Callable[[], None]
    is_over: bool = False
    """It was released: what is heard of it later (a cut that was under way) is in the books no more."""

    def resized(self, size_bytes: int) -> None:
        if size_bytes != self.size_bytes and not self.is_over:
            self.books.held_resized(size_bytes - self.size_bytes)
            shrunk, self.size_bytes = size_bytes < self.size_bytes, size_bytes
            if shrunk:
                self.on_free()

    def released(self) -> None:
        self.is_over = True
        self.books.let_go(self.size_bytes)
        self.on_free()


class _Held(NamedTuple):
    fd: int
    holding: Holding


class _Seen(NamedTuple):
    """`size_bytes` None: it could not be asked."""

    is_free: bool
    size_bytes: int | None


class HeldFiles:
    """Private read fds of unlinked files, and what to do when each of them is the last."""

    def __init__(self, runtime: Runtime, disk: Disk) -> None:
        self._runtime, self._disk = runtime, disk
        self._files: list[_Held] = []

    def __len__(self) -> int:
        return len(self._files)

    def add(self, fd: int, holding: Holding) -> None:
        """`holding` is told once nobody but this private fd has the file; `fd` is then closed."""
        self._files.append(_Held(fd, holding))

    async def probe(self) -> None:
        """One round over all."""
        files, self._files = self._files, []
        seen = await self._runtime.in_thread(self._look, files)
        for held, (is_free, size_bytes) in zip(files, seen, strict=True):
            if is_free:
                held.holding.released()
                continue
            if size_bytes is not None:
                held.holding.resized(size_bytes)
            self._files.append(held)

    def close(self) -> None:
        while self._files:
            self._disk.close(self._files.pop().fd)

    def _look(self, files: list[_Held]) -> list[_Seen]:
        seen = []
        for held in files:
            # Where leases do not work nobody can tell: then an unlinked file counts as free, as for any other program.
            is_free = lease.holders(held.fd) is not Holders.SOME
            seen.append(_Seen(is_free, self._used_bytes(held.fd)))
            if is_free:
                self._disk.close(held.fd)
        return seen

    def _used_bytes(self, fd: int) -> int | None:
        try:
            return self._disk.fstat(fd).used_bytes
        except OSError:  # whoever reads or writes on that drive finds out what it is
            return None


def unlink_watched(disk: Disk, path: str) -> int | None:
    """Unlink a file. None when its bytes are free, else a private read fd that watches those who hold it. Blocks.

    A file that is not there any more is fine. Without an fd to spare its bytes count as free whoever holds them: what
    could not be unlinked would lie there until the next start. Raises OSError.
    """
    fd = _watch(disk, path)
    try:
        disk.unlink(path)
    except FileNotFoundError:
        pass
    except BaseException:
        if fd is not None:
            disk.close(fd)
        raise
    if fd is None or lease.holders(fd) is Holders.SOME:
        return fd
    disk.close(fd)
    return None


def _watch(disk: Disk, path: str) -> int | None:
    """None for what nobody can hold, or cannot be watched."""
    try:
        return disk.open_read(path)
    except (FileNotFoundError, NotAFile):
        return None
    except OSError as error:
        if error.errno not in SHORT_ERRNOS:
            raise
        return None
