"""ENOSPC from the operating system: others filled the disk, and the books do not know. Evict, retry once, refuse."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.errors import Corrupt, NoSpace
from kvstore.core.hashing import hash_block
from kvstore.core.types import Replica
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.entries import address_from_pb
from kvstore.rpc.metadata import Caller
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.capacity import room
from kvstore.worker.settings import Settings, VolumeSettings, Watermarks
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.crowded_disk import CrowdedDisk
from tests.support.worker_kit import MIB

CALLER = Caller(session=7)


def settings(root: Path, node: str = "a") -> Settings:
    """A volume that may have more than its disk of 16 MiB."""
    return kit.settings(root, node)._replace(session_grace_s=60.0)


@pytest.fixture
def disk(tmp_path: Path) -> CrowdedDisk:
    return CrowdedDisk(tmp_path, 16 * MIB)


@pytest.fixture
async def worker(tmp_path: Path, disk: CrowdedDisk, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    async with kit.running(settings(tmp_path), disk) as worker:
        monkeypatch.setattr(worker.mover, "step", do_nothing)  # it would make room by itself
        yield worker
        assert worker.store.volumes[0].in_service
        await kit.check_books(worker)
        assert all(v.books.staging == 0 for v in worker.store.volumes), "nothing is left behind"


async def do_nothing() -> None:
    return


@pytest.fixture
async def full(worker: Worker, disk: CrowdedDisk) -> list[Block]:
    """Eight blocks, and 1.5 MiB left of the disk; the books were brought up to date before others filled it."""
    blocks = [await kit.put(worker, os.urandom(MIB)) for _ in range(8)]
    disk.fill_but(3 * MIB // 2)
    assert worker.store.volumes[0].books.free > 4 * MIB, "they do not know"
    return blocks


async def upload(worker: Worker, data: bytes) -> Any:
    async def frames() -> AsyncIterator[bytes]:
        yield w.WriteRequest(session=7, length_bytes=len(data), hash=hash_block(data)).SerializeToString()
        for at in range(0, len(data), MIB):
            yield data[at : at + MIB]

    return await worker.bulk.write(frames(), CALLER)


async def test_an_upload_makes_room_and_goes_on_where_it_was(
    worker: Worker, full: list[Block], disk: CrowdedDisk
) -> None:
    data = os.urandom(4 * MIB + 5)
    reply = await upload(worker, data)
    assert disk.refusals == 1
    assert await kit.get(worker, address_from_pb(reply.address)) == data
    assert 3 <= 8 - sum(worker.store.get(b.id) is b for b in full) <= 6, "what was missing, and a little more"
    assert worker.counters.tiers["ssd"].unlinked[Reason.FLOOR].files == worker.counters.evictions > 0


async def test_the_copy_of_a_file_that_is_still_written_makes_room(
    worker: Worker, full: list[Block], disk: CrowdedDisk
) -> None:
    data = os.urandom(3 * MIB)
    staged, fd = await worker.staging.create(1, len(data))
    disk.others_bytes -= len(data)
    os.pwrite(fd, data, 0)
    block = await worker.sealer.seal_copy(staged)
    os.close(fd)
    await worker.staging.abort(staged)
    assert disk.refusals == 1
    assert await kit.get(worker, block.address) == data


async def test_a_copy_is_no_longer_than_what_its_writer_left_of_the_file(
    worker: Worker, full: list[Block], disk: CrowdedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt has copied more when the disk turned out to be full."""
    data = os.urandom(3 * MIB)
    staged, fd = await worker.staging.create(1, len(data))
    disk.others_bytes -= len(data)
    os.pwrite(fd, data, 0)
    refill = worker.store.on_full

    async def shorter(volume: Volume) -> bool:
        os.ftruncate(fd, 1000)
        return await refill(volume)

    monkeypatch.setattr(worker.store, "on_full", shorter)
    block = await worker.sealer.seal_copy(staged)
    os.close(fd)
    await worker.staging.abort(staged)
    assert disk.refusals == 1
    assert block.address.length_bytes == os.path.getsize(block.path) == 1000
    assert await kit.get(worker, block.address) == data[:1000]


