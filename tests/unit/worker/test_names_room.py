"""Names beside blocks take room: it is in the books before they are written, and what they took ever after."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core import mover as core
from kvstore.core.errors import Corrupt
from kvstore.core.types import BlockId
from kvstore.pb import master_pb2 as m
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.reports import names as worker_names
from kvstore.worker.reports import note as notes
from kvstore.worker.settings import Settings, VolumeSettings, Watermarks
from kvstore.worker.volumes.disk import Disk, FileState, disk_bytes
from kvstore.worker.volumes.volume import Volume, extra_bytes
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.accounting import check_exact, files_below, stop_moves, used_on_disk
from tests.support.worker_kit import KIB, MIB

LONG = "/".join(["a directory of some length"] * 20)
"""It does not fit into an inode of ext4: the attribute takes a page."""
SHORT = "a"


def two_tiers(root: Path, *, mem: int = 4 * MIB, ssd: int = 16 * MIB) -> Settings:
    """Both on the same disk, and nothing sinks before a volume is full."""
    marks, tiers = Watermarks(1.0, 0.9), (("mem", mem), ("ssd", ssd))
    volumes = [VolumeSettings(tier, str(root / tier), size, 0, marks) for tier, size in tiers]
    return kit.settings(root)._replace(volumes=volumes, session_grace_s=60.0)


class Watching(Disk):
    """No cap is passed when a name was written. `before_write` is called once, in the thread that writes the next."""

    volumes: list[Volume]
    before_write: Callable[[str], None] | None = None
    passed = ""

    def set_attribute(self, path: str, name: str, value: bytes) -> None:
        hook, self.before_write = self.before_write, None
        if hook:
            hook(path)
        super().set_attribute(path, name, value)
        for volume in self.volumes:
            if used_on_disk(volume) > volume.books.capacity:
                self.passed = volume.path


@pytest.fixture
def disk() -> Watching:
    return Watching()


@pytest.fixture
async def worker(tmp_path: Path, disk: Watching) -> AsyncIterator[Worker]:
    async with kit.running(two_tiers(tmp_path), disk) as worker:
        disk.volumes = worker.store.volumes
        await stop_moves(worker)
        yield worker
        await check_exact(worker)
        assert disk.passed == ""


def named(worker: Worker, *blocks: Block, path: str = LONG) -> None:
    """A master has answered a report with the names of these."""
    reply = m.ReportReply(incarnation=1, names_sequence=1)
    for index, block in enumerate(blocks):
        reply.names.add(index=index, path=f"{path}-{block.id}", mode=0o640)
    worker.names.on_reply([block.id for block in blocks], reply)


async def note(worker: Worker, *blocks: Block, path: str = LONG) -> None:
    """Their names are written, or could not be."""
    named(worker, *blocks, path=path)
    await asyncio.sleep(0)
    async with worker.names._turn:
        pass


def truth(block: Block) -> int:
    return extra_bytes(block.address, Disk().stat(block.path))


def worker_move(block: Block, target: Volume) -> core.Move[BlockId]:
    return core.Move(block.id, block.used_bytes, block.volume.id, target.id)


def path_of(block: Block) -> str:
    stored = notes.decode(Disk().attribute(block.path, notes.ATTRIBUTE), block.address)
    return stored.path if stored else ""


async def fill(worker: Worker, *, owned: bool = True) -> list[Block]:
    """The ssd, to the last page."""
    (ssd,) = (volume for volume in worker.store.volumes if volume.tier == "ssd")
    return [await kit.put(worker, os.urandom(MIB), owned=owned) for _ in range(ssd.books.free // MIB)]


# ---- what a name takes


async def test_what_a_name_takes_is_in_the_books_until_its_block_is_unlinked(worker: Worker) -> None:
    block = await kit.put(worker, os.urandom(9 * KIB))
    books = block.volume.books
    await note(worker, block)
    assert block.noted
    assert block.extra_bytes == truth(block) == worker.counters.extra_bytes
    assert books.blocks == disk_bytes(9 * KIB) + block.extra_bytes
    assert books.staging == books.naming == 0
    freed = await worker.evictor.evict([block], Reason.CAPACITY)
    assert freed == worker.counters.evicted_bytes == disk_bytes(9 * KIB) + block.extra_bytes
    assert books.used == 0


async def test_another_name_takes_what_it_takes(worker: Worker) -> None:
    block = await kit.put(worker, b"data")
    for path in (SHORT, LONG, SHORT, LONG * 2):
        await note(worker, block, path=path)
        assert path_of(block).startswith(path)
        assert block.extra_bytes == truth(block) == worker.counters.extra_bytes
        await check_exact(worker)


async def test_a_name_that_stands_there_already_takes_no_room(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    block = await kit.put(worker, b"data")
    await note(worker, block)

    async def grow(*_: object) -> None:
        raise AssertionError("nothing is written")

    monkeypatch.setattr(worker.room, "grow", grow)
    await note(worker, block)
    assert worker.names.noted == 2


async def test_what_was_there_at_the_start_is_measured(tmp_path: Path) -> None:
    async with kit.running(two_tiers(tmp_path)) as worker:
        blocks = [await kit.put(worker, os.urandom(5 * KIB)) for _ in range(3)]
        await note(worker, *blocks[:2])
        before = worker.store.volumes[-1].books.blocks
    async with kit.running(two_tiers(tmp_path)) as again:
        assert again.store.volumes[-1].books.blocks == before
        assert [again.store._blocks[b.id].extra_bytes for b in blocks] == [b.extra_bytes for b in blocks]
        await check_exact(again)


# ---- room for it


async def test_a_full_volume_makes_room_for_names_before_they_are_written(worker: Worker) -> None:
    blocks = await fill(worker)
    await note(worker, *blocks)
    left = [block for block in blocks if worker.store.get(block.id) is block]
    assert 0 < len(blocks) - len(left) <= 1, "one block makes room for all names"
    assert all(path_of(block) for block in left)
    assert worker.names.failed.total() == 0


async def test_without_room_a_volume_is_left_alone_for_a_while(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_names, "ROOM_WAIT_S", 0.05)
    monkeypatch.setattr(worker_names, "PAUSE_S", 0.3)
    blocks = await fill(worker, owned=False)  # none of them may go
    ids = [block.id for block in blocks]
    await note(worker, *blocks)
    assert worker.names.failed == {"no_room": len(blocks), "unsupported": 0, "error": 0}
    assert worker.names.take(ids) == [], "not with every report"
    for block in blocks:
        worker.store.own(block)
    await kit.until(lambda: worker.names.take([]) == ids)
    await note(worker, *blocks)
    assert sum(block.noted for block in worker.store.all()) == len(blocks) - 1


async def test_names_that_wait_behind_one_without_room_do_not_wait_as_well(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_names, "ROOM_WAIT_S", 0.2)
    monkeypatch.setattr(worker_names, "PORTION", 1)
    blocks = await fill(worker, owned=False)
    start_s = worker.runtime.monotonic_s()
    await note(worker, *blocks)
    assert worker.runtime.monotonic_s() - start_s < 0.2 * len(blocks) / 2


async def test_names_that_are_being_written_are_no_free_room_of_the_disk(worker: Worker) -> None:
    books = worker.store.volumes[-1].books
    books.take(MIB)
    books.begin_naming(MIB)
    books.look(10 * MIB, 0)
    assert books.slack == 9 * MIB
    books.end_naming(MIB, 4 * KIB)
    assert (books.slack, books.staging, books.blocks) == (10 * MIB - 4 * KIB, 0, 4 * KIB)
    books.free_block(4 * KIB)


# ---- moves and names


async def test_a_move_takes_the_name_along_and_leaves_nothing(worker: Worker, disk: Watching) -> None:
    mem, ssd = worker.store.volumes
    block = await kit.put(worker, os.urandom(MIB))
    await note(worker, block)
    for source, target in ((ssd, mem), (mem, ssd)):
        room: list[int] = []
        disk.before_write = lambda path, books=target.books, room=room: room.append(books.staging)
        await move(worker, block, target)
        assert room == [MIB + 4 * KIB], "for its name as well"
        assert path_of(block).startswith(LONG)
        assert block.extra_bytes == truth(block) == worker.counters.extra_bytes
        assert source.books.used == 0
        await check_exact(worker)


async def move(worker: Worker, block: Block, target: Volume) -> None:
    await worker.mover._move(worker_move(block, target), is_awaited=True)
    assert block.volume is target


async def test_where_only_the_block_fits_it_moves_without_its_name(worker: Worker) -> None:
    mem = worker.store.volumes[0]
    block = await kit.put(worker, os.urandom(MIB))
    await note(worker, block)
    mem.books.take(mem.books.free - MIB)
    await worker.mover._move(worker_move(block, mem), is_awaited=True)
    assert (block.volume, block.extra_bytes, path_of(block), mem.books.free) == (mem, 0, "", 0)
    assert worker.names.take([block.id]) == [block.id], "it is asked for again"
    mem.books.give_back(mem.books.staging)


async def test_a_name_that_cannot_be_carried_is_asked_for_again(
    worker: Worker, disk: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = await kit.put(worker, os.urandom(MIB))
    await note(worker, block)

    def fail(path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    disk.before_write = fail
    await worker.mover._move(worker_move(block, worker.store.volumes[0]), is_awaited=True)
    assert (block.volume.tier, path_of(block)) == ("mem", "")
    assert worker.counters.extra_bytes == 0
    assert worker.names.take([block.id]) == [block.id]


@pytest.mark.allow_errors("out of service")
@pytest.mark.parametrize("where", ["beside a block", "beside a copy"])
async def test_a_drive_that_fails_when_a_name_was_written_goes_out_of_service(
    worker: Worker, disk: Watching, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nobody knows what the name takes there."""
    mem, ssd = worker.store.volumes
    block = await kit.put(worker, os.urandom(MIB))
    if where == "beside a copy":
        await note(worker, block)

    def fail_next_stat(noted: str) -> None:
        def stat(path: str) -> FileState:
            if path == noted:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return Disk().stat(path)

        monkeypatch.setattr(disk, "stat", stat)

    disk.before_write = fail_next_stat
    if where == "beside a copy":
        await worker.mover._move(worker_move(block, mem), is_awaited=True)
        assert worker.store.in_service == [ssd]
        assert (block.volume, truth(block)) == (ssd, block.extra_bytes)
        assert not any(files_below(f"{mem.path}/staging"))
    else:
        await note(worker, block)
        assert worker.store.in_service == [mem]
        os.unlink(block.path)
        ssd.books.free_block(block.used_bytes)


