"""Files that were unlinked while somebody had them open: their bytes stay in the books until nobody holds them (rule
8).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvstore.runtime import Runtime
from kvstore.worker import lease
from kvstore.worker.disk import Disk, NotAFile
from kvstore.worker.lease import Holders

PROBE_INTERVAL_S = 0.25
"""A probe costs two system calls; a put that waits for room (5 s) sees many."""


@dataclasses.dataclass(slots=True)
class _Held:
    fd: int
    release: Callable[[], None]


class HeldFiles:
    """Private read fds of unlinked files, and what to do when each of them is the last."""

    def __init__(self, runtime: Runtime, disk: Disk) -> None:
        self._runtime, self._disk = runtime, disk
        self._files: list[_Held] = []

    def __len__(self) -> int:
        return len(self._files)

    def add(self, fd: int, release: Callable[[], None]) -> None:
        """`release` is called on the loop once nobody but this private fd has the file; `fd` is then closed."""
        self._files.append(_Held(fd, release))

    async def probe(self) -> None:
        """One round over all."""
        files, self._files = self._files, []
        free = await self._runtime.in_thread(self._free, files)
        for held, is_free in zip(files, free, strict=True):
            if is_free:
                held.release()
            else:
                self._files.append(held)

    def close(self) -> None:
        while self._files:
            self._disk.close(self._files.pop().fd)

    def _free(self, files: list[_Held]) -> list[bool]:
        free = []
        for held in files:
            # Where leases do not work nobody can tell: then an unlinked file counts as free, as for any other program.
            is_free = lease.holders(held.fd) is not Holders.SOME
            if is_free:
                self._disk.close(held.fd)
            free.append(is_free)
        return free


def unlink_watched(disk: Disk, path: str) -> int | None:
    """Unlink a file. None when its bytes are free, else a private read fd that watches those who hold it. Blocks.

    A file that is not there any more is fine. Raises OSError.
    """
    try:
        fd = disk.open_read(path)
    except FileNotFoundError:
        return None
    except NotAFile:
        disk.unlink(path)
        return None
    try:
        disk.unlink(path)
    except FileNotFoundError:
        pass
    except BaseException:
        disk.close(fd)
        raise
    if lease.holders(fd) is Holders.SOME:
        return fd
    disk.close(fd)
    return None
