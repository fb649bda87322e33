"""Small file systems of their own, for a disk that is really full. Mounting needs root."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STEPS = (1 << 20, 1 << 12)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@contextmanager
def mounted(at: Path, *options: str) -> Iterator[Path]:
    """`mount <options> at`, gone afterwards whoever still has files there open."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    at.mkdir()
    run("mount", *options, str(at))
    try:
        yield at
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            run("umount", str(at))
        if os.path.ismount(at):
            run("umount", "-l", str(at))


@contextmanager
def small_tmpfs(root: Path, size_mib: int = 64) -> Iterator[Path]:
    with mounted(root / "tmpfs", "-t", "tmpfs", "-o", f"size={size_mib}m", "kvstore-test") as directory:
        yield directory


@contextmanager
def small_ext4(root: Path, size_mib: int = 64) -> Iterator[Path]:
    """On a file, through a loop device that goes with the mount."""
    image = root / "ext4.image"
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    run("mkfs.ext4", "-q", "-F", str(image))
    with mounted(root / "ext4", "-o", "loop", str(image)) as directory:
        yield directory


class Filler:
    """Another program of the disk: takes all that is free, again and again if need be, until it is removed."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "filler"

    def fill(self) -> int:
        """Write until ENOSPC; returns the bytes taken."""
        fd, taken = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 0
        try:
            for step in STEPS:
                while count := _write(fd, bytes(step)):
                    taken += count
        finally:
            os.close(fd)
        return taken

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _write(fd: int, data: bytes) -> int:
    """Bytes written; 0 when the disk is full."""
    try:
        return os.write(fd, data)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return 0
