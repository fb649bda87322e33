"""A disk that other programs fill, without mounting one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvstore.worker.volumes.disk import Disk, disk_bytes


class CrowdedDisk(Disk):
    """`total_bytes` for all volumes below `root`, of which `others_bytes` are somebody else's. Every byte beyond that
    is ENOSPC, a write half-way: what fits is written first. `refusals`: how often it said so.
    """

    def __init__(self, root: Path, total_bytes: int) -> None:
        self.root, self.total_bytes, self.others_bytes = root, total_bytes, 0
        self.refusals = 0

    def fill_but(self, left_bytes: int) -> None:
        """Others take all but so much."""
        self.others_bytes += self._free() - left_bytes

    def free_bytes(self, path: str) -> int:
        return max(0, self._free())

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        growth = disk_bytes(offset + len(data)) - os.fstat(fd).st_blocks * 512
        if self._is_here(fd) and (missing := growth - self._free()) > 0:
            super().write(fd, memoryview(data)[: max(0, len(data) - missing)], offset)
            self._refuse()
        super().write(fd, data, offset)

    def copy(self, source: int, target: int, length_bytes: int) -> int:
        fits = min(length_bytes, max(0, self._free()))
        done = super().copy(source, target, fits)
        if fits < length_bytes:
            self._refuse()
        return done

    def _is_here(self, fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(str(self.root))

    def _refuse(self) -> None:
        self.refusals += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _free(self) -> int:
        ours = sum(file_bytes(path) for path in self.root.rglob("*"))
        return self.total_bytes - self.others_bytes - ours


def file_bytes(path: Path) -> int:
    """What a file takes on its disk; 0 for a directory, and for one that has gone."""
    try:
        return 0 if path.is_dir() else path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
