"""A drive that fails under one tier of several: its volume goes, the worker lives on."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvstore.core.errors import Corrupt, KvError, NotFound, Unavailable
from kvstore.core.types import Replica
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.entries import address_to_pb
from kvstore.rpc.metadata import Caller
from kvstore.worker.blocks import store
from kvstore.worker.blocks.block import Block
from kvstore.worker.capacity import room
from kvstore.worker.settings import Settings, VolumeSettings
from kvstore.worker.volumes.disk import Disk, FileState
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.accounting import stop_moves
from tests.support.worker_kit import MIB

pytestmark = pytest.mark.allow_errors("out of service")


class Failing(Disk):
    """EIO from every file below `broken`."""

    broken = "nothing"

    def _check(self, path: str) -> None:
        if path.startswith(self.broken):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def _check_fd(self, fd: int) -> None:
        self._check(os.readlink(f"/proc/self/fd/{fd}"))

    def open_read(self, path: str) -> int:
        self._check(path)
        return super().open_read(path)

    def create(self, path: str) -> int:
        self._check(path)
        return super().create(path)

    def rename(self, source: str, target: str) -> None:
        self._check(target)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._check(path)
        super().unlink(path)

    def replace_durably(self, path: str, data: bytes) -> None:
        self._check(path)
        super().replace_durably(path, data)

    def read(self, fd: int, size_bytes: int, offset: int) -> bytes:
        self._check_fd(fd)
        return super().read(fd, size_bytes, offset)

    def read_into(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check_fd(fd)
        return super().read_into(fd, buffers, offset)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        self._check_fd(fd)
        super().write(fd, data, offset)


def settings(root: Path) -> Settings:
    tiers = ("mem", 8 * MIB), ("ssd", 32 * MIB)
    volumes = [VolumeSettings(tier, str(root / tier), size, 0) for tier, size in tiers]
    return kit.settings(root)._replace(volumes=volumes, session_grace_s=60.0)


@pytest.fixture
def disk() -> Failing:
    return Failing()


@pytest.fixture
async def worker(tmp_path: Path, disk: Failing) -> AsyncIterator[Worker]:
    async with kit.running(settings(tmp_path), disk) as worker:
        await stop_moves(worker)  # but for those of the test
        yield worker
        assert not worker.refused.done(), "it lives on"


async def in_both(worker: Worker, count: int = 3) -> tuple[dict[Block, bytes], dict[Block, bytes]]:
    """Blocks in memory, and on the disk."""
    tiers: tuple[dict[Block, bytes], dict[Block, bytes]] = {}, {}
    for number in range(2 * count):
        data = os.urandom(MIB)
        block = await kit.put(worker, data, session=number + 1)
        tiers[number % 2][block] = data
        if number % 2 == 0:
            worker.mover.touched(block)
            block.touches = 1
    await type(worker.mover).step(worker.mover)
    assert [b.volume.tier for b in (*tiers[0], *tiers[1])] == ["mem"] * count + ["ssd"] * count
    return tiers


def listed(worker: Worker) -> list[str]:
    return [volume.tier for volume in worker.master_sync.beat().volumes]


async def test_when_memory_fails_its_blocks_are_misses_at_once_and_the_disk_serves(
    worker: Worker, disk: Failing, tmp_path: Path
) -> None:
    hot, cold = await in_both(worker)
    disk.broken = str(tmp_path / "mem")
    first, *others = hot
    first.stamp = None  # it has to be read again
    with pytest.raises(KvError):
        await kit.get(worker, first.address)
    assert listed(worker) == ["ssd"]
    for block in others:
        with pytest.raises(NotFound):
            await kit.get(worker, block.address)
    for block, data in cold.items():
        assert await kit.get(worker, block.address) == data
    block = await kit.put(worker, b"data")
    assert await kit.get(worker, block.address) == b"data"
    await type(worker.mover).step(worker.mover)
    assert len(worker.store) == len(cold) + 1


async def test_a_peers_copy_serves_what_was_lost(worker: Worker, disk: Failing, tmp_path: Path) -> None:
    (tmp_path / "peer").mkdir()
    hot, _ = await in_both(worker)
    async with kit.running(kit.settings(tmp_path / "peer", "peer")) as peer:
        for block in hot:  # a replica of each
            opened = await peer.opener.open(block.address, [replica_at(worker)], 20.0)
            os.close(opened.fd)
        disk.broken = str(tmp_path / "mem")
        for block, data in hot.items():
            block.stamp = None
            opened = await worker.opener.open(block.address, [replica_at(peer)], 20.0)
            assert os.pread(opened.fd, MIB, 0) == data
            os.close(opened.fd)
        assert listed(worker) == ["ssd"]
        assert all(known.volume.tier == "ssd" for b in hot if (known := worker.store.get(b.id)))


async def test_when_the_disk_fails_puts_are_refused_and_memory_serves_and_keeps_what_is_fetched(
    worker: Worker, disk: Failing, tmp_path: Path
) -> None:
    (tmp_path / "peer").mkdir()
    hot, cold = await in_both(worker)
    disk.broken = str(tmp_path / "ssd")
    for _ in range(2):
        with pytest.raises(KvError):
            await worker.staging.create(1, MIB)
    assert listed(worker) == ["mem"]
    with pytest.raises(Unavailable, match="in service"):
        await worker.staging.create(1, MIB)
    for block, data in hot.items():
        assert await kit.get(worker, block.address) == data
    with pytest.raises(NotFound):
        await kit.get(worker, next(iter(cold)).address)
    async with kit.running(kit.settings(tmp_path / "peer", "peer")) as peer:
        away = await kit.put(peer, data := os.urandom(MIB))
        opened = await worker.opener.open(away.address, [replica_at(peer)], 20.0)
        assert os.pread(opened.fd, MIB, 0) == data
        os.close(opened.fd)
        found = worker.store.get(away.id)
        assert found is not None
        assert found.volume.tier == "mem"


async def test_with_no_volume_left_readers_are_served_from_peers(worker: Worker, disk: Failing, tmp_path: Path) -> None:
    (tmp_path / "peer").mkdir()
    async with kit.running(kit.settings(tmp_path / "peer", "peer")) as peer:
        away = await kit.put(peer, data := os.urandom(MIB))
        for volume in worker.store.volumes:
            worker.store.fail(volume, "as a test wants it")
        opened = await worker.opener.open(away.address, [replica_at(peer)], 20.0)
        assert os.pread(opened.fd, MIB, 0) == data
        os.close(opened.fd)
        assert listed(worker) == []


async def test_with_no_volume_left_nothing_is_moved_and_nothing_placed(worker: Worker) -> None:
    await in_both(worker)
    mem, ssd = worker.store.volumes
    for volume in (mem, ssd):
        worker.store.fail(volume, "as a test wants it")
    assert await worker.mover.demote(mem, MIB) == 0
    assert worker.mover.place_fetched(MIB) is None


@pytest.mark.parametrize("is_fetch", [False, True])
async def test_who_waits_for_room_when_the_last_volume_fails_is_told_so(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, is_fetch: bool
) -> None:
    for _ in range(32):
        await kit.put(worker, os.urandom(MIB), owned=False)
    mem, _ = worker.store.volumes
    mem.books.take(mem.books.free)

    async def fail(_: Volume) -> None:
        for volume in worker.store.volumes:
            worker.store.fail(volume, "as a test wants it")

    monkeypatch.setattr(worker.room, "look", fail)
    with pytest.raises(Unavailable, match="in service"):
        await worker.room.take(MIB, 5.0, worker.mover.place_fetched if is_fetch else room.NOWHERE)


@pytest.mark.parametrize("broken", ["mem", "ssd"])
async def test_a_drive_that_fails_in_the_middle_of_a_move_costs_its_own_blocks_only(
    worker: Worker, disk: Failing, tmp_path: Path, broken: str
) -> None:
    hot, cold = await in_both(worker)
    for block in cold:
        worker.mover.touched(block)
        block.touches = 2
    disk.broken = str(tmp_path / broken)
    await type(worker.mover).step(worker.mover)
    assert listed(worker) == [tier for tier in ("mem", "ssd") if tier != broken]
    for block, data in (cold if broken == "mem" else hot).items():
        assert await kit.get(worker, block.address) == data
    assert not any(block.moving for block in worker.store.all())


def replica_at(worker: Worker) -> Replica:
    return Replica(1, "ssd", worker.settings.node, worker.endpoint)


class Unreadable(Disk):
    """Reads of an open file fail with `number`."""

    number = 0

    def read(self, fd: int, size_bytes: int, offset: int) -> bytes:
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return super().read(fd, size_bytes, offset)


async def frames(worker: Worker, block: Block) -> bytes:
    """As another node reads it."""
    request = w.ReadRequest(address=address_to_pb(block.address)).SerializeToString()
    return b"".join([frame async for frame in worker.bulk.read(request, Caller(1, "b", ""))])


@pytest.mark.parametrize(("number", "serves"), [(errno.EIO, False), (errno.EBADMSG, True)])
async def test_a_read_for_another_node_that_fails_says_the_same_of_the_drive(
    tmp_path: Path, number: int, serves: bool
) -> None:
    disk = Unreadable()
    async with kit.running(settings(tmp_path), disk) as worker:
        block = await kit.put(worker, b"data")
        assert await frames(worker, block) == b"data"
        disk.number = number
        with pytest.raises(Corrupt):
            await frames(worker, block)
        assert block.volume.in_service is serves
        disk.number = 0
        if serves:  # it was this file, and only for a moment
            assert await frames(worker, block) == b"data"


class Short(Disk):
    """The next `times` looks into a directory of the kind `part` fail with `number`."""

    number, times, part = 0, 0, "/blocks/"

    def names(self, path: str) -> list[str]:
        if self.times and self.part in f"{path}/":
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number), path)
        return super().names(path)


@pytest.mark.parametrize("part", ["/blocks/", "/staging/"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
async def test_a_start_that_is_short_of_something_fails_no_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, part: str
) -> None:
    monkeypatch.setattr(store, "SCAN_RETRY_S", 0.01)
    async with kit.running(settings(tmp_path)) as worker:
        block = await kit.put(worker, b"data")
    disk = Short()
    disk.number, disk.times, disk.part = number, 1 if number == errno.EIO else 5, part
    async with kit.running(settings(tmp_path), disk) as worker:
        assert disk.times == 0
        if number == errno.EIO:
            assert listed(worker) == ["ssd"]
        else:
            assert listed(worker) == ["mem", "ssd"]
        assert await kit.get(worker, block.address) == b"data"


class Unasked(Disk):
    """Nothing can be said of the file `path`."""

    path, number = "", 0

    def stat(self, path: str) -> FileState:
        if path == self.path:
            raise OSError(self.number, os.strerror(self.number), path)
        return super().stat(path)


@pytest.mark.parametrize(("number", "serves"), [(errno.EBADMSG, True), (errno.EIO, False)])
async def test_a_file_that_cannot_be_measured_says_as_little_of_its_volume(
    tmp_path: Path, number: int, serves: bool
) -> None:
    async with kit.running(settings(tmp_path)) as worker:
        blocks = [await kit.put(worker, b"data"), await kit.put(worker, b"more")]
    disk = Unasked()
    disk.path, disk.number = blocks[0].path, number
    async with kit.running(settings(tmp_path), disk) as worker:
        assert listed(worker) == (["mem", "ssd"] if serves else ["mem"])
        disk.path = ""
        for block in blocks if serves else ():
            assert len(await kit.get(worker, block.address)) == 4