async def test_where_nothing_can_go_the_write_is_refused_and_leaves_nothing(worker: Worker, disk: CrowdedDisk) -> None:
    blocks = [await kit.put(worker, os.urandom(MIB), owned=False) for _ in range(4)]
    disk.fill_but(MIB)
    with pytest.raises(NoSpace, match="other users filled it"):
        await upload(worker, os.urandom(3 * MIB))
    assert kit.files(worker, "staging") == []
    assert len(worker.store) == len(blocks)
    with pytest.raises(NoSpace, match="free some of the disk"):
        await worker.staging.create(1, 3 * MIB, 0.1)
    disk.others_bytes = 0
    assert await upload(worker, os.urandom(3 * MIB))


async def test_a_reader_never_sees_it(tmp_path: Path, worker: Worker, disk: CrowdedDisk) -> None:
    """A fetched block that cannot be kept is served from memory."""
    (tmp_path.parent / "owner").mkdir(exist_ok=True)
    data = os.urandom(3 * MIB)
    await kit.put(worker, os.urandom(MIB), owned=False)
    async with kit.running(settings(tmp_path.parent / "owner", "owner")) as owner:
        address = (await kit.put(owner, data)).address
        disk.fill_but(MIB)
        replica = Replica(1, "ssd", "owner", owner.endpoint)
        opened = await worker.opener.open(address, [replica], 20.0)
        assert os.pread(opened.fd, len(data), 0) == data
        os.close(opened.fd)
        assert disk.refusals >= 1
        assert worker.store.get(address.block) is None
        disk.others_bytes = 0
        opened = await worker.opener.open(address, [replica], 20.0)
        os.close(opened.fd)
        assert worker.store.get(address.block) is not None


async def test_a_fetched_block_is_kept_when_room_can_be_made(
    tmp_path: Path, worker: Worker, full: list[Block], disk: CrowdedDisk
) -> None:
    (tmp_path.parent / "owner").mkdir(exist_ok=True)
    data = os.urandom(3 * MIB)
    async with kit.running(settings(tmp_path.parent / "owner", "owner")) as owner:
        address = (await kit.put(owner, data)).address
        opened = await worker.opener.open(address, [Replica(1, "ssd", "owner", owner.endpoint)], 20.0)
        os.close(opened.fd)
    assert disk.refusals == 1
    assert await kit.get(worker, address) == data


class FullOnce(Disk):
    """The next call of each method in `names` fails with `number`."""

    def __init__(self, *names: str, number: int = errno.ENOSPC) -> None:
        self.left, self.number = list(names), number
        self.refused: list[str] = []

    def _tick(self, name: str) -> None:
        if name in self.left:
            self.left.remove(name)
            self.refused.append(name)
            raise OSError(self.number, os.strerror(self.number))

    def create(self, path: str) -> int:
        self._tick("create")
        return super().create(path)

    def rename(self, source: str, target: str) -> None:
        self._tick("rename")
        super().rename(source, target)

    def replace_durably(self, path: str, data: bytes) -> None:
        self._tick(os.path.basename(path))
        super().replace_durably(path, data)


async def test_a_staging_file_that_needs_a_block_for_its_directory_is_tried_again(tmp_path: Path) -> None:
    disk = FullOnce("create")
    async with kit.running(settings(tmp_path), disk) as worker:
        block = await kit.put(worker, b"data")
        assert disk.refused == ["create"]
        assert await kit.get(worker, block.address) == b"data"
        disk.left = ["create", "create"]
        with pytest.raises(NoSpace):
            await worker.staging.create(1, MIB)
        await kit.check_books(worker)
        assert worker.store.volumes[0].books.staging == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
