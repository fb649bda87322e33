"""The background scan: at start and every interval, through every column, in steps, until it finds damage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.core.errors import Corrupt, KvError, Unavailable
from kvstore.master.storage.db import Cf, Op, RocksDb
from kvstore.master.storage.scan import MIN_PAUSE_S, PAUSE, STEP_ROWS, TRIES, TRY_PAUSE_S, Scan
from kvstore.runtime import SystemRuntime
from tests.support import damage

WAIT_S = 20.0


class Clock(SystemRuntime):
    """Sleeps are noted and take no time; the scan's last one, of an interval, ends the test's patience with it."""

    def __init__(self) -> None:
        super().__init__(2)
        self.now_s = 0.0
        self.slept: list[float] = []
        self.rests = asyncio.Semaphore(0)
        self.go_on = asyncio.Semaphore(0)
        self.on_sleep: dict[float, Callable[[], None]] = {}

    def monotonic_s(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        self.on_sleep.get(delay_s, lambda: None)()
        if delay_s == INTERVAL_S:
            self.rests.release()
            await self.go_on.acquire()


INTERVAL_S = 3600.0


class Rows:
    """So many rows in each column, of which one may be bad; each step takes `step_s`."""

    def __init__(self, clock: Clock, count: int, step_s: float = 0.0) -> None:
        self.clock, self.count, self.step_s = clock, count, step_s
        self.read: dict[Cf, list[int]] = {cf: [] for cf in Cf}
        self.forgotten = 0
        self.bad: tuple[Cf, KvError] | None = None

    def mend(self) -> None:
        self.bad = None

    def forget_cached(self) -> None:
        self.forgotten += 1
        self.read = {cf: [] for cf in Cf}

    def verify(self, cf: Cf, after: bytes | None, limit: int) -> bytes | None:
        self.clock.now_s += self.step_s
        if self.bad is not None and self.bad[0] is cf:
            raise self.bad[1]
        first = 0 if after is None else int(after) + 1
        last = min(first + limit, self.count)
        self.read[cf] += range(first, last)
        return b"%d" % (last - 1) if last < self.count else None


async def test_everything_is_read_again_and_again_in_steps() -> None:
    clock = Clock()
    rows = Rows(clock, 3 * STEP_ROWS + 5)
    found: list[str] = []
    task = asyncio.create_task(Scan(rows, clock, INTERVAL_S, found.append).run())
    for turn in (1, 2):
        await asyncio.wait_for(clock.rests.acquire(), WAIT_S)
        assert rows.forgotten == turn
        assert all(read == list(range(rows.count)) for read in rows.read.values())
        assert clock.slept.count(MIN_PAUSE_S) == turn * 3 * len(Cf), "others get the processor between the steps"
        clock.go_on.release()
    task.cancel()
    assert not found
    clock.close()


async def test_it_takes_a_tenth_of_the_time() -> None:
    clock = Clock()
    scan = Scan(Rows(clock, STEP_ROWS + 1, step_s=0.5), clock, INTERVAL_S, lambda _: None)
    await scan.once()
    assert clock.slept == [PAUSE * 0.5] * len(Cf)
    assert scan.finished == 1
    clock.close()


@pytest.mark.allow_errors("changes nothing any more")
@pytest.mark.parametrize("error", [Corrupt("block checksum mismatch in 000009.sst"), Unavailable("I/O error")])
async def test_damage_is_said_once_and_ends_the_scanning(error: KvError, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    rows = Rows(clock, 5)
    rows.bad = (Cf.BLOCKS, error)
    found: list[str] = []
    scan = Scan(rows, clock, INTERVAL_S, found.append)
    task = asyncio.create_task(scan.run())
    for _ in range(3):
        await asyncio.wait_for(clock.rests.acquire(), WAIT_S)
        clock.go_on.release()
    task.cancel()
    [line] = found
    assert "column blocks" in line
    assert error.message in line
    assert "kvstore master --rebuild" in line
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.CRITICAL] == [line]
    assert clock.slept.count(TRY_PAUSE_S) == (0 if isinstance(error, Corrupt) else TRIES - 1)
    assert (scan.damage, scan.finished, rows.forgotten) == (line, 0, 1)
    clock.close()


async def test_a_read_that_fails_for_a_moment_is_no_damage() -> None:
    """Want of file descriptors, say."""
    clock = Clock()
    rows = Rows(clock, 5)
    rows.bad = (Cf.BLOCKS, Unavailable("too many open files"))
    clock.on_sleep[TRY_PAUSE_S] = rows.mend
    scan = Scan(rows, clock, INTERVAL_S, lambda _: None)
    await scan.once()
    assert (scan.damage, scan.finished) == (None, 1)
    assert all(read == list(range(rows.count)) for read in rows.read.values())
    clock.close()


@pytest.mark.allow_errors("changes nothing any more")
async def test_a_flipped_byte_in_a_table_of_rocksdb(tmp_path: Path) -> None:
    db = RocksDb(tmp_path)
    db.write([Op(Cf.INODES, b"%06d" % i, b"%d" % i * 20) for i in range(20_000)])
    db.close()
    db = RocksDb(tmp_path)
    clock, found = Clock(), list[str]()
    sound = Scan(db, clock, INTERVAL_S, found.append)
    await sound.once()
    assert (sound.finished, found) == (1, [])
    table = max(tmp_path.glob("*.sst"), key=lambda p: p.stat().st_size)
    damage.flip(table, table.stat().st_size // 2)
    await Scan(db, clock, INTERVAL_S, found.append).once()
    [line] = found
    assert "column inodes" in line
    assert table.name in line
    assert "\n" not in line
    db.close()
    clock.close()
