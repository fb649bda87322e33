"""A volume on every kind of file system it may lie on: one contract, run against each."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.errors import InvalidRequest, NoSpace, Unavailable
from kvstore.core.types import Address, BlockId
from kvstore.pagecache import Residency, all_in_core
from kvstore.runtime import SystemRuntime
from kvstore.worker.settings import VolumeSettings
from kvstore.worker.volumes import lease
from kvstore.worker.volumes.disk import Disk, disk_bytes
from kvstore.worker.volumes.held import unlink_watched
from kvstore.worker.volumes.lease import Holders
from kvstore.worker.volumes.opening import open_volumes
from kvstore.worker.volumes.volume import MAX_QUARANTINED, FoundBlock, Volume, open_volume
from tests.support import worker_kit as kit
from tests.support.worker_kit import MIB

ADDRESS = Address(BlockId(7, 0x1F), 4, 0xABCDEF)


@pytest.fixture(params=["disk", "tmpfs"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on the disk of temporary files, or in memory."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def volume(root: Path) -> Iterator[Volume]:
    volume = make(root)
    yield volume
    volume.close()


def make(root: Path, volume_id: int = 5) -> Volume:
    return open_volume(VolumeSettings("ssd", str(root / "v"), 10 * MIB, 0), volume_id, Disk())


def write(path: str | Path, data: bytes = b"data") -> None:
    Path(path).write_bytes(data)


def test_the_name_of_a_blocks_file_is_its_address(volume: Volume) -> None:
    assert volume.block_path(ADDRESS) == f"{volume.path}/blocks/00/0000000000000007-1f.4.0000000000abcdef"
    assert volume.staging_path(1, 2) == f"{volume.path}/staging/0000000000000001-0000000000000002"


def test_its_identity_stays(root: Path) -> None:
    first = make(root, 5)
    first.write_identity(first.identity.__class__(5, "cluster", 9))
    first.close()
    again = make(root, 6)
    assert (again.id, again.identity.cluster, again.identity.sequence) == (5, "cluster", 9)
    again.close()


def test_a_second_worker_is_refused_until_the_first_has_gone(root: Path) -> None:
    first = make(root)
    with pytest.raises(Unavailable, match="another worker uses this volume"):
        make(root)
    first.close()
    make(root).close()


def test_a_directory_that_holds_something_else_is_refused(root: Path) -> None:
    (root / "v").mkdir()
    write(root / "v" / "holiday.jpg")
    with pytest.raises(InvalidRequest, match=r"holiday\.jpg"):
        make(root)
    assert sorted(os.listdir(root / "v")) == ["holiday.jpg", "lock"]


def test_the_scan_finds_blocks_and_sets_strangers_aside(volume: Volume) -> None:
    write(volume.block_path(ADDRESS))
    write(f"{volume.path}/blocks/00/notes.txt")
    write(f"{volume.path}/blocks/01/{ADDRESS.file_name}")  # in the wrong directory
    found = volume.scan()
    assert found.blocks == [FoundBlock(ADDRESS, 4, 0)]
    assert sorted(os.listdir(f"{volume.path}/quarantine")) == sorted(["notes.txt", ADDRESS.file_name])
    assert found.quarantine.kept_bytes >= 8


def test_a_block_is_found_by_its_name_only_with_its_length(volume: Volume) -> None:
    assert not volume.look_up(ADDRESS)
    write(volume.block_path(ADDRESS), b"dat")
    assert not volume.look_up(ADDRESS)
    write(volume.block_path(ADDRESS))
    assert volume.look_up(ADDRESS)


def test_staging_is_found_again_and_strangers_in_it_go(volume: Volume) -> None:
    write(volume.staging_path(1, 2**64 - 1))
    write(f"{volume.path}/staging/x")
    assert volume.scan_staging() == [(1, 2**64 - 1)]
    assert len(os.listdir(f"{volume.path}/staging")) == 1


def test_quarantine_keeps_the_newest_few(volume: Volume) -> None:
    for i in range(MAX_QUARANTINED + 3):
        write(volume.quarantine_path(f"f{i:02}"))
        os.utime(volume.quarantine_path(f"f{i:02}"), ns=(i, i))
    size = disk_bytes(len(b"data"))
    assert volume.trim_quarantine() == (MAX_QUARANTINED * size, (size,) * 3)
    assert sorted(os.listdir(f"{volume.path}/quarantine")) == [f"f{i:02}" for i in range(3, MAX_QUARANTINED + 3)]


def test_a_crash_while_it_is_made_leaves_something_that_can_be_made_again(root: Path) -> None:
    (root / "v").mkdir()
    write(root / "v" / "lock", b"")
    write(root / "v" / "identity.new", b"\x01")
    make(root).close()


def test_leases_tell_writers_and_holders(root: Path) -> None:
    path = str(root / "f")
    writer = os.open(path, os.O_RDWR | os.O_CREAT)
    mine = os.open(path, os.O_RDONLY)
    assert lease.writers(mine) is Holders.SOME
    os.close(writer)
    assert lease.writers(mine) is Holders.NONE
    other = os.open(path, os.O_RDONLY)
    assert lease.writers(mine) is Holders.NONE
    assert lease.holders(mine) is Holders.SOME
    os.close(other)
    assert lease.holders(mine) is Holders.NONE
    os.close(mine)


def test_unlinked_bytes_are_watched_while_somebody_has_them(root: Path) -> None:
    path = str(root / "f")
    write(path)
    assert unlink_watched(Disk(), path) is None
    assert unlink_watched(Disk(), path) is None, "already gone is fine"
    write(path)
    reader = os.open(path, os.O_RDONLY)
    watch = unlink_watched(Disk(), path)
    assert watch is not None
    assert lease.holders(watch) is Holders.SOME
    os.close(reader)
    assert lease.holders(watch) is Holders.NONE
    os.close(watch)


def test_residency_by_both_ways_agrees(root: Path) -> None:
    fd = os.open(root / "f", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, os.urandom(100_001), 0)
    assert Residency().is_whole(fd, 100_001)
    assert all_in_core(fd, 100_001)
    assert not Residency().is_whole(fd, 10 * MIB), "more than there is cannot be resident"


def test_without_cachestat_mincore_answers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.pagecache._SYS_CACHESTAT", 100_000)  # ENOSYS
    fd, residency = os.open(root / "f", os.O_RDWR | os.O_CREAT), Residency()
    os.pwrite(fd, os.urandom(100_001), 0)
    assert residency.is_whole(fd, 100_001)
    assert not residency.is_known
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert residency.is_whole(fd, 100_001) == all_in_core(fd, 100_001)  # tmpfs keeps its pages
    os.close(fd)


def test_copy_stops_where_the_source_ends(root: Path) -> None:
    source, target = (os.open(root / n, os.O_RDWR | os.O_CREAT) for n in "ab")
    os.pwrite(source, b"x" * 5000, 0)
    assert Disk().copy(source, target, 4000) == 4000
    assert Disk().copy(source, target, 9000) == 5000
    assert os.pread(target, 9000, 0) == b"x" * 5000
    os.close(source)
    os.close(target)


async def test_put_get_evict(root: Path) -> None:
    """The whole worker on it."""
    async with kit.running(kit.settings(root, capacity=4 * MIB)) as worker:
        for _ in range(8):
            data = os.urandom(MIB)
            block = await kit.put(worker, data)
            assert await kit.get(worker, block.address) == data
            await kit.check_books(worker)
        assert worker.counters.evictions >= 4


async def test_clients_never_stage_in_memory(tmp_path: Path) -> None:
    settings = kit.settings(tmp_path)
    only_memory = [VolumeSettings("mem", str(tmp_path / "m"), MIB, 0)]
    runtime = SystemRuntime()
    with pytest.raises(InvalidRequest, match="disk tiers only"):
        await open_volumes(settings._replace(volumes=only_memory), runtime, Disk())
    runtime.close()
    async with kit.running(settings._replace(volumes=[*only_memory, *settings.volumes])) as worker:
        block = await kit.put(worker, b"data")
        assert block.volume.tier == "ssd"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB, smaller than what the volume on it may have."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "kvstore-test", str(directory)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


async def test_a_disk_smaller_than_the_capacity_evicts_and_never_fails_a_put(small_disk: Path) -> None:
    async with kit.running(kit.settings(small_disk, capacity=64 * MIB)) as worker:
        for _ in range(16):
            await kit.put(worker, os.urandom(MIB))
        assert worker.counters.evictions >= 8
        await kit.check_books(worker)


async def test_the_free_floor_is_left_to_others(small_disk: Path) -> None:
    settings = kit.settings(small_disk, capacity=64 * MIB)
    floored = [volume._replace(free_floor_bytes=4 * MIB) for volume in settings.volumes]
    async with kit.running(settings._replace(volumes=floored)) as worker:
        await asyncio.gather(*(kit.put(worker, os.urandom(MIB)) for _ in range(8)))
        metadata = 64 << 10  # directories and the identity are not in the books
        assert Disk().free_bytes(str(small_disk)) >= 4 * MIB - metadata
        write(small_disk / "others", bytes(2 * MIB))
        staged, fd = await worker.staging.create(1, MIB)
        os.close(fd)
        assert staged.volume.books.slack >= 0
        with pytest.raises(NoSpace):
            await worker.staging.create(1, 7 * MIB, 0.3)
