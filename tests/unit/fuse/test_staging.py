"""Room for local files: asked for in large steps, and just what is needed where there is not so much."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest

from kvstore.client.blocks import AsyncBlocks
from kvstore.client.sockets import SealedBlock
from kvstore.client.staging import Staging
from kvstore.core.errors import KvError, NoSpace, TooLarge, Unavailable
from kvstore.core.limits import KIB, MIB
from kvstore.core.types import Address, BlockId
from kvstore.filecut import cut, is_cut
from kvstore.fuse.backing import Backing
from kvstore.fuse.localfile import LocalFile
from kvstore.fuse.reservations import TIGHT_FOR_S
from kvstore.fuse.staging import StagingArea
from tests.support.small_volume import SmallVolume, Time, area_on, new_file


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


class SealingVolume(SmallVolume):
    def __init__(self, path: Path) -> None:
        super().__init__(path, 64 * MIB)
        self.sealed: list[SealedBlock] = []

    async def seal(self, staging: Staging, size_bytes: int, **claim: int) -> SealedBlock:
        staging.close()
        self.sealed.append(SealedBlock(Address(BlockId(1, len(self.sealed)), size_bytes, 7), 5))
        return self.sealed[-1]


async def test_blocks_that_could_not_be_published_are_given_up(tmp_path: Path, runtime: Time) -> None:
    """With the next seal, or when the file goes. Until then it may be published after all (rule 28)."""
    volume = SealingVolume(tmp_path / "f")
    area, file = area_on(volume, runtime), new_file()
    await area.write(file, 0, b"first")
    await area.seal(file)
    assert await area.seal(file) is volume.sealed[0], "a flush that is tried again publishes the same block"
    await area.write(file, 0, b"other")
    assert volume.given_up == []
    await area.seal(file)
    assert volume.given_up == volume.sealed[:1]
    await area.drop(file)
    assert volume.given_up == volume.sealed
    assert len(volume.sealed) == 2


async def test_a_published_block_is_not_given_up(tmp_path: Path, runtime: Time) -> None:
    volume = SealingVolume(tmp_path / "f")
    area, file = area_on(volume, runtime), new_file()
    await area.write(file, 0, b"first")
    await area.seal(file)
    file.published_changes = file.changes
    await area.write(file, 0, b"other")
    await area.seal(file)
    file.published_changes = file.changes
    await area.drop(file)
    assert volume.given_up == []


class CuttingVolume(SmallVolume):
    """Its worker cuts files that grew too far; `why` is what it says then. Each file has a path of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 64 * MIB)
        self.why: KvError = NoSpace("no room for it")
        self.sealed = 0
        self.on_seal: Callable[[], object] = lambda: None

    async def stage(self, size_hint: int = 0) -> Staging:
        self._take(size_hint)
        made = len(self.asked)
        return Staging(self, os.open(self.path / str(made), os.O_RDWR | os.O_CREAT | os.O_EXCL), handle=made)

    async def reserve(self, staging: Staging, size_bytes: int, *, evict: bool = True) -> None:
        if is_cut(staging.fd):
            raise self.why
        self._take(size_bytes)

    async def seal(self, staging: Staging, size_bytes: int, **claim: int) -> SealedBlock:
        self.on_seal()
        if is_cut(staging.fd):
            staging.close()
            raise self.why
        staging.close()
        self.sealed += 1
        return cast(SealedBlock, object())


@pytest.fixture
async def cutting(tmp_path: Path, runtime: Time) -> AsyncIterator[tuple[CuttingVolume, StagingArea, LocalFile]]:
    """A file of 20 MiB that was written by passthrough, with a reservation of 16."""
    volume = CuttingVolume(tmp_path)
    area, file = StagingArea(cast(AsyncBlocks, volume), runtime, 64 * MIB, Passthrough()), new_file()
    await area.begin(file, truncate=True)
    file.reserved_bytes = 16 * MIB
    os.pwrite(file.fd, b"x" * (20 * MIB), 0)
    yield volume, area, file
    await area.drop(file)
    await area.spares.close()


Cutting = tuple[CuttingVolume, StagingArea, LocalFile]


async def lock_and(file: LocalFile, work: Callable[[LocalFile], Awaitable[object]]) -> None:
    async with file.lock:
        await work(file)


@pytest.mark.parametrize("written_on", [0, 20 * KIB, 16 * MIB, 20 * MIB])
async def test_a_cut_file_fails_whatever_size_it_has_now(cutting: Cutting, written_on: int) -> None:
    """Also with just the size that is reserved, where the worker would not be asked, and with none."""
    volume, area, file = cutting
    fd = os.dup(file.fd)
    cut(fd)
    if written_on:
        os.pwrite(fd, b"y" * KIB, written_on - KIB)  # behind a hole
    os.close(fd)
    for _ in range(2):  # a close, and one after it
        with pytest.raises(NoSpace, match="no room for it"):
            await area.hash(file)
    with pytest.raises(NoSpace):
        await lock_and(file, area.seal)  # a rename
    with pytest.raises(NoSpace):
        await area.sync(file)
    assert (file.size_bytes, file.staged, volume.sealed) == (0, None, 0)


async def test_fsync_of_a_cut_file_does_not_say_that_its_bytes_are_safe(cutting: Cutting) -> None:
    _, area, file = cutting
    cut(file.fd)
    with pytest.raises(NoSpace):
        await area.sync(file)


