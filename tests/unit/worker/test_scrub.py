"""The scrubber: damage is found before anybody comes for the block, and nobody notices that it looks."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvstore.config import WorkerConfig
from kvstore.core.errors import NotFound
from kvstore.core.types import BlockId
from kvstore.pagecache import _absent, absent_runs, pages_in_core
from kvstore.worker.blocks import scrub
from kvstore.worker.blocks.scrub import Limits, Round, Scrubber
from kvstore.worker.main import settings_of
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.worker_kit import MIB

FAST = 1e12
DAY_S = 86_400.0


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    """Its own scrubber is off: the tests have one each."""
    async with kit.running(kit.settings(tmp_path)) as worker:
        yield worker
        await kit.check_books(worker)


@asynccontextmanager
async def scrubbing(root: Path, disk: Disk | None = None, interval_s: float = DAY_S) -> AsyncIterator[Worker]:
    settings = kit.settings(root)._replace(scrub_bytes_per_s=FAST, scrub_interval_s=interval_s)
    async with kit.running(settings, disk) as worker:
        yield worker


def scrubber(worker: Worker, bytes_per_s: float = FAST, interval_s: float = DAY_S) -> Scrubber:
    return Scrubber(worker.store, worker.disk, worker.verifier, Limits(bytes_per_s, interval_s))


def flip(path: str, at: int) -> None:
    """One bit, and the times as they were."""
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def forget_pages(path: str, offset: int = 0, size: int = 0) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)


def pages(path: str) -> list[bool]:
    with open(path, "rb") as file:
        return pages_in_core(file.fileno(), 0, os.path.getsize(path))


# ---- what it finds


@pytest.mark.allow_errors("is corrupt: its bytes differ")
@pytest.mark.parametrize("at", [0, MIB + 5, 3 * MIB + 16], ids=["first piece", "middle piece", "last piece"])
async def test_a_flipped_bit_is_found_before_anybody_comes(worker: Worker, at: int) -> None:
    good, bad = await kit.put(worker, os.urandom(MIB)), await kit.put(worker, os.urandom(3 * MIB + 17))
    flip(bad.path, at)
    for block in (good, bad):
        await scrubber(worker).scrub(block)
    counters = worker.counters
    assert (counters.scrubbed_blocks, counters.scrub_corruptions, counters.corruptions) == (1, 1, 1)
    assert counters.scrubbed_bytes == MIB + 3 * MIB + 17
    assert [p.name for p in kit.files(worker, "quarantine")] == [bad.address.file_name]
    with pytest.raises(NotFound):
        await kit.get(worker, bad.address)


@pytest.mark.allow_errors("is corrupt")
async def test_what_was_changed_under_a_map_and_left_no_trace_is_found(worker: Worker) -> None:
    """A second store to a page that is dirty already moves no time: an open cannot see it."""
    block = await kit.put(worker, os.urandom(MIB))
    with open(block.path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        first = mapped[100]
        mapped[100] = first ^ 1
        mapped[100] = first
        await worker.verifier.verify(block)
        mapped[100] = first ^ 1
        opened = worker.opener.open_now(block.address)
        assert opened is not None, "the stamp is the same"
        os.close(opened.fd)
        await scrubber(worker).scrub(block)
    assert worker.counters.scrub_corruptions == 1
    assert worker.store.get(block.id) is None


async def test_a_file_that_somebody_removed_is_reported_and_is_no_damage(worker: Worker) -> None:
    block = await kit.put(worker, b"data")
    os.unlink(block.path)
    await scrubber(worker).scrub(block)
    assert worker.store.get(block.id) is None
    assert (worker.counters.scrub_corruptions, worker.counters.scrubbed_blocks) == (0, 0)


class Ailing(Disk):
    """Reading fails."""

    number = 0

    def read_into(self, fd: int, buffers: object, offset: int) -> int:
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return super().read_into(fd, buffers, offset)  # type: ignore[arg-type]


@pytest.mark.allow_errors("out of service")
async def test_a_drive_that_fails_under_the_scrubber_goes_out_of_service(tmp_path: Path) -> None:
    disk = Ailing()
    async with kit.running(kit.settings(tmp_path), disk) as worker:
        block = await kit.put(worker, b"data")
        disk.number = 5
        await scrubber(worker).scrub(block)
        assert not worker.store.volumes[0].in_service


# ---- what nobody notices


async def test_cold_pages_stay_cold_and_hot_ones_hot(worker: Worker) -> None:
    cold, hot, half = [await kit.put(worker, os.urandom(2 * MIB + 5)) for _ in range(3)]
    for block in (cold, half):
        forget_pages(block.path)
    with open(half.path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 512 << 10, 512 << 10)
    before = {block.id: pages(block.path) for block in (cold, hot, half)}
    assert (any(before[cold.id]), all(before[hot.id])) == (False, True)
    assert any(before[half.id])
    assert not all(before[half.id])
    for block in (cold, hot, half):
        await scrubber(worker).scrub(block)
        assert pages(block.path) == before[block.id]
    assert worker.counters.scrubbed_blocks == 3


async def test_what_a_reader_came_for_meanwhile_stays_in_memory(worker: Worker) -> None:
    block = await kit.put(worker, os.urandom(MIB))
    forget_pages(block.path)
    mine = scrubber(worker)
    read = mine._read

    def read_while_somebody_comes(path: str, offset: int, size: int, is_cold: object) -> object:
        block.used_s += 1.0
        return read(path, offset, size, is_cold)  # type: ignore[arg-type]

    mine._read = read_while_somebody_comes  # type: ignore[method-assign,assignment]
    await mine.scrub(block)
    assert all(pages(block.path))


async def test_a_scrub_is_no_use(worker: Worker) -> None:
    block = await kit.put(worker, b"data")
    before = block.touches, block.used_s, worker.store.heat.of(block), worker.counters.hits, worker.counters.read_bytes
    await scrubber(worker).scrub(block)
    after = block.touches, block.used_s, worker.store.heat.of(block), worker.counters.hits, worker.counters.read_bytes
    assert after == before
    assert worker.counters.scrubbed_blocks == 1


async def test_it_keeps_to_its_rate(worker: Worker) -> None:
    block = await kit.put(worker, os.urandom(4 * MIB))
    mine, start = scrubber(worker, 10 * MIB), worker.runtime.monotonic_s()
    await mine.scrub(block)
    await mine.scrub(block)
    assert worker.runtime.monotonic_s() - start >= 0.7, "seven pieces after the first one, 0.1 s each"


async def test_it_gives_way_to_readers_and_goes_on(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "MAX_YIELD_S", 60.0)
    block = await kit.put(worker, b"data")
    reading = asyncio.get_running_loop().create_future()
    worker.verifier._running[BlockId(1, 1)] = reading  # type: ignore[assignment]
    scrubbing = asyncio.ensure_future(scrubber(worker).scrub(block))
    await asyncio.sleep(4 * scrub.YIELD_S)
    assert worker.counters.scrubbed_bytes == 0
    del worker.verifier._running[BlockId(1, 1)]
    await scrubbing
    assert worker.counters.scrubbed_blocks == 1


async def test_a_worker_that_never_rests_is_scrubbed_all_the_same(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "MAX_YIELD_S", 0.1)
    block = await kit.put(worker, b"data")
    worker.verifier._running[BlockId(1, 1)] = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
    await asyncio.wait_for(scrubber(worker).scrub(block), 10.0)
    del worker.verifier._running[BlockId(1, 1)]
    assert worker.counters.scrubbed_blocks == 1


@pytest.mark.parametrize("state", ["moving", "leaving"])
async def test_a_block_on_its_way_is_left_alone(worker: Worker, state: str) -> None:
    block = await kit.put(worker, b"data")
    setattr(block, state, True)
    await scrubber(worker).scrub(block)
    assert (worker.counters.scrubbed_bytes, worker.counters.scrub_corruptions) == (0, 0)
    assert worker.store.get(block.id) is block
    setattr(block, state, False)


async def test_it_holds_no_file_between_two_pieces(worker: Worker) -> None:
    """Whoever holds a file holds its bytes: an eviction would free nothing."""
    block = await kit.put(worker, os.urandom(3 * MIB))
    mine = scrubber(worker)
    for _ in range(3):
        await mine.scrub(block)
    await worker.evictor.drop([block])
    assert worker.store.volumes[0].books.held == 0


# ---- rounds


async def put_some(root: Path, count: int = 5) -> list[BlockId]:
    async with kit.running(kit.settings(root)) as worker:
        return sorted([(await kit.put(worker, os.urandom(5000 + i))).id for i in range(count)])


async def scrubbed(worker: Worker, count: int) -> None:
    async with asyncio.timeout(20):
        while worker.counters.scrubbed_blocks < count:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


async def test_a_round_visits_every_block_once(tmp_path: Path) -> None:
    ids = await put_some(tmp_path)
    async with scrubbing(tmp_path) as worker:
        await kit.until(lambda: worker.scrubber._round.over)
        await asyncio.sleep(0.1)
        assert worker.counters.scrubbed_blocks == len(ids)
        assert worker.counters.scrubbed_bytes == sum(5000 + i for i in range(len(ids)))
        assert worker.scrubber._round.at == ids[-1]


async def test_the_next_round_begins_after_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "IDLE_S", 0.01)
    ids = await put_some(tmp_path)
    async with scrubbing(tmp_path, interval_s=0.0) as worker:
        await scrubbed(worker, 3 * len(ids))
        assert worker.scrubber._round.last_began_ns > 0


async def test_it_goes_on_behind_where_it_was(tmp_path: Path) -> None:
    ids = await put_some(tmp_path)
    volume = tmp_path / "volume-a"
    was = Round(began_ns=5, last_began_ns=3, at=ids[1])
    (volume / scrub.NAME).write_bytes(b"\x01" + msgspec.msgpack.encode(was))
    async with scrubbing(tmp_path) as worker:
        await kit.until(lambda: worker.scrubber._round.over)
        assert worker.counters.scrubbed_blocks == len(ids) - 2
        assert worker.scrubber._round == Round(5, 3, ids[-1], over=True)
    async with scrubbing(tmp_path) as worker:
        await kit.until(lambda: worker.scrubber._round.last_began_ns == 5)  # the stop had written that it was over


@pytest.mark.parametrize("data", [b"", b"\x02", b"\x01", b"\x01garbage", b"\x01" + msgspec.msgpack.encode([1, "x"])])
async def test_a_damaged_note_of_where_it_was_costs_a_round_no_more(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ids = await put_some(tmp_path)
    (tmp_path / "volume-a" / scrub.NAME).write_bytes(data)
    with caplog.at_level(logging.WARNING, "kvstore.worker.blocks.scrub"):
        async with scrubbing(tmp_path) as worker:
            await scrubbed(worker, len(ids))
    assert sum("is of no use" in r.getMessage() for r in caplog.records) == 1


async def test_how_old_the_oldest_look_is(worker: Worker) -> None:
    mine, now = scrubber(worker, interval_s=10.0), worker.runtime.wall_ns()
    for was, age_s in ((Round(now - 5 * scrub.NS), 5), (Round(now - 5 * scrub.NS, now - 60 * scrub.NS), 60)):
        mine._round = was
        assert age_s - 1 < mine.oldest_age_s < age_s + 5


YEAR_NS = 365 * 86_400 * scrub.NS


@pytest.mark.parametrize("jump_ns", [-YEAR_NS, YEAR_NS], ids=["back", "forward"])
async def test_a_clock_that_jumps_changes_neither_rounds_nor_ages(
    worker: Worker, jump_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, wall_ns = scrubber(worker, interval_s=60.0), worker.runtime.wall_ns
    began_ns = mine._round.began_ns
    monkeypatch.setattr(worker.runtime, "wall_ns", lambda: wall_ns() + jump_ns)
    mine._round = waiting = Round(began_ns - 5 * scrub.NS, began_ns - 20 * scrub.NS, over=True)
    mine._begin_round()
    assert mine._round is waiting
    assert 20 <= mine.oldest_age_s < 50
    mine._round = Round(began_ns - 60 * scrub.NS, over=True)
    mine._begin_round()
    assert not mine._round.over


async def test_a_note_of_a_clock_that_was_ahead_stops_nothing(tmp_path: Path) -> None:
    ids = await put_some(tmp_path)
    ahead = Round(time.time_ns() + 2 * YEAR_NS, time.time_ns() + YEAR_NS, at=ids[-1], over=True)
    (tmp_path / "volume-a" / scrub.NAME).write_bytes(b"\x01" + msgspec.msgpack.encode(ahead))
    async with scrubbing(tmp_path, interval_s=0.5) as worker:
        await scrubbed(worker, len(ids))
        assert worker.scrubber.oldest_age_s < 60


async def test_a_round_waits_for_its_interval(worker: Worker) -> None:
    mine, now = scrubber(worker, interval_s=60.0), worker.runtime.wall_ns()
    mine._round = waiting = Round(now - 50 * scrub.NS, over=True)
    mine._begin_round()
    assert mine._round is waiting
    mine._round = due = Round(now - 61 * scrub.NS, over=True)
    mine._begin_round()
    assert mine._round.last_began_ns == due.began_ns


async def test_zero_is_off(tmp_path: Path) -> None:
    await put_some(tmp_path)
    async with kit.running(kit.settings(tmp_path)) as worker:
        await asyncio.wait_for(worker.scrubber.run(), 5.0)
        assert worker.counters.scrubbed_blocks == 0
    assert not (tmp_path / "volume-a" / scrub.NAME).exists()


def test_rate_and_interval_come_from_the_configuration() -> None:
    told = settings_of(WorkerConfig(scrub_rate="1MiB", scrub_interval="2h"))
    assert (told.scrub_bytes_per_s, told.scrub_interval_s) == (MIB, 7200.0)
    assert settings_of(WorkerConfig()).scrub_bytes_per_s > 0, "on unless told otherwise"
    assert settings_of(WorkerConfig(scrub_rate="0")).scrub_bytes_per_s == 0


# ---- which pages are in memory


def test_runs_of_absent_pages() -> None:
    here = [False, True, True, False, False, True, False]
    assert list(_absent(here, MIB)) == [
        (MIB, 4096), (MIB + 3 * 4096, 2 * 4096), (MIB + 6 * 4096, 4096)
    ]  # fmt: skip
    assert list(_absent([], 0)) == []


def test_a_file_that_nobody_knows_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with open(tmp_path / "empty", "rb") as file:
        assert absent_runs(file.fileno(), 0, MIB) == []
