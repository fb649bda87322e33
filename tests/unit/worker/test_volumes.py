"""What happens to a volume, or to a file on it, behind the worker's back."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.core.errors import Corrupt, NotFound, Unavailable
from kvstore.worker.settings import VolumeSettings
from kvstore.worker.volumes import lease
from kvstore.worker.volumes.disk import Disk, NotAFile, disk_error
from kvstore.worker.volumes.held import unlink_watched
from kvstore.worker.volumes.identity import Identity
from kvstore.worker.volumes.volume import Volume, open_volume
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.child import in_child
from tests.support.worker_kit import MIB


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(kit.settings(tmp_path)) as worker:
        yield worker


def the_volume(worker: Worker) -> Volume:
    return worker.store.volumes[0]


# ---- directories that vanish


@pytest.mark.parametrize("part", ["blocks", "staging", "blocks staging quarantine"])
async def test_a_removed_directory_is_made_anew_and_writes_go_on(worker: Worker, part: str) -> None:
    old = await kit.put(worker, b"old")
    for name in part.split():
        shutil.rmtree(f"{the_volume(worker).path}/{name}")
    block = await kit.put(worker, b"data")
    assert await kit.get(worker, block.address) == b"data"
    if "blocks" in part:
        with pytest.raises(NotFound):
            await kit.get(worker, old.address)
    assert the_volume(worker).in_service
    await kit.check_books(worker)


async def test_a_directory_that_goes_between_stage_and_seal_is_made_anew(worker: Worker) -> None:
    staged = await kit.stage(worker, b"data")
    shutil.rmtree(f"{the_volume(worker).path}/blocks")
    block = await worker.sealer.seal(staged, None)
    assert await kit.get(worker, block.address) == b"data"


async def test_a_staging_file_that_vanished_is_no_miss(worker: Worker) -> None:
    """A client that is told "not found" gives up; one that is told "unavailable" writes it elsewhere."""
    staged = await kit.stage(worker, b"data")
    os.unlink(staged.path)
    with pytest.raises(Unavailable, match="No such file"):
        await worker.sealer.seal(staged, None)
    await worker.staging.abort(staged)
    assert the_volume(worker).books.used == 0


@pytest.mark.allow_errors("out of service")
async def test_a_removed_volume_fails_the_write_that_meets_it_and_is_not_listed_any_more(worker: Worker) -> None:
    await kit.put(worker, b"data")
    shutil.rmtree(the_volume(worker).path)
    with pytest.raises(Unavailable, match="the volume is gone"):
        await worker.staging.create(1, 4)
    assert list(worker.master_sync.beat().volumes) == []
    assert len(worker.store) == 0
    with pytest.raises(Unavailable, match="no volume of this worker is in service"):
        await worker.staging.create(1, 4)


@pytest.mark.allow_errors("out of service")
@pytest.mark.parametrize("what", ["removed", "swapped", "identity removed", "identity replaced", "lock replaced"])
async def test_upkeep_notices_that_a_volume_is_another(worker: Worker, tmp_path: Path, what: str) -> None:
    path = Path(the_volume(worker).path)
    match what:
        case "removed":
            shutil.rmtree(path)
        case "swapped":
            shutil.copytree(path, tmp_path / "other")
            path.rename(tmp_path / "away")
            (tmp_path / "other").rename(path)
        case "identity removed":
            (path / "identity").unlink()
        case _:
            name = what.partition(" ")[0]
            shutil.copy(path / name, path / f"{name}.copy")
            (path / f"{name}.copy").rename(path / name)
    await worker.staging.look(the_volume(worker))
    assert not the_volume(worker).in_service
    assert list(worker.master_sync.beat().volumes) == []


async def test_a_volume_that_writes_its_own_identity_stays(worker: Worker) -> None:
    volume = the_volume(worker)
    for sequence in range(3):
        volume.write_identity(Identity(volume.id, "c", sequence))
        volume.check()


def test_the_identity_of_another_volume_is_never_overwritten(tmp_path: Path) -> None:
    volume = open_volume(VolumeSettings("ssd", str(tmp_path / "v"), MIB, 0), 5, Disk())
    (tmp_path / "v").rename(tmp_path / "away")
    other = open_volume(VolumeSettings("ssd", str(tmp_path / "v"), MIB, 0), 6, Disk())
    with pytest.raises(OSError, match="another volume is there") as caught:
        volume.write_identity(Identity(5, "c", 1))
    assert caught.value.errno == errno.ENODEV
    other.check()
    other.close()
    volume.close()


def test_no_failed_call_is_a_miss() -> None:
    for number in errno.errorcode:
        assert not isinstance(disk_error(OSError(number, os.strerror(number)), "x"), NotFound)


# ---- files that change


def swap(a: str, b: str) -> None:
    os.rename(a, f"{a}.tmp")
    os.rename(b, a)
    os.rename(f"{a}.tmp", b)


@pytest.mark.allow_errors("is corrupt")
async def test_two_files_of_one_length_that_changed_places_are_not_served(worker: Worker) -> None:
    one, two = await kit.put(worker, b"one."), await kit.put(worker, b"two.")
    assert await kit.get(worker, one.address) == b"one."
    swap(one.path, two.path)
    for block in (one, two):
        assert worker.opener.open_now(block.address) is None
        with pytest.raises(Corrupt):
            await kit.get(worker, block.address)


@pytest.mark.allow_errors("is corrupt")
async def test_a_file_that_was_changed_in_place_is_not_served(worker: Worker) -> None:
    block = await kit.put(worker, os.urandom(MIB))
    os.close((await worker.opener.open(block.address, (), 5.0)).fd)
    before = os.stat(block.path)
    with open(block.path, "r+b") as file:
        file.seek(1000)
        file.write(b"X")
    os.utime(block.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert worker.opener.open_now(block.address) is None
    with pytest.raises(Corrupt):
        await kit.get(worker, block.address)


async def test_a_file_whose_bytes_are_the_same_is_verified_and_served_again(worker: Worker) -> None:
    block = await kit.put(worker, b"data")
    Path(f"{block.path}.copy").write_bytes(b"data")
    os.rename(f"{block.path}.copy", block.path)
    assert worker.opener.open_now(block.address) is None
    assert await kit.get(worker, block.address) == b"data"
    opened = worker.opener.open_now(block.address)
    assert opened is not None, "verified once, and good from then on"
    os.close(opened.fd)


async def test_what_was_sealed_is_good_without_reading(worker: Worker) -> None:
    blocks = [await kit.put(worker, b"sealed")]
    staged, fd = await worker.staging.create(1, 4)
    os.pwrite(fd, b"copy", 0)
    blocks.append(await worker.sealer.seal_copy(staged))
    os.close(fd)
    for block in blocks:
        opened = worker.opener.open_now(block.address)
        assert opened is not None
        os.close(opened.fd)


class Meddling(Disk):
    """Somebody writes to a staging file just before it is renamed."""

    def rename(self, source: str, target: str) -> None:
        if "/staging/" in source:
            with open(source, "r+b") as file:
                file.write(b"EVIL")
            state = os.stat(source)
            os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
        super().rename(source, target)


@pytest.mark.allow_errors("is corrupt")
async def test_a_file_that_changes_while_it_is_sealed_is_verified_at_its_first_use(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path), Meddling()) as worker:
        block = await kit.put(worker, b"data")
        assert block.stamp is None
        with pytest.raises(Corrupt):
            await kit.get(worker, block.address)


class Swapping(Disk):
    """Somebody puts a good copy in place of the file whenever it has been read."""

    def read_into(self, fd: int, buffers: object, offset: int) -> int:
        count = super().read_into(fd, buffers, offset)  # type: ignore[arg-type]
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "/blocks/" in path and os.path.exists(path):
            shutil.copy(path, f"{path}.copy")
            os.rename(f"{path}.copy", path)
        return count


async def test_only_the_file_that_was_verified_is_served(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path), Swapping()) as worker:
        block = await kit.put(worker, b"data")
        block.stamp = None
        with pytest.raises(Unavailable, match="changes while it is read"):
            await kit.get(worker, block.address)


@pytest.mark.allow_errors("is corrupt")
async def test_what_reads_as_something_else_is_verified_whatever_is_known_of_it(worker: Worker) -> None:
    staged, fd = await worker.staging.create(1, 4)
    os.pwrite(fd, b"data", 0)
    claim = kit.claim_of(fd, b"liar")
    os.close(fd)
    block = await worker.sealer.seal(staged, claim)
    with pytest.raises(Corrupt):
        await worker.opener.doubt(block.address)
    assert worker.store.get(block.id) is None
    assert len(kit.files(worker, "quarantine")) == 1
    await kit.check_books(worker)


# ---- no regular files


def put_there(path: str, what: str) -> None:
    match what:
        case "pipe":
            os.mkfifo(path)
        case "directory":
            os.mkdir(path)
        case "link":
            os.symlink("/dev/null", path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as sock:  # its address is at most 107 bytes
                at = os.getcwd()
                os.chdir(os.path.dirname(path))
                try:
                    sock.bind(os.path.basename(path))
                finally:
                    os.chdir(at)


KINDS = ["pipe", "directory", "link", "socket"]


@pytest.mark.parametrize("what", KINDS)
async def test_what_is_no_file_is_never_opened(tmp_path: Path, what: str) -> None:
    put_there(str(tmp_path / "x"), what)
    with pytest.raises(NotAFile):
        await asyncio.wait_for(asyncio.to_thread(Disk().open_read, str(tmp_path / "x")), 5.0)


@pytest.mark.allow_errors("is corrupt")
@pytest.mark.parametrize("what", KINDS)
async def test_what_lies_in_place_of_a_block_is_a_miss_and_goes_to_quarantine(worker: Worker, what: str) -> None:
    block = await kit.put(worker, b"data")
    os.unlink(block.path)
    put_there(block.path, what)
    with pytest.raises(Corrupt):
        await worker.opener.open(block.address, (), 5.0)
    assert os.listdir(f"{the_volume(worker).path}/quarantine") == [block.address.file_name]
    assert worker.store.get(block.id) is None
    assert the_volume(worker).in_service


async def test_directories_among_the_blocks_fail_no_volume(worker: Worker) -> None:
    for i in range(20):
        os.mkdir(f"{the_volume(worker).path}/blocks/00/stranger{i}")
    await worker.store.scan()
    assert the_volume(worker).in_service
    assert os.listdir(f"{the_volume(worker).path}/blocks/00") == []


@pytest.mark.parametrize("what", ["pipe", "link"])
async def test_what_lies_in_place_of_a_staging_file_is_not_sealed_and_goes(worker: Worker, what: str) -> None:
    staged = await kit.stage(worker, b"data")
    os.unlink(staged.path)
    put_there(staged.path, what)
    with pytest.raises(Unavailable, match="not a regular file"):
        await asyncio.wait_for(worker.sealer.seal(staged, None), 5.0)
    await worker.staging.abort(staged)
    assert not os.path.lexists(staged.path)
    assert the_volume(worker).books.used == 0


def test_a_pipe_is_unlinked_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    assert unlink_watched(Disk(), str(tmp_path / "x")) is None
    assert not (tmp_path / "x").exists()


def test_a_file_that_is_being_probed_is_waited_for(tmp_path: Path) -> None:
    """A lease makes an open with O_NONBLOCK fail: without waiting it would look like a block that cannot be read."""
    path = tmp_path / "f"
    path.write_bytes(b"data")
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    leased = os.open(path, os.O_RDONLY)
    opened: list[int] = []
    fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    with pytest.raises(BlockingIOError):
        os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    thread = threading.Thread(target=lambda: opened.append(Disk().open_read(str(path))))
    thread.start()
    fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    thread.join(10)
    assert os.pread(opened[0], 4, 0) == b"data"
    os.close(opened[0])
    os.close(leased)


def probe_beside_opens(path: Path) -> None:
    """Leases are taken and broken by turns, in a process that has said nothing of SIGIO, whose default is to kill."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    done = threading.Event()

    def open_again() -> None:
        while not done.is_set():
            with suppress(BlockingIOError):
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))

    thread = threading.Thread(target=open_again)
    thread.start()
    fd = os.open(path, os.O_RDONLY)
    found = [lease.holders(fd) for _ in range(20_000)]
    done.set()
    thread.join(10)
    assert {lease.Holders.NONE, lease.Holders.SOME} == set(found)


def test_an_open_while_a_file_is_probed_kills_nobody(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"data")
    in_child(probe_beside_opens, tmp_path / "f")


def test_an_fd_for_others_is_an_ordinary_one(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"data")
    fd = Disk().open_read(str(tmp_path / "f"))
    assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK
    os.close(fd)