async def test_its_worker_says_why_it_was_cut(cutting: Cutting) -> None:
    volume, area, file = cutting
    volume.why = TooLarge("beyond a block")
    cut(file.fd)
    with pytest.raises(TooLarge, match="beyond a block"):
        await area.hash(file)


async def test_a_cut_is_found_while_the_worker_is_away(cutting: Cutting) -> None:
    """What the mount would do then is to stage the bytes behind its fd elsewhere: they are a hole."""
    volume, area, file = cutting
    cut(file.fd)
    os.pwrite(file.fd, b"y" * KIB, 16 * MIB - KIB)
    volume.why = Unavailable("gone")
    with pytest.raises(NoSpace, match="was emptied"):
        await lock_and(file, area.seal)
    assert volume.sealed == 0


@pytest.mark.parametrize("answer", [NoSpace("cut"), Unavailable("gone")])
async def test_a_cut_between_the_flush_and_the_seal(cutting: Cutting, answer: KvError) -> None:
    """The worker refuses the seal, or is gone with its word: then the file says it."""
    volume, area, file = cutting
    await area.hash(file)
    behind = os.dup(file.fd)
    volume.why = answer
    volume.on_seal = lambda: cut(behind)
    with pytest.raises(NoSpace):
        await lock_and(file, area.seal)
    with pytest.raises(NoSpace):
        await area.hash(file)
    assert (volume.sealed, file.size_bytes) == (0, 0)
    os.close(behind)


async def test_bytes_of_a_cut_file_are_not_copied(cutting: Cutting) -> None:
    """To append to a version that was closed makes a copy of it."""
    _, area, file = cutting
    await area.hash(file)
    cut(file.fd)
    os.ftruncate(file.fd, 20 * MIB)
    with pytest.raises(NoSpace):
        await area.copy(file, other := LocalFile(2, 2, None, True, 0o100644, 0, 0, 0, 0))
    await area.drop(other)


async def test_what_the_mount_empties_itself_is_marked_for_a_successor(cutting: Cutting) -> None:
    volume, area, file = cutting
    volume.room = MIB
    behind = os.dup(file.fd)
    with pytest.raises(NoSpace):
        await area.hash(file)
    assert is_cut(behind)
    assert os.fstat(behind).st_size == 0
    os.close(behind)


async def test_a_failed_file_takes_no_writes_and_begins_anew_when_it_is_truncated(
    tmp_path: Path, runtime: Time
) -> None:
    """Plain mode: what was lost must not become a hole."""
    volume = CuttingVolume(tmp_path)
    area, file = StagingArea(cast(AsyncBlocks, volume), runtime, 64 * MIB), new_file()
    await write(area, file, MIB)
    cut(file.fd)
    with pytest.raises(NoSpace):
        await area.hash(file)
    with pytest.raises(NoSpace):
        await area.write(file, MIB, b"more")
    with pytest.raises(NoSpace):
        await area.truncate(file, MIB)
    await area.truncate(file, 0)
    await area.write(file, 0, b"anew")
    await area.hash(file)
    assert os.pread(file.fd, 10, 0) == b"anew"
    await area.drop(file)


async def test_a_failed_file_stays_failed_while_the_kernel_may_write_what_was_dropped(cutting: Cutting) -> None:
    """Passthrough: through a handle that is still open, whoever empties the file, or opens it again."""
    _, area, file = cutting
    file.handles = 1
    cut(file.fd)
    with pytest.raises(NoSpace):
        await area.hash(file)
    with pytest.raises(NoSpace):
        await area.truncate(file, 0)
    file.handles = 2
    for truncate in (True, False):
        with pytest.raises(NoSpace):
            await area.begin(file, truncate=truncate)
    with pytest.raises(NoSpace):
        await area.sync(file)
    with pytest.raises(NoSpace):
        await lock_and(file, area.seal)


async def test_a_failed_file_begins_anew_once_its_handles_are_closed(cutting: Cutting) -> None:
    _, area, file = cutting
    cut(file.fd)
    with pytest.raises(NoSpace):
        await area.hash(file)
    file.handles = 1  # the next one
    await area.begin(file, truncate=True)
    os.pwrite(file.fd, b"anew", 0)
    await area.hash(file)
    assert (file.size_bytes, file.failed) == (4, None)


async def test_what_is_reserved_ahead_is_what_files_of_the_directory_measure(tmp_path: Path, runtime: Time) -> None:
    volume = CuttingVolume(tmp_path)
    area = StagingArea(cast(AsyncBlocks, volume), runtime, 64 * MIB, Passthrough())
    for directory, size in ((1, 14 * MIB), (2, MIB), (1, 14 * MIB), (2, MIB)):
        file = LocalFile(directory, directory, (directory, "x.tmp"), True, 0o100644, 0, 0, 0, 0)
        await area.begin(file, truncate=True)
        os.pwrite(file.fd, b"x" * size, 0)
        await lock_and(file, area.seal)
        await area.drop(file)
    for directory, size in ((1, 14 * MIB), (2, MIB), (3, 4 * MIB)):
        file = LocalFile(9, 9, (directory, "x.tmp"), True, 0o100644, 0, 0, 0, 0)
        await area.begin(file, truncate=True)
        async with file.lock:
            await area.notice(file)
        assert size in volume.asked[-2:], "before the flush told that it is empty"
        await area.drop(file)
    await area.spares.close()
