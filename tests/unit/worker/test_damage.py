"""Every kind of damage to a block, met in every way: never a wrong byte, the file in quarantine, the master told, one
line in the log, and a miss or another replica for whoever came.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar, Final

import pytest

from kvstore.client.local import AsyncLocalWorker
from kvstore.core.errors import Corrupt, KvError, NotFound
from kvstore.core.types import BlockId, Replica
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.entries import address_to_pb
from kvstore.rpc.link import AsyncLink
from kvstore.rpc.metadata import Caller
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.scrub import Limits, Scrubber
from kvstore.worker.reports import report
from kvstore.worker.settings import VolumeSettings, Watermarks
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.worker import Worker
from tests.support import fake_master
from tests.support import worker_kit as kit
from tests.support.accounting import stop_moves
from tests.support.fake_master import FakeMaster
from tests.support.worker_kit import MIB

LENGTH: Final = 2 * MIB + 17
pytestmark = pytest.mark.allow_errors("is corrupt")


# ---- the kinds of damage


def flip(path: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def swap(path: str, other: str) -> None:
    os.rename(path, f"{path}.tmp")
    os.rename(other, path)
    os.rename(f"{path}.tmp", other)


def overwrite(path: str, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(data)


def append(path: str, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def replace(path: str, make: Callable[[str], object]) -> None:
    os.unlink(path)
    make(path)


def sparse(path: str) -> None:
    Path(path).touch()
    os.truncate(path, LENGTH)


def bind(path: str) -> None:
    """The address of a socket has at most 107 bytes."""
    at = os.getcwd()
    os.chdir(os.path.dirname(path))
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(os.path.basename(path))
    finally:
        os.chdir(at)


Damage = Callable[[str, str], object]
"""To the file of a block, with the file of another one of the same length at hand."""
SILENT: Final[dict[str, Damage]] = {
    "first bit": lambda path, _: flip(path, 0),
    "bit in the middle": lambda path, _: flip(path, MIB + 7),
    "last bit": lambda path, _: flip(path, LENGTH - 1),
    "zeros": lambda path, _: overwrite(path, bytes(LENGTH)),
    "bytes of another block": lambda path, other: overwrite(path, Path(other).read_bytes()),
}
"""The file itself stays what it was: a disk that rots does no more."""
LOUD: Final[dict[str, Damage]] = {
    "torn": lambda path, _: os.truncate(path, MIB),
    "empty": lambda path, _: os.truncate(path, 0),
    "longer": lambda path, _: append(path, b"x"),
    "two files swapped": swap,
    "a hole": lambda path, _: replace(path, sparse),
    "pipe": lambda path, _: replace(path, os.mkfifo),
    "directory": lambda path, _: replace(path, os.mkdir),
    "link": lambda path, other: replace(path, lambda at: os.symlink(other, at)),
    "socket": lambda path, _: replace(path, bind),
    "not permitted": lambda path, _: Forbidding.forbid(path),
}
KINDS: Final = SILENT | LOUD


class Forbidding(Disk):
    """Root may read everything: what others are told is said here."""

    files: ClassVar[dict[int, int]] = {}
    """Inode → errno."""

    @classmethod
    def forbid(cls, path: str, number: int = errno.EACCES) -> None:
        cls.files[os.stat(path).st_ino] = number

    def open_read(self, path: str) -> int:
        if self.files and (number := self.files.get(os.lstat(path).st_ino)):
            raise OSError(number, os.strerror(number), path)
        return super().open_read(path)


# ---- the world


class World:
    """A worker with two tiers that is joined to a master, and two published blocks of one length in its slower one."""

    def __init__(self, root: Path, master: FakeMaster, stack: AsyncExitStack) -> None:
        self.root, self.master, self._stack = root, master, stack
        self._running = AsyncExitStack()
        self.worker: Worker
        self.block: Block
        self.other: Block
        self.data = os.urandom(LENGTH)

    async def start(self) -> None:
        volumes = [VolumeSettings(t, str(self.root / t), 32 * MIB, 0, Watermarks(0.95, 0.9)) for t in ("mem", "ssd")]
        settings = kit.settings(self.root, master=self.master.endpoint)
        settings = settings._replace(volumes=volumes, session_grace_s=60.0)
        self.worker = await self._running.enter_async_context(kit.running(settings, Forbidding(), joined=True))

    async def stop(self) -> None:
        await self._running.aclose()

    async def fill(self) -> None:
        both = self.block, self.other = [
            await kit.put(self.worker, data, owned=False) for data in (self.data, os.urandom(LENGTH))
        ]
        for block in both:
            self.master.publish(block.address)
        await kit.until(lambda: all(block.owned for block in both))

    async def another(self, node: str) -> Worker:
        """A worker without a master."""
        settings = kit.settings(self.root, node)
        return await self._stack.enter_async_context(kit.running(settings))

    @property
    def here(self) -> Replica:
        return at(self.worker)


def at(worker: Worker) -> Replica:
    volume = worker.store.volumes[-1]
    return Replica(volume.id, volume.tier, worker.settings.node, worker.endpoint)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(report, "REPORT_INTERVAL_S", 0.02)
    master = fake_master.make()
    Forbidding.files.clear()
    async with fake_master.running(master), AsyncExitStack() as stack:
        world = World(tmp_path, master, stack)
        await world.start()
        stack.push_async_callback(world.stop)
        await world.fill()
        yield world


# ---- the ways in which it is met


async def at_open(world: World) -> None:
    """By the file's times, or by what open says."""
    with pytest.raises(Corrupt):
        await kit.get(world.worker, world.block.address)


