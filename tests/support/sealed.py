"""Blocks on the workers' disks, and versions of a file that can be told apart."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from kvstore.core.hashing import hash_block
from kvstore.core.types import Address
from tests.support.cluster import Cluster
from tests.support.fsops import Bytes

SIZE: Final = 300_000
FIRST: Final = Bytes(1, SIZE).value
NEW: Final = Bytes(2, 5000).value
AT: Final = 70_001
CHANGED: Final = FIRST[:AT] + NEW + FIRST[AT + len(NEW) :]
"""`FIRST` with `NEW` written at `AT`."""
PUBLISH_TIMEOUT_S: Final = 10.0
"""The last bytes of a map are published when it goes, after munmap has returned."""


class Blocks:
    """The blocks on the workers' disks. Each is opened at its first sight, so that it can be looked at for ever."""

    def __init__(self, cluster: Cluster) -> None:
        self._workers = cluster.workers
        self._fds: dict[str, int] = {}

    def check(self) -> None:
        """All that were ever seen are what their names say."""
        for path in (path for worker in self._workers for path in worker.block_files):
            if path.name not in self._fds:
                try:
                    self._fds[path.name] = os.open(path, os.O_RDONLY)
                except FileNotFoundError:  # dropped just now
                    continue
        for name, fd in self._fds.items():
            address = Address.parse(name)
            data = os.pread(fd, address.length_bytes + 1, 0)
            assert (len(data), hash_block(data)) == (address.length_bytes, address.hash), name


def put(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


def see(path: Path, versions: Collection[bytes]) -> bytes:
    """What a new reader gets: one of the versions, whole."""
    data = path.read_bytes()
    assert data in versions, f"{len(data)} bytes that nobody wrote so"
    return data


def await_version(path: Path, versions: Collection[bytes], last: bytes) -> None:
    """Until `last` is there; one of the others before."""
    end = time.monotonic() + PUBLISH_TIMEOUT_S
    while see(path, {*versions, last}) != last:
        assert time.monotonic() < end, "the last version was not published"
        time.sleep(0.01)
