"""Staging, seal, open, verify, evict: one worker without a master."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.core.errors import Corrupt, InvalidRequest, KvError, NoSpace, NotFound, Stale, TooLarge
from kvstore.core.hashing import hash_block
from kvstore.core.types import Address, BlockId
from kvstore.worker.blocks.block import Block
from kvstore.worker.capacity import room
from kvstore.worker.volumes.books import Books
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.worker import Worker
from kvstore.worker.writes import staging
from kvstore.worker.writes.staging import Staged
from tests.support import worker_kit as kit
from tests.support.worker_kit import KIB, MIB


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(kit.settings(tmp_path)) as worker:
        yield worker
        await kit.check_books(worker)


@pytest.fixture
def patient(worker: Worker) -> Worker:
    """With sessions 1 and 2, whose files do not go after a grace of 0.2 s."""
    worker.sessions.enter(1)
    worker.sessions.enter(2)
    return worker


async def _no_look() -> None:
    return


async def test_what_was_written_is_what_is_read(worker: Worker) -> None:
    data = os.urandom(3 * MIB + 17)
    block = await kit.put(worker, data)
    assert block.address == Address(BlockId(worker.store.fences.boot, 1), len(data), hash_block(data))
    assert await kit.get(worker, block.address) == data
    assert kit.files(worker, "staging") == []


async def test_no_bytes_are_no_block_and_stay_in_staging(worker: Worker) -> None:
    staged = await kit.stage(worker, b"")
    with pytest.raises(InvalidRequest, match="empty"):
        await worker.sealer.seal(staged, None)
    assert worker.staging.find(1, staged.handle) is staged


async def test_a_file_over_the_limit_is_refused(worker: Worker) -> None:
    worker.staging.max_block_bytes = 100
    with pytest.raises(TooLarge):
        await worker.staging.create(1, 101)
    staged, fd = await worker.staging.create(1, 0)
    os.pwrite(fd, b"x" * 101, 0)
    os.close(fd)
    with pytest.raises(TooLarge):
        await worker.sealer.seal(staged, None)


async def test_the_clients_hash_stands_without_reading(worker: Worker) -> None:
    staged, fd = await worker.staging.create(1, 4)
    os.pwrite(fd, b"data", 0)
    claim = kit.claim_of(fd, b"other")  # a wrong hash shows that nobody looked
    os.close(fd)
    block = await worker.sealer.seal(staged, claim._replace(size_bytes=4))
    assert block.address.hash == hash_block(b"other")


@pytest.mark.parametrize("late", [b"DATA", b"longer"])
async def test_the_clients_hash_falls_when_the_file_changed_since(worker: Worker, late: bytes) -> None:
    staged, fd = await worker.staging.create(1, 4)
    os.pwrite(fd, b"data", 0)
    claim = kit.claim_of(fd, b"data")
    os.pwrite(fd, late, 0)
    os.utime(fd, ns=(0, claim.mtime_ns + 1))  # a second write may fall into the same tick of the file system's clock
    os.close(fd)
    block = await worker.sealer.seal(staged, claim)
    assert block.address.hash == hash_block(late)


async def test_a_dup_of_the_writers_fd_cannot_change_the_block(worker: Worker) -> None:
    staged, fd = await worker.staging.create(1, 4)
    os.pwrite(fd, b"data", 0)
    other = os.dup(fd)
    os.close(fd)
    block = await worker.sealer.seal(staged, None)
    os.pwrite(other, b"EVIL", 0)
    assert await kit.get(worker, block.address) == b"data"
    books = block.volume.books
    assert books.held == 4 * KIB, "the staging file was unlinked, and somebody has it open"
    os.close(other)
    await worker.held.probe()
    assert books.held == 0


async def test_a_shared_map_cannot_change_the_block(worker: Worker) -> None:
    staged, fd = await worker.staging.create(1, 4)
    os.pwrite(fd, b"data", 0)
    mapped = mmap.mmap(fd, 4)
    os.close(fd)
    block = await worker.sealer.seal(staged, None)
    mapped[:] = b"EVIL"
    assert await kit.get(worker, block.address) == b"data"
    mapped.close()


async def test_a_writer_that_closes_in_time_saves_the_copy(worker: Worker) -> None:
    staged, fd = await worker.staging.create(1, 4)
    os.pwrite(fd, b"data", 0)
    inode = os.fstat(fd).st_ino
    asyncio.get_running_loop().call_later(0.01, os.close, fd)
    block = await worker.sealer.seal(staged, None)
    assert os.stat(block.path).st_ino == inode


async def test_seal_copy_leaves_the_file_to_its_writer(worker: Worker) -> None:
    staged, fd = await worker.staging.create(1, 4)
    os.pwrite(fd, b"one.", 0)
    first = await worker.sealer.seal_copy(staged)
    os.pwrite(fd, b"two!!", 0)
    os.close(fd)
    second = await worker.sealer.seal(worker.staging.find(1, staged.handle), None)
    assert await kit.get(worker, first.address) == b"one."
    assert await kit.get(worker, second.address) == b"two!!"


async def test_staging_is_never_used_twice(worker: Worker) -> None:
    staged = await kit.stage(worker, b"data")
    sealing = asyncio.ensure_future(worker.sealer.seal(staged, None))
    await asyncio.sleep(0)
    with pytest.raises(Stale):
        worker.staging.find(1, staged.handle)
    await sealing
    with pytest.raises(NotFound):
        worker.staging.find(1, staged.handle)


async def test_a_seal_goes_on_when_its_caller_goes_away(worker: Worker) -> None:
    staged = await kit.stage(worker, b"data")
    caller = asyncio.ensure_future(worker.sealer.seal(staged, None))
    await asyncio.sleep(0)
    caller.cancel()
    await worker.background.close(5.0)
    assert len(worker.store) == 1
    assert kit.files(worker, "staging") == []


async def test_another_address_under_the_same_id_is_stale(worker: Worker) -> None:
    block = await kit.put(worker, b"data")
    wrong = block.address._replace(hash=1)
    with pytest.raises(Stale):
        await worker.opener.open(wrong, (), 5.0)
    assert await kit.get(worker, block.address) == b"data", "a wrong hash sends no good block to quarantine"


async def test_a_block_nobody_has_is_a_miss(worker: Worker) -> None:
    with pytest.raises(NotFound):
        await worker.opener.open(Address(BlockId(1, 1), 1, 1), (), 5.0)
    assert worker.counters.misses == 1


def damage(path: str, how: str) -> None:
    with open(path, "r+b") as file:
        match how:
            case "torn":
                file.truncate(5)
            case "extended":
                file.seek(0, os.SEEK_END)
                file.write(b"x")
            case "swapped":
                file.write(b"X")


@pytest.mark.allow_errors("is corrupt")
@pytest.mark.parametrize("how", ["torn", "extended", "swapped"])
async def test_a_damaged_file_found_at_start_is_a_miss_and_goes_to_quarantine(tmp_path: Path, how: str) -> None:
    async with kit.running(kit.settings(tmp_path)) as worker:
        good, bad = await kit.put(worker, b"good data"), await kit.put(worker, b"some data")
        damage(bad.path, how)
    async with kit.running(kit.settings(tmp_path)) as worker:
        with pytest.raises(Corrupt):
            await worker.opener.open(bad.address, (), 5.0)
        with pytest.raises(NotFound):
            await worker.opener.open(bad.address, (), 5.0)
        assert await kit.get(worker, good.address) == b"good data"
        assert [p.name for p in kit.files(worker, "quarantine")] == [bad.address.file_name]
        assert worker.counters.corruptions == 1
        await kit.check_books(worker)


@pytest.mark.allow_errors("is corrupt")
async def test_pages_dropped_from_memory_are_verified_again(worker: Worker) -> None:
    data = os.urandom(MIB)
    block = await kit.put(worker, data)
    fd = os.open(block.path, os.O_RDWR)
    os.pwrite(fd, b"rot", 100)
    block.stamp = worker.disk.fstat(fd).stamp  # the disk rots without touching the file's times
    resident = worker.opener.open_now(block.address)
    assert resident is not None, "what was verified is trusted while its pages are in memory"
    os.close(resident.fd)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    assert worker.opener.open_now(block.address) is None
    with pytest.raises(Corrupt):
        await worker.opener.open(block.address, (), 5.0)


async def test_verifying_is_done_once_for_all_who_wait(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path)) as worker:
        address = (await kit.put(worker, os.urandom(MIB))).address
    disk = CountingDisk()
    async with kit.running(kit.settings(tmp_path), disk) as worker:
        await asyncio.gather(*(kit.get(worker, address) for _ in range(8)))
        assert disk.bytes_read == MIB


class CountingDisk(Disk):
    bytes_read = 0

    def read_into(self, fd: int, buffers: object, offset: int) -> int:
        count = super().read_into(fd, buffers, offset)  # type: ignore[arg-type]
        self.bytes_read += count
        return count


async def test_a_block_is_found_by_its_name_before_the_scan_is_done(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path)) as worker:
        address = (await kit.put(worker, b"data")).address
    async with kit.running(kit.settings(tmp_path)) as worker:
        block = worker.store.get(address.block)
        assert block is not None
        worker.store.forget(block)
        block.volume.books.free_block(block.used_bytes)
        worker.store.scanned.clear()
        assert await kit.get(worker, address) == b"data"
        await kit.check_books(worker)


async def test_the_cap_holds_under_concurrent_stagers(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path, capacity=4 * MIB)) as worker:
        peak = 0

        async def write_many(session: int) -> None:
            nonlocal peak
            worker.sessions.enter(session)  # it lives, however slow this machine is
            for _ in range(6):
                await kit.put(worker, os.urandom(100_000 + 1000 * session), session)
                await kit.check_books(worker)
                peak = max(peak, worker.store.volumes[0].books.used)

        await asyncio.gather(*(write_many(s) for s in range(1, 17)))
        assert peak > 3 * MIB, "it was really full"
        assert worker.counters.evictions > 0


async def test_what_is_sealed_while_its_session_expires_is_not_dropped(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await kit.stage(worker, b"left behind"), await kit.stage(worker, b"data")
    drop, sealed = worker.staging.drop, list[Block]()

    async def drop_slowly(staged: Staged) -> None:
        sealed.append(await worker.sealer.seal(second, None))
        await drop(staged)

    monkeypatch.setattr(worker.staging, "drop", drop_slowly)
    await worker.staging.expire(worker.sessions, worker.runtime.monotonic_s() + worker.settings.session_grace_s)
    assert await kit.get(worker, sealed[0].address) == b"data"
    assert len(sealed) == 1, "only the first was dropped"
    with pytest.raises(NotFound):
        worker.staging.find(1, first.handle)


async def test_the_coldest_goes_first(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path, capacity=4 * MIB)) as worker:
        a, b, c, d = [await kit.put(worker, os.urandom(MIB), session) for session in (1, 2, 3, 4)]
        await kit.get(worker, a.address)
        await kit.put(worker, os.urandom(MIB))
        here = [worker.store.get(x.id) is not None for x in (a, b, c, d)]
        assert here == [True, False, True, True]


async def test_a_prefix_outlives_its_suffix(tmp_path: Path) -> None:
    """What one client writes in one go is a prompt, its first chunk first."""
    async with kit.running(kit.settings(tmp_path, capacity=4 * MIB)) as worker:
        chunks = [await kit.put(worker, os.urandom(MIB), session=1) for _ in range(4)]
        await kit.put(worker, os.urandom(MIB), session=2)
        assert [worker.store.get(x.id) is not None for x in chunks] == [True, True, True, False]


async def test_unowned_blocks_are_nobodys_victims(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path, capacity=2 * MIB)) as worker:
        blocks = [await kit.put(worker, os.urandom(MIB), owned=False) for _ in range(2)]
        with pytest.raises(NoSpace, match="nothing to evict"):
            await worker.staging.create(1, MIB, 0.2)
        assert len(worker.store) == 2
        worker.store.own(blocks[1])
        staged, fd = await worker.staging.create(1, MIB)
        os.close(fd)
        assert staged.volume.books.used == 2 * MIB


async def test_bytes_are_free_only_when_nobody_holds_them(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path, capacity=2 * MIB)) as worker:
        data = os.urandom(2 * MIB)
        block = await kit.put(worker, data)
        reader = (await worker.opener.open(block.address, (), 5.0)).fd
        with pytest.raises(NoSpace, match=r"2\.00 MiB held by readers.*raise the capacity"):
            await worker.staging.create(1, MIB, 0.3)
        assert worker.store.get(block.id) is None, "it was evicted all the same"
        waiting = asyncio.ensure_future(worker.staging.create(1, MIB))
        assert os.pread(reader, 2 * MIB, 0) == data
        os.close(reader)
        _, fd = await waiting
        os.close(fd)


async def test_a_disk_that_is_full_is_not_blamed_on_the_capacity(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path, capacity=64 * MIB), DiskWithFree(3 * MIB)) as worker:
        with pytest.raises(NoSpace, match=r"no room for 4\.00 MiB.* 3\.00 MiB free on the disk .*free some of") as full:
            await worker.staging.create(1, 4 * MIB, 0.2)
        assert "raise the capacity" not in full.value.message
        with pytest.raises(NoSpace, match=r"do not fit on any disk volume .*64\.0 MiB.*raise its capacity"):
            await worker.staging.create(1, 65 * MIB, 0.2)


class DiskWithFree(Disk):
    """A file system that gives only so much."""

    def __init__(self, free_bytes: int) -> None:
        self.free = free_bytes

    def free_bytes(self, path: str) -> int:
        return self.free


async def test_a_capacity_that_the_disk_never_gives_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = kit.settings(tmp_path, capacity=64 * MIB)
    async with kit.running(settings, DiskWithFree(64 * MIB)) as worker:
        await kit.put(worker, os.urandom(MIB))
    assert [r.getMessage() for r in caplog.records if "capacity" in r.getMessage()] == []
    async with kit.running(settings, DiskWithFree(3 * MIB)):
        pass
    (line,) = [r.getMessage() for r in caplog.records if "capacity" in r.getMessage()]
    assert "capacity is 64.0 MiB, but at most 4.00 MiB fit: 1.00 MiB used and 3.00 MiB free" in line


def test_a_floor_that_leaves_nothing_is_told() -> None:
    books = Books(64 * MIB, floor=2 * MIB)
    books.look(MIB, 0)
    assert "than the 2.00 MiB of free_floor: nothing fits" in books.doubt()
    books.look(66 * MIB, 0)
    assert books.doubt() == ""


async def test_bytes_written_beyond_the_reservation_count(worker: Worker) -> None:
    staged, fd = await worker.staging.create(1, 0)
    os.pwrite(fd, b"x" * MIB, 0)
    await worker.staging.look(staged.volume)
    assert staged.volume.books.staging == MIB
    os.close(fd)


async def test_a_reservation_grows_and_shrinks_to_what_is_written(patient: Worker) -> None:
    staged, fd = await patient.staging.create(1, 10)
    await patient.staging.reserve(staged, 2 * MIB)
    os.pwrite(fd, b"x" * MIB, 0)
    await patient.staging.reserve(staged, 5)
    assert staged.volume.books.staging == MIB
    os.ftruncate(fd, 0)
    await patient.staging.reserve(staged, 4)
    assert staged.volume.books.staging == 4 * KIB
    os.close(fd)
    await patient.staging.abort(staged)
    assert staged.volume.books.used == 0


async def test_a_reservation_may_evict_nothing(patient: Worker) -> None:
    blocks = [await kit.put(patient, os.urandom(MIB)) for _ in range(60)]
    staged, fd = await patient.staging.create(1, 0)
    os.close(fd)
    await patient.staging.reserve(staged, 4 * MIB, evict=False)
    with pytest.raises(NoSpace):
        await patient.staging.reserve(staged, 5 * MIB, evict=False)
    assert all([await kit.get(patient, block.address) for block in blocks])
    await patient.staging.reserve(staged, 5 * MIB)


async def test_reserves_of_one_file_at_a_time_count_once(patient: Worker) -> None:
    staged, fd = await patient.staging.create(1, 0)
    os.close(fd)
    await asyncio.gather(*(patient.staging.reserve(staged, size) for size in (2 * MIB, 3 * MIB, MIB, 3 * MIB)))
    assert staged.volume.books.staging == 3 * MIB


async def test_what_a_look_counted_meanwhile_is_counted_once(patient: Worker) -> None:
    staged, fd = await patient.staging.create(1, 0)
    full, other = await patient.staging.create(1, 63 * MIB)
    os.close(other)
    os.pwrite(fd, b"x" * MIB, 0)
    waiting = asyncio.create_task(patient.staging.reserve(staged, 2 * MIB))
    await asyncio.sleep(0.1)
    assert staged.counted == MIB, "looking for room, it saw what was written"
    await patient.staging.abort(full)
    await waiting
    assert staged.volume.books.staging == 2 * MIB
    os.close(fd)


async def test_a_file_that_outgrew_the_capacity_gets_no_more(patient: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient.growth, "look", _no_look)  # it would cut it
    monkeypatch.setattr(staging, "ROOM_WAIT_S", 0.2)
    staged, fd = await patient.staging.create(1, 0)
    full, other = await patient.staging.create(1, 63 * MIB)
    os.close(other)
    os.pwrite(fd, b"x" * (2 * MIB), 0)
    await patient.staging.look(staged.volume)
    assert staged.volume.books.used == 65 * MIB
    with pytest.raises(NoSpace):
        await patient.staging.reserve(staged, 2 * MIB)
    await patient.staging.abort(full)
    await patient.staging.reserve(staged, 2 * MIB)
    assert staged.volume.books.staging == 2 * MIB
    os.close(fd)


async def test_a_staging_file_that_was_emptied_frees_its_bytes_while_it_is_open(patient: Worker) -> None:
    staged, fd = await patient.staging.create(1, 4 * MIB)
    books = staged.volume.books
    os.pwrite(fd, b"x" * (4 * MIB), 0)
    os.ftruncate(fd, 0)
    await patient.staging.abort(staged)
    assert books.used == 0
    os.pwrite(fd, b"x" * MIB, 0)  # its writer goes on
    await patient.held.probe()
    assert books.held == MIB
    os.ftruncate(fd, 0)
    await patient.held.probe()
    assert books.held == 0
    os.close(fd)
    await patient.held.probe()
    assert books.used == 0


async def test_nothing_is_evicted_where_it_would_not_help(patient: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient.growth, "look", _no_look)  # it would cut it
    monkeypatch.setattr(staging, "ROOM_WAIT_S", 0.2)
    blocks = [await kit.put(patient, os.urandom(MIB)) for _ in range(8)]
    staged, fd = await patient.staging.create(1, 0)
    os.pwrite(fd, b"x" * (100 * MIB), 0)  # by passthrough nobody stops it
    await patient.staging.look(staged.volume)
    with pytest.raises(NoSpace):
        await patient.staging.create(2, MIB, 0.2)
    assert all([await kit.get(patient, block.address) for block in blocks])
    os.close(fd)
    await patient.staging.abort(staged)


async def test_who_waited_in_vain_waits_for_all(patient: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "ROOM_WAIT_S", 0.3)
    monkeypatch.setattr(room, "ROOM_WAIT_S", 0.3)
    monkeypatch.setattr(room, "HOPELESS_WAIT_S", 0.02)
    full, fd = await patient.staging.create(1, 64 * MIB)
    os.close(fd)
    files = [(await patient.staging.create(2, 0)) for _ in range(20)]
    start = patient.runtime.monotonic_s()
    for staged, other in files:
        os.close(other)
        with pytest.raises(NoSpace):
            await patient.staging.reserve(staged, MIB)
    assert patient.runtime.monotonic_s() - start < 3.0, "one wait, not twenty"
    await patient.staging.abort(full)
    await patient.staging.reserve(files[0][0], MIB)


async def test_what_never_fits_is_told_at_once(worker: Worker) -> None:
    with pytest.raises(NoSpace):
        await worker.staging.create(1, 65 * MIB)


class FailingDisk(Disk):
    """Fails the Nth call of the methods in `guarded`."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.failed = False

    def _tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.failed = True
            raise OSError(28, "No space left on device")

    def create(self, path: str) -> int:
        self._tick()
        return super().create(path)

    def rename(self, source: str, target: str) -> None:
        self._tick()
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._tick()
        super().unlink(path)

    def copy(self, source: int, target: int, length_bytes: int) -> int:
        self._tick()
        return super().copy(source, target, length_bytes)

    def read_into(self, fd: int, buffers: object, offset: int) -> int:
        self._tick()
        return super().read_into(fd, buffers, offset)  # type: ignore[arg-type]


