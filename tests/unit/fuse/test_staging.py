"""Room for local files: asked for in large steps, and just what is needed where there is not so much."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from kvstore.client.blocks import AsyncBlocks
from kvstore.client.staging import Staging
from kvstore.core.errors import NoSpace
from kvstore.core.limits import KIB, MIB
from kvstore.fuse.backing import Backing
from kvstore.fuse.localfile import LocalFile
from kvstore.fuse.staging import TIGHT_FOR_S, StagingArea
from kvstore.runtime import SystemRuntime


class SmallVolume:
    """Blocks on a volume with so much room; `asked`: every reservation, granted or not."""

    def __init__(self, path: Path, room: int) -> None:
        self.path, self.room, self.asked = path, room, list[int]()

    async def stage(self, size_hint: int = 0) -> Staging:
        self._take(size_hint)
        return Staging(self, os.open(self.path, os.O_RDWR | os.O_CREAT), handle=1)

    async def reserve(self, staging: Staging, size_bytes: int, *, evict: bool = True) -> None:
        self._take(size_bytes)

    async def abort(self, staging: Staging) -> None:
        staging.close()

    def _take(self, size_bytes: int) -> None:
        self.asked.append(size_bytes)
        if size_bytes > self.room:
            raise NoSpace


class Time(SystemRuntime):
    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


@pytest.fixture
async def runtime() -> AsyncIterator[Time]:
    runtime = Time(1)
    yield runtime
    runtime.close()


def area_on(volume: SmallVolume, runtime: Time) -> StagingArea:
    return StagingArea(cast(AsyncBlocks, volume), runtime, 64 * MIB)


def new_file() -> LocalFile:
    return LocalFile(1, 1, None, True, 0o100644, 0, 0, 0, 0)


async def write(area: StagingArea, file: LocalFile, size_bytes: int, step: int = 128 * KIB) -> None:
    for at in range(0, size_bytes, step):
        await area.write(file, at, bytes(min(step, size_bytes - at)))


async def test_with_room_there_are_few_reservations(tmp_path: Path, runtime: Time) -> None:
    volume = SmallVolume(tmp_path / "f", 64 * MIB)
    area, file = area_on(volume, runtime), new_file()
    await write(area, file, 14 * MIB)
    assert volume.asked == [4 * MIB, 16 * MIB]
    await area.drop(file)


async def test_a_small_file_has_only_what_it_needs(tmp_path: Path, runtime: Time) -> None:
    volume = SmallVolume(tmp_path / "f", 64 * MIB)
    area, file = area_on(volume, runtime), new_file()
    await area.write(file, 0, b"x" * 1000)
    assert volume.asked == [1000]
    for i in range(1, 60):  # small appends do not ask each time
        await area.write(file, i * 1000, b"x" * 1000)
    assert len(volume.asked) == 7
    await area.drop(file)


async def test_a_file_that_fits_is_written_however_little_room_there_is(tmp_path: Path, runtime: Time) -> None:
    volume = SmallVolume(tmp_path / "f", 2 * MIB)
    area, file = area_on(volume, runtime), new_file()
    await write(area, file, 900_000)
    assert volume.asked[:2] == [4 * MIB, 128 * KIB]
    assert max(volume.asked[1:]) == 900_000, "each NoSpace may have waited for room: one is enough"
    with pytest.raises(NoSpace):
        await area.write(file, 2 * MIB, b"x")
    await area.drop(file)
    runtime.now_s += TIGHT_FOR_S
    volume.room = 64 * MIB
    await write(area, other := new_file(), 128 * KIB)
    assert volume.asked[-1] == 4 * MIB
    await area.drop(other)


async def test_growing_falls_back_too(tmp_path: Path, runtime: Time) -> None:
    volume = SmallVolume(tmp_path / "f", 6 * MIB)
    area, file = area_on(volume, runtime), new_file()
    await write(area, file, 5 * MIB, MIB)
    assert volume.asked == [4 * MIB, 16 * MIB, 5 * MIB]
    await area.drop(file)


class Passthrough(Backing):
    passthrough = True


async def test_a_second_writer_hides_nothing_of_the_first(tmp_path: Path, runtime: Time) -> None:
    """The kernel writes by itself: what came since the last look is a change, whoever opens the file next."""
    volume = SmallVolume(tmp_path / "f", 64 * MIB)
    area, file = StagingArea(cast(AsyncBlocks, volume), runtime, 64 * MIB, Passthrough()), new_file()
    await area.begin(file, truncate=False)
    before = file.changes
    os.pwrite(file.fd, b"behind our back", 0)
    await area.begin(file, truncate=False)
    assert file.changes > before
    assert file.size_bytes == 15
    await area.drop(file)
    await area.spares.close()


async def test_what_is_empty_is_not_truncated(tmp_path: Path, runtime: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """ext4 would write its data to the disk at the close, and the master's next sync would wait for that."""
    truncated: list[int] = []
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: truncated.append(os.fstat(fd).st_size))
    volume = SmallVolume(tmp_path / "f", 64 * MIB)
    area, file = StagingArea(cast(AsyncBlocks, volume), runtime, 64 * MIB, Passthrough()), new_file()
    await area.begin(file, truncate=True)
    assert truncated == []
    os.pwrite(file.fd, b"old", 0)
    await area.begin(file, truncate=True)
    assert truncated == [3]
    await area.drop(file)
    await area.spares.close()
