"""Names noted beside blocks, and sent to a master that has lost them (rule 22)."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvstore.core.errors import Corrupt
from kvstore.core.types import BlockId
from kvstore.pb import master_pb2 as m
from kvstore.worker.blocks.block import Block
from kvstore.worker.reports import names as worker_names
from kvstore.worker.reports import note as notes
from kvstore.worker.reports import recover
from kvstore.worker.reports.note import Note
from kvstore.worker.settings import Settings, VolumeSettings
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.fake_master import FakeMaster, make, running, split
from tests.support.worker_kit import MIB


@pytest.fixture
async def master() -> AsyncIterator[FakeMaster]:
    fake = make()
    fake.incarnation = 11
    async with running(fake):
        yield fake


class FullDisk(Disk):
    """Attributes cannot be written, for the reason `broken`; `meddler`: somebody writes to the file meanwhile."""

    broken = 0
    meddler = False
    before_read: Callable[[str], None] | None = None
    """Called once, before the next attribute is read."""

    def attribute(self, path: str, name: str) -> bytes | None:
        hook, self.before_read = self.before_read, None
        if hook:
            hook(path)
        return super().attribute(path, name)

    def set_attribute(self, path: str, name: str, value: bytes) -> None:
        if self.broken:
            raise OSError(self.broken, os.strerror(self.broken), path)
        if self.meddler:
            with open(path, "r+b") as file:
                file.write(b"X")
        super().set_attribute(path, name, value)


@pytest.fixture
def disk() -> FullDisk:
    return FullDisk()


def settings(root: Path, master: FakeMaster) -> Settings:
    tiers = ("mem", 8 * MIB), ("ssd", 32 * MIB)
    volumes = [VolumeSettings(tier, str(root / tier), size, 0) for tier, size in tiers]
    return kit.settings(root, master=master.endpoint)._replace(volumes=volumes, session_grace_s=60.0)


@pytest.fixture
async def worker(master: FakeMaster, tmp_path: Path, disk: FullDisk) -> AsyncIterator[Worker]:
    async with kit.running(settings(tmp_path, master), disk, joined=True) as worker:
        yield worker


async def put(worker: Worker, master: FakeMaster, path: str, data: bytes = b"data") -> Block:
    block = await kit.put(worker, data, owned=False)
    master.names[block.id] = path
    master.publish(block.address)
    return block


def note_of(block: Block) -> Note | None:
    return notes.decode(Disk().attribute(block.path, notes.ATTRIBUTE), block.address)


def path_of(block: Block) -> str:
    note = note_of(block)
    return note.path if note else ""


# ---- notes are written ----


async def test_a_published_block_gets_its_name_with_the_verdict(worker: Worker, master: FakeMaster) -> None:
    master.sequence = 77
    block = await put(worker, master, "a/b", os.urandom(MIB))
    await kit.until(lambda: block.noted)
    note = note_of(block)
    assert note is not None
    assert (note.path, note.mode, note.uid, note.gid, note.mtime_ns, note.ctime_ns) == ("a/b", 0o640, 1, 2, 3, 4)
    assert (note.incarnation, note.sequence) == (11, 77)
    assert master.asked.count(block.id) <= len(master.reports), "asked for with reports that are sent anyway"


async def test_a_note_does_not_make_a_block_be_hashed_again(worker: Worker, master: FakeMaster) -> None:
    block = await put(worker, master, "a", os.urandom(MIB))
    before = block.stamp
    await kit.until(lambda: block.noted)
    assert before is not None
    assert block.stamp == Disk().stat(block.path).stamp != before


@pytest.mark.allow_errors("is corrupt")
async def test_what_was_written_beside_the_note_is_hashed_again(
    worker: Worker, master: FakeMaster, disk: FullDisk
) -> None:
    disk.meddler = True
    block = await put(worker, master, "a", b"data" * 1000)
    before = block.stamp
    await kit.until(lambda: block.noted)
    assert block.stamp == before != Disk().stat(block.path).stamp
    with pytest.raises(Corrupt):
        await kit.get(worker, block.address)


async def test_a_block_that_nobody_owns_has_no_name(worker: Worker, master: FakeMaster) -> None:
    block = await kit.put(worker, b"data", owned=False)
    await master.until(lambda: master.asked.count(block.id) >= 2)
    assert note_of(block) is None
    master.names[block.id] = "late"
    master.publish(block.address)
    await kit.until(lambda: path_of(block) == "late")


async def test_a_renamed_file_gets_a_new_note(worker: Worker, master: FakeMaster) -> None:
    block = await put(worker, master, "old")
    await kit.until(lambda: block.noted)
    master.names[block.id] = "new"
    master.commands.append(m.Command(report_again=m.ReportAgain(block_ids=block.id.pack())))
    await kit.until(lambda: path_of(block) == "new")


async def test_names_are_asked_for_once_more_after_each_registration(
    worker: Worker, master: FakeMaster, tmp_path: Path
) -> None:
    block = await put(worker, master, "old")
    await kit.until(lambda: block.noted)
    master.names[block.id] = "renamed while nobody told us"
    master.incarnation = 12  # the master was started again, and has forgotten whom to tell
    await kit.until(lambda: path_of(block) == "renamed while nobody told us")


async def test_a_note_moves_along_between_tiers(worker: Worker, master: FakeMaster) -> None:
    block = await put(worker, master, "a", os.urandom(MIB))
    await kit.until(lambda: block.noted)
    master.names.clear()  # it can come from nowhere else
    os.close((await worker.opener.open(block.address, (), 5.0)).fd)
    await kit.until(lambda: block.volume.tier == "mem" and not block.moving)
    assert path_of(block) == "a"
    assert await worker.mover.demote(block.volume, MIB) == MIB
    assert (block.volume.tier, path_of(block)) == ("ssd", "a")
    assert block.stamp == Disk().stat(block.path).stamp, "still verified"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.E2BIG, errno.EDQUOT])
async def test_where_there_is_no_room_for_a_note_nobody_fails(
    worker: Worker, master: FakeMaster, disk: FullDisk, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk.broken = number
    for i in range(3):
        await put(worker, master, f"a{i}", os.urandom(10 + i))
    await kit.until(lambda: worker.names.failed["no_room"] >= 3)
    assert len([line for line in caplog.messages if "names cannot be noted" in line]) == 1
    assert worker.store.in_service == worker.store.volumes
    disk.broken = 0
    block = await put(worker, master, "b")
    await kit.until(lambda: block.noted)


async def test_a_file_system_without_attributes_is_not_asked_again(
    worker: Worker, master: FakeMaster, disk: FullDisk
) -> None:
    disk.broken = errno.ENOTSUP
    await put(worker, master, "a")
    await kit.until(lambda: worker.names.failed["unsupported"] == 1)
    block = await put(worker, master, "b")
    await master.until(lambda: block.owned)
    assert block.id not in worker.names.take([block.id])


async def test_one_file_that_refuses_its_name_keeps_nobody_elses(
    worker: Worker, master: FakeMaster, disk: FullDisk
) -> None:
    """As ``chattr +i`` does."""
    disk.broken = errno.EPERM
    await put(worker, master, "a")
    await kit.until(lambda: worker.names.failed["error"] == 1)
    disk.broken = 0
    block = await put(worker, master, "b", b"more")
    await kit.until(lambda: block.noted)
    assert path_of(block) == "b"
    assert worker.names.failed["unsupported"] == 0


async def test_a_real_file_system_that_has_no_room_for_a_long_name(worker: Worker, master: FakeMaster) -> None:
    long = await put(worker, master, "/".join(["x" * 250] * 300))
    short = await put(worker, master, "short", b"more")
    await kit.until(lambda: short.noted and worker.names.failed.total() > 0)
    assert note_of(long) is None


def test_what_one_report_asks_for_is_bounded(tmp_path: Path) -> None:
    """With the longest paths the reply stays far below the limit of a message."""
    assert (worker_names.MAX_NAMES + worker_names.MAX_SWEPT) * (4096 + 100) < 16 * MIB / 4


async def test_all_blocks_have_their_turn(worker: Worker, master: FakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_names, "MAX_NAMES", 4)
    monkeypatch.setattr(worker_names, "MAX_SWEPT", 3)
    blocks = [await put(worker, master, f"a{i}", os.urandom(10 + i)) for i in range(11)]
    await kit.until(lambda: all(block.noted for block in blocks), 20)
    for block in blocks:
        master.names[block.id] += " renamed"
    worker.names.want_all()
    await kit.until(lambda: all("renamed" in path_of(block) for block in blocks), 20)


@pytest.mark.allow_errors("lost state")
async def test_a_master_that_lost_state_does_not_get_at_notes_of_what_it_lacks(
    worker: Worker, master: FakeMaster
) -> None:
    block = await put(worker, master, "renamed later")
    await kit.until(lambda: block.noted)
    master.incarnation, master.rolled_back = 12, True
    master.names[block.id] = "as it was before"
    await master.until(lambda: len(master.registrations) == 2)
    new = await put(worker, master, "new", b"of its own history")
    await kit.until(lambda: new.noted)
    master.asked.clear()
    await master.until(lambda: block.id in master.asked or block.noted)
    worker.names.want(block.id)
    await kit.until(lambda: block.noted)
    assert path_of(block) == "renamed later"
    assert path_of(new) == "new"
    master.names[new.id] = "newer"
    worker.names.want(new.id)
    await kit.until(lambda: path_of(new) == "newer")

    master.incarnation, master.rolled_back, master.recovers = 13, False, True
    await kit.until(lambda: path_of(block) == "as it was before")
    assert worker.membership.collects, "an operator has made it whole"
    await kit.until(lambda: not worker.store.volumes[0].identity.rolled_back)


# ---- notes are sent ----


async def ask(master: FakeMaster) -> dict[BlockId, m.NotedBlock]:
    """What a worker sends, by block; to the last page."""
    master.recovered.clear()
    master.commands.append(m.Command(send_names=m.SendNames()))
    await master.until(lambda: bool(master.recovered) and master.recovered[-1].last)
    rows = [row for page in master.recovered for row in page.blocks]
    return {BlockId(row.address.boot, row.address.counter): row for row in rows}


async def test_a_master_that_asks_gets_all_names(
    worker: Worker, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recover, "PAGE_BLOCKS", 2)
    blocks = [await put(worker, master, f"a{i}", os.urandom(10 + i)) for i in range(5)]
    await kit.until(lambda: all(block.noted for block in blocks))
    bare = await kit.put(worker, b"nobody's", owned=False)
    swapped = Disk().attribute(blocks[0].path, notes.ATTRIBUTE) or b""
    Disk().set_attribute(blocks[4].path, notes.ATTRIBUTE, swapped)
    rows = await ask(master)
    assert rows.keys() == {block.id for block in (*blocks, bare)}
    assert [rows[block.id].name.path for block in blocks] == ["a0", "a1", "a2", "a3", ""]
    assert not rows[bare.id].HasField("name")
    assert not rows[blocks[4].id].HasField("name"), "the note of another block is none"
    first = rows[blocks[0].id]
    assert (first.noted.incarnation, first.noted.sequence, first.name.mode) == (11, 1, 0o640)
    assert first.volume == blocks[0].volume.id
    assert len(master.recovered) == 4, "three pages, and the word that this was all"


async def test_a_block_that_moves_meanwhile_is_told_of_with_its_name(
    worker: Worker, master: FakeMaster, disk: FullDisk
) -> None:
    block = await put(worker, master, "a")
    await kit.until(lambda: block.noted)

    def move(path: str) -> None:
        block.volume = next(volume for volume in worker.store.volumes if volume is not block.volume)
        os.makedirs(os.path.dirname(block.path), exist_ok=True)
        os.rename(path, block.path)

    disk.before_read = move
    assert (await ask(master))[block.id].name.path == "a"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
async def test_a_worker_that_is_short_of_something_forgets_no_name(
    worker: Worker, master: FakeMaster, disk: FullDisk, number: int
) -> None:
    block = await put(worker, master, "a")
    await kit.until(lambda: block.noted)

    def fail(path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    disk.before_read = fail
    master.commands.append(m.Command(send_names=m.SendNames()))
    await kit.until(lambda: disk.before_read is None)
    assert (await ask(master))[block.id].name.path == "a"
    assert all(row.HasField("name") for page in master.recovered for row in page.blocks)


async def test_a_master_that_wants_no_more_is_sent_no_more(
    worker: Worker, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recover, "PAGE_BLOCKS", 1)
    for i in range(5):
        await put(worker, master, f"a{i}", os.urandom(10 + i))
    master.wants_names = False
    master.commands.append(m.Command(send_names=m.SendNames()))
    await master.until(lambda: len(master.recovered) == 1)
    master.wants_names = True
    assert len(await ask(master)) == 5
    assert len(master.recovered) == 6


async def test_a_registration_says_which_ids_may_have_been_published(worker: Worker, master: FakeMaster) -> None:
    block = await put(worker, master, "a")
    master.incarnation = 12
    await master.until(lambda: len(master.registrations) == 2)
    assert [r.minted for r in master.registrations] == [block.id.counter, block.id.counter + 1]
    assert split(block.id.pack()) == [block.id]