async def test_any_failed_call_leaves_the_books_right(tmp_path: Path) -> None:
    """Fail the 1st, 2nd, 3rd … call until the work passes untouched."""
    for number in range(1, 50):
        root = tmp_path / str(number)
        root.mkdir()
        disk = FailingDisk(number)
        async with kit.running(kit.settings(root), disk) as worker:
            try:
                staged, fd = await worker.staging.create(1, 4)
                os.pwrite(fd, b"data", 0)
                copy = await worker.sealer.seal_copy(staged)
                os.close(fd)
                block = await worker.sealer.seal(staged, None)
                await worker.evictor.drop([copy])
                assert await kit.get(worker, block.address) == b"data"
            except KvError:
                assert disk.failed
            await kit.check_books(worker)
            assert worker.store.fences.count == len(worker.store)
        if not disk.failed:
            return
    pytest.fail("it never passed untouched")


@pytest.mark.allow_errors("out of service")
async def test_a_failed_drive_takes_its_volume_out_of_service(tmp_path: Path) -> None:
    class Broken(Disk):
        broken = False

        def create(self, path: str) -> int:
            if self.broken:
                raise OSError(5, "Input/output error")
            return super().create(path)

    disk = Broken()
    async with kit.running(kit.settings(tmp_path), disk) as worker:
        await kit.put(worker, b"data")
        assert len(worker.master_sync.beat().volumes) == 1
        disk.broken = True
        with pytest.raises(KvError):
            await worker.staging.create(1, 4)
        assert list(worker.master_sync.beat().volumes) == []
        assert len(worker.store) == 0


async def test_staging_of_a_session_that_came_back_survives_a_restart(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path)) as worker:
        staged = await kit.stage(worker, b"data", session=9)
    async with kit.running(kit.settings(tmp_path)) as worker:
        found = worker.staging.find(9, staged.handle)
        assert found.volume.books.staging == 4 * KIB
        block = await worker.sealer.seal(found, None)
        assert await kit.get(worker, block.address) == b"data"


async def test_staging_of_a_session_that_stays_away_goes_after_its_grace(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path)) as worker:
        await kit.stage(worker, b"data", session=9)
    async with kit.running(kit.settings(tmp_path)) as worker:
        now = worker.runtime.monotonic_s()
        await worker.staging.expire(worker.sessions, now)
        assert len(worker.staging) == 1
        await worker.staging.expire(worker.sessions, now + worker.settings.session_grace_s)
        assert kit.files(worker, "staging") == []
        assert worker.store.volumes[0].books.used == 0