async def after_a_restart(world: World) -> None:
    """Resident, and never verified by this process."""
    await world.stop()
    await world.start()
    with pytest.raises(Corrupt):
        await kit.get(world.worker, world.block.address)


async def by_a_move(world: World) -> None:
    for _ in range(3):
        world.worker.store.touch(world.block, 1)
        await world.worker.mover.step()
    assert world.worker.store.get(world.block.id) is None
    assert kit.files(world.worker, "blocks") == kit.files(world.worker, "staging") == []  # of the target


async def by_the_scrubber(world: World) -> None:
    worker = world.worker
    await Scrubber(worker.store, worker.disk, worker.verifier, Limits(1e12, 1.0)).scrub(world.block)
    assert worker.counters.scrub_corruptions == 1


async def by_a_peer(world: World) -> None:
    peer = await world.another("b")
    with pytest.raises(Corrupt):
        await peer.opener.open(world.block.address, [world.here], 20.0)
    assert kit.files(peer, "blocks") == kit.files(peer, "staging") == []


async def by_frames(world: World) -> None:
    """As a client reads that has no local worker; it was verified before the first frame."""
    link = AsyncLink(world.worker.endpoint, Caller(session=7))
    with pytest.raises(Corrupt):
        await anext(link.read_frames(w.ReadRequest(address=address_to_pb(world.block.address)), 20))
    await link.close()


async def by_socket(world: World) -> None:
    client = AsyncLocalWorker(world.worker.settings.socket, 1)
    (result,) = await client.open([(world.block.address, ())])
    client.close()
    assert isinstance(result, Corrupt)


WAYS: Final[list[Callable[[World], Awaitable[None]]]] = [
    at_open, after_a_restart, by_a_move, by_the_scrubber, by_a_peer, by_frames, by_socket
]  # fmt: skip


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.ERROR) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level]


async def check_dealt_with(world: World, caplog: pytest.LogCaptureFixture) -> None:
    worker, block = world.worker, world.block
    volume = Path(worker.store.volumes[-1].path)
    assert [line for line in lines(caplog) if "is corrupt" in line] == lines(caplog)
    told = [line for line in lines(caplog, logging.WARNING) if block.address.file_name in line]
    assert len(told) == 1, told
    assert worker.counters.corruptions == 1
    assert os.listdir(volume / "quarantine") == [block.address.file_name]
    assert not os.path.lexists(block.path)
    assert volume.exists()
    assert worker.store.volumes[-1].in_service
    await world.master.until(lambda: block.id not in world.master.replicas)
    with pytest.raises(NotFound):
        await kit.get(worker, block.address)