async def test_a_name_that_comes_while_its_block_moves_is_asked_for_again(worker: Worker, disk: Watching) -> None:
    block = await kit.put(worker, os.urandom(MIB))
    moves: list[asyncio.Task[int]] = []
    loop = asyncio.get_running_loop()

    async def start_move() -> None:
        moves.append(loop.create_task(worker.mover._move(worker_move(block, worker.store.volumes[0]), is_awaited=True)))
        await kit.until(lambda: block.moving)

    disk.before_write = lambda path: asyncio.run_coroutine_threadsafe(start_move(), loop).result(10.0)
    await note(worker, block)
    await moves[0]
    assert block.volume.tier == "mem"
    assert worker.names.take([]) == [block.id]
    assert not block.noted
    before, block.moving = path_of(block), True
    await note(worker, block, path="another")
    block.moving = False
    assert (path_of(block), worker.names.take([])) == (before, [block.id]), "nothing was written meanwhile"


# ---- whatever happens

SIZES = (4 * KIB, 12 * KIB, 300 * KIB, MIB)
"""Whole pages: what came and what lies there are the same bytes."""
Step = tuple[str, int]
STEPS = st.tuples(
    st.sampled_from(["put", "name", "name", "rename", "move", "move", "evict", "damage", "hold", "let go", "restart"]),
    st.integers(0, 1000),
)


