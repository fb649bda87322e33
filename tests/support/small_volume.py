"""Local files of a mount on a volume that keeps nothing but the count of its room."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from kvstore.client.blocks import AsyncBlocks
from kvstore.client.sockets import SealedBlock
from kvstore.client.staging import Staging
from kvstore.core.errors import NoSpace
from kvstore.core.limits import MIB
from kvstore.fuse.localfile import LocalFile
from kvstore.fuse.staging import StagingArea
from kvstore.runtime import SystemRuntime


class SmallVolume:
    """Blocks on a volume with so much room. `asked`: every reservation, granted or not; `given_up`: blocks."""

    def __init__(self, path: Path, room: int) -> None:
        self.path, self.room, self.asked = path, room, list[int]()
        self.given_up: list[SealedBlock] = []

    async def stage(self, size_hint: int = 0) -> Staging:
        self._take(size_hint)
        return Staging(self, os.open(self.path, os.O_RDWR | os.O_CREAT), handle=1)

    async def reserve(self, staging: Staging, size_bytes: int, *, evict: bool = True) -> None:
        self._take(size_bytes)

    async def abort(self, staging: Staging) -> None:
        staging.close()

    async def give_up(self, blocks: Sequence[SealedBlock]) -> None:
        self.given_up += blocks

    def _take(self, size_bytes: int) -> None:
        self.asked.append(size_bytes)
        if size_bytes > self.room:
            raise NoSpace


class Time(SystemRuntime):
    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


def area_on(volume: SmallVolume, runtime: Time) -> StagingArea:
    return StagingArea(cast(AsyncBlocks, volume), runtime, 64 * MIB)


def new_file() -> LocalFile:
    return LocalFile(1, 1, None, True, 0o100644, 0, 0, 0, 0)