async def test_an_identity_that_cannot_be_saved_costs_no_volume(tmp_path: Path, number: int) -> None:
    disk = FullOnce(number=number)
    async with kit.running(settings(tmp_path), disk) as worker:
        volume = worker.store.volumes[0]
        disk.left = ["identity"]
        worker.membership.cluster = "c"
        await worker.membership.save(worker.runtime, worker.store, worker.store.fences)
        assert disk.refused == ["identity"]
        assert volume.in_service
        assert volume.identity.cluster == ""
        await worker.membership.save(worker.runtime, worker.store, worker.store.fences)
        assert volume.identity.cluster == "c"


async def test_a_rename_that_needs_a_block_for_its_directory_is_tried_again(tmp_path: Path) -> None:
    disk = FullOnce("rename")
    async with kit.running(settings(tmp_path), disk) as worker:
        block = await kit.put(worker, b"data")
        assert disk.refused == ["rename"]
        assert await kit.get(worker, block.address) == b"data"
        await kit.check_books(worker)


@pytest.mark.allow_errors("is corrupt")
async def test_a_corrupt_block_for_which_the_quarantine_has_no_room_is_unlinked(tmp_path: Path) -> None:
    disk = FullOnce()
    async with kit.running(settings(tmp_path), disk) as worker:
        block = await kit.put(worker, b"data")
        Path(block.path).write_bytes(b"rot!")
        disk.left = ["rename"]
        with pytest.raises(Corrupt):
            await worker.verifier.verify(block)
        assert disk.refused == ["rename"]
        assert not Path(block.path).exists()
        assert worker.store.volumes[0].books.used == 0
        await kit.check_books(worker)


async def test_heat_that_cannot_be_saved_costs_no_volume(tmp_path: Path) -> None:
    disk = FullOnce()
    async with kit.running(settings(tmp_path), disk) as worker:
        await kit.put(worker, b"data")
        disk.left = ["heat"]
        await worker.heat_file.save()
        assert disk.refused == ["heat"]
        assert worker.store.volumes[0].in_service
        await worker.heat_file.save()
        assert (tmp_path / "volume-a" / "heat").exists()


def test_a_small_file_that_does_not_fit_leaves_the_old_one_and_no_half(tmp_path: Path) -> None:
    disk = CrowdedDisk(tmp_path, MIB)
    disk.replace_durably(str(tmp_path / "f"), b"old")
    disk.fill_but(4096)
    with pytest.raises(OSError, match="No space left"):
        disk.replace_durably(str(tmp_path / "f"), bytes(8192))
    assert os.listdir(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"


async def test_a_move_to_a_disk_that_others_filled_makes_room_there(tmp_path: Path) -> None:
    ssd, hdd = tmp_path / "ssd", tmp_path / "hdd"
    marks = Watermarks(0.9, 0.8)
    volumes = [VolumeSettings("ssd", str(ssd), 9 * MIB, 0, marks), VolumeSettings("hdd", str(hdd), 64 * MIB, 0, marks)]
    disk = CrowdedDisk(hdd, 16 * MIB)
    async with kit.running(settings(tmp_path)._replace(volumes=volumes), disk) as worker:
        old = await kit.put(worker, os.urandom(8 * MIB))
        await worker.mover.demote(old.volume, 8 * MIB)
        assert old.volume.tier == "hdd"
        block = await kit.put(worker, data := os.urandom(4 * MIB))
        disk.fill_but(MIB)
        assert await worker.mover.demote(block.volume, 4 * MIB) == 4 * MIB
        assert disk.refusals == 1
        assert block.volume.tier == "hdd"
        assert worker.store.get(old.id) is None
        assert await kit.get(worker, block.address) == data


async def test_room_is_made_only_so_often_and_only_so_long(
    worker: Worker, disk: CrowdedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "REFILL_WAIT_S", 0.1)

    async def hang(*_: object) -> int:
        await asyncio.Event().wait()
        return 0

    await kit.put(worker, os.urandom(4 * MIB))
    disk.fill_but(MIB)
    monkeypatch.setattr(worker.evictor, "make_room", hang)
    async with asyncio.timeout(10):
        with pytest.raises(NoSpace):
            await upload(worker, os.urandom(3 * MIB))