class Course:
    """A worker's life in steps; `number` chooses whom each one concerns."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.held: list[int] = []
        self.before = self.used

    @property
    def used(self) -> int:
        return sum(volume.books.used for volume in self.worker.store.volumes)

    async def step(self, what: str, number: int) -> None:
        blocks = sorted(self.worker.store.all(), key=lambda block: block.id)
        if what == "put" or not blocks:
            await kit.put(self.worker, os.urandom(SIZES[number % len(SIZES)]), session=1 + number)
            return
        block = blocks[number % len(blocks)]
        match what:
            case "name":
                await note(self.worker, *blocks[:: 1 + number % 3])
            case "rename":
                await note(self.worker, block, path=(SHORT, LONG, "else" + LONG)[number % 3])
            case "move":
                target = next(volume for volume in self.worker.store.volumes if volume is not block.volume)
                await self.worker.mover._move(worker_move(block, target), is_awaited=True)
            case "evict":
                await self.worker.evictor.evict([block], Reason.CAPACITY)
            case "damage":
                await self.damage(block)
            case "hold":
                self.held.append((await self.worker.opener.open(block.address, (), 5.0)).fd)
            case "let go":
                self.let_go()

    async def damage(self, block: Block) -> None:
        with open(block.path, "r+b") as file:
            file.write(b"damaged")
        with pytest.raises(Corrupt):
            await self.worker.verifier.verify(block)

    def let_go(self) -> None:
        while self.held:
            os.close(self.held.pop())

    async def check(self) -> None:
        """Of each byte that came it is known where it is."""
        worker, counters = self.worker, self.worker.counters
        for volume in worker.store.volumes:
            assert used_on_disk(volume) + volume.books.held == volume.books.used <= volume.books.capacity
        for block in worker.store.all():
            assert block.extra_bytes == truth(block)
        gone = sum(count.bytes for tier in counters.tiers.values() for count in tier.unlinked.values())
        held = sum(volume.books.held for volume in worker.store.volumes)
        assert self.before + counters.written_bytes + counters.extra_bytes - gone == self.used - held
        assert worker.names.failed["error"] == worker.names.failed["unsupported"] == 0


async def live(root: Path, steps: list[Step]) -> None:
    left = list(steps)
    while left:
        async with kit.running(two_tiers(root, mem=4 * MIB, ssd=4 * MIB)) as worker:
            await stop_moves(worker)
            for block in worker.store.all():
                worker.store.own(block)
            course = Course(worker)
            try:
                while left and (step := left.pop(0))[0] != "restart":
                    await course.step(*step)
                    await course.check()
            finally:
                course.let_go()
            await check_exact(worker)


@pytest.mark.allow_errors("is corrupt")
@settings(max_examples=25, deadline=None)
@given(steps=st.lists(STEPS, min_size=5, max_size=40))
def test_books_and_disk_agree_whatever_happens(tmp_path_factory: pytest.TempPathFactory, steps: list[Step]) -> None:
    asyncio.run(live(tmp_path_factory.mktemp("life"), steps))