Way = Callable[[World], Awaitable[None]]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", KINDS)
async def test_damage_is_never_served(world: World, kind: str, way: Way, caplog: pytest.LogCaptureFixture) -> None:
    KINDS[kind](world.block.path, world.other.path)
    await way(world)
    await check_dealt_with(world, caplog)


@pytest.mark.parametrize("way", [at_open, by_a_peer, by_frames, by_socket], ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", SILENT)
async def test_what_rots_on_the_disk_is_seen_when_it_comes_back_to_memory(
    world: World, kind: str, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    """The file's times say nothing: only its pages have left memory."""
    rot(world.block, kind, world.other)
    forget_pages(world.block.path)
    await way(world)
    await check_dealt_with(world, caplog)


def rot(block: Block, kind: str, other: Block) -> None:
    SILENT[kind](block.path, other.path)
    block.stamp = block.volume.disk.stat(block.path).stamp


def forget_pages(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("kind", SILENT)
async def test_memory_that_rots_is_seen_where_bytes_leave_the_node(
    world: World, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An open cannot see it: neither the times nor the pages tell. Whoever sends all of it, or receives it, does."""
    rot(world.block, kind, world.other)
    await by_a_peer(world)
    await check_dealt_with(world, caplog)


@pytest.mark.parametrize("kind", KINDS)
async def test_another_replica_takes_its_place(world: World, kind: str) -> None:
    await stop_moves(world.worker)  # what is being copied elsewhere may be whole
    peer = await world.another("b")
    await peer.opener.open(world.block.address, [world.here], 20.0)
    KINDS[kind](world.block.path, world.other.path)
    opened = await world.worker.opener.open(world.block.address, [at(peer)], 20.0)
    assert os.pread(opened.fd, LENGTH + 1, 0) == world.data
    os.close(opened.fd)
    assert world.worker.counters.corruptions == 1


# ---- drives and file systems that say so themselves


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EBADMSG, errno.ENODATA])
async def test_a_file_that_the_system_does_not_give_goes_alone(world: World, number: int) -> None:
    Forbidding.forbid(world.block.path, number)
    with pytest.raises(Corrupt, match="it cannot be read"):
        await kit.get(world.worker, world.block.address)
    assert world.worker.store.volumes[-1].in_service
    await kit.get(world.worker, world.other.address)


@pytest.mark.allow_errors("out of service")
async def test_a_drive_with_io_errors_goes_and_the_master_hears_of_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    Forbidding.forbid(world.block.path, errno.EIO)
    with pytest.raises(Corrupt):
        await kit.get(world.worker, world.block.address)
    ssd = world.worker.store.volumes[-1].id
    await world.master.until(lambda: "a" in world.master.beats and ssd not in listed(world.master))
    assert len(lines(caplog)) == 1


def listed(master: FakeMaster) -> set[int]:
    """Volumes of the last heartbeat."""
    return {volume.id for volume in master.beats["a"].volumes}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
async def test_a_worker_that_is_short_of_something_takes_no_block_for_damaged(world: World, number: int) -> None:
    Forbidding.forbid(world.block.path, number)
    with pytest.raises(KvError) as caught:
        await kit.get(world.worker, world.block.address)
    assert not isinstance(caught.value, Corrupt)
    Forbidding.files.clear()
    assert await kit.get(world.worker, world.block.address) == world.data


# ---- what the master believes and is not so


async def test_a_worker_that_is_asked_for_what_it_lacks_says_so(world: World) -> None:
    """Rule 15: readers repair the map. Nothing has happened here since the last report but that somebody asked."""
    lost = world.block.address._replace(block=BlockId(9, 9))
    world.master.replicas[lost.block] = {world.here.volume}
    with pytest.raises(NotFound):
        await kit.get(world.worker, lost)
    await world.master.until(lambda: lost.block not in world.master.replicas)
