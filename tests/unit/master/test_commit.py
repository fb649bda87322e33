"""Group commit: rules 18, 19 and 20."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstore.core.errors import KvError, NoSpace, ReadOnly, Unavailable
from kvstore.master.storage.change import Change
from kvstore.master.storage.commit import ALWAYS, GROWS, SHRINKS, Committer
from kvstore.master.storage.db import Cf, MemoryDb
from kvstore.master.storage.records import META_PULSE, JournalLimits
from kvstore.rpc.server import stop_all
from kvstore.runtime import SystemRuntime

WAIT_S = 10.0


class GatedDb(MemoryDb):
    """Each flush says that it started, then waits for its turn; what was written before it started is then `synced`."""

    def __init__(self) -> None:
        super().__init__()
        self.started = threading.Semaphore(0)
        self.turn = threading.Semaphore(0)
        self.synced: set[bytes] = set()
        self.broken: KvError | None = None
        self.refuse: KvError | None = None

    def write(self, ops: object) -> None:
        if self.refuse is not None:
            raise self.refuse
        super().write(ops)  # type: ignore[arg-type]

    def flush(self) -> None:
        covered = {key for key, _ in self.scan(Cf.NAMES, b"", None, 1000)}
        self.started.release()
        assert self.turn.acquire(timeout=WAIT_S)
        if self.broken is not None:
            raise self.broken
        self.synced |= covered
        super().flush()


class Bench:
    def __init__(self, db: GatedDb, flush_timeout_s: float) -> None:
        self.db = db
        self.free = 1000
        self.runtime = SystemRuntime(2)
        self.committer = Committer(db, self.runtime, lambda: self.free, 100, flush_timeout_s)

    def write(self, key: bytes) -> None:
        change = Change.begin(self.db, 0, JournalLimits(10, 1000))
        change.put(Cf.NAMES, key, b"v")
        self.committer.write(change)

    def put(self, key: bytes) -> asyncio.Task[None]:
        """Write, and wait until that is durable; the write has happened when this returns."""
        self.write(key)
        return asyncio.create_task(self.committer.durable())

    async def flush_started(self) -> None:
        assert await self.runtime.in_thread(self.db.started.acquire, timeout=WAIT_S)


@asynccontextmanager
async def bench(flush_timeout_s: float = WAIT_S) -> AsyncIterator[Bench]:
    made = Bench(GatedDb(), flush_timeout_s)
    task = asyncio.create_task(made.committer.run())
    try:
        yield made
    finally:
        made.db.turn.release(100)
        made.committer.close()
        await stop_all(task)
        made.runtime.close()


async def test_acknowledged_only_after_the_flush() -> None:
    async with bench() as b:
        waits = b.put(b"a")
        await b.flush_started()
        assert not waits.done()
        assert b.db.synced == set()
        b.db.turn.release()
        await asyncio.wait_for(waits, WAIT_S)
        assert b.db.synced == {b"a"}


async def test_what_is_written_during_a_flush_waits_for_the_next_one() -> None:
    async with bench() as b:
        first = b.put(b"a")
        await b.flush_started()
        second = b.put(b"b")
        b.db.turn.release()
        await asyncio.wait_for(first, WAIT_S)
        await b.flush_started()
        assert not second.done(), "the flush that had started does not cover it"
        b.db.turn.release()
        await asyncio.wait_for(second, WAIT_S)
        assert b.db.synced == {b"a", b"b"}


async def test_one_flush_for_all_who_wait() -> None:
    async with bench() as b:
        first = b.put(b"0")
        await b.flush_started()
        rest = [b.put(b"%d" % i) for i in range(1, 50)]
        b.db.turn.release(2)
        await asyncio.wait_for(asyncio.gather(first, *rest), WAIT_S)
        assert b.db.flushes == 2


async def test_nothing_to_wait_for_waits_for_nothing() -> None:
    async with bench() as b:
        await asyncio.wait_for(b.committer.durable(), WAIT_S)
        assert b.db.flushes == 0


async def test_a_no_op_waits_for_what_others_wrote() -> None:
    """Rule 19: an error or a no-op tells of a state that is not durable yet."""
    async with bench() as b:
        b.write(b"a")
        await b.flush_started()
        other = asyncio.create_task(b.committer.durable())
        await asyncio.sleep(0)
        assert not other.done()
        b.db.turn.release()
        await asyncio.wait_for(other, WAIT_S)


@pytest.mark.allow_errors("cannot write its database")
async def test_a_failed_flush_ends_everything() -> None:
    async with bench() as b:
        waits = b.put(b"a")
        await b.flush_started()
        late = b.put(b"b")
        b.db.broken = Unavailable("I/O error")
        b.db.turn.release()
        for task in (waits, late):
            with pytest.raises(Unavailable, match="stops: I/O error"):
                await asyncio.wait_for(task, WAIT_S)
        await asyncio.wait_for(b.committer.failed.wait(), WAIT_S)
        b.db.broken = None
        with pytest.raises(Unavailable):  # a later flush would acknowledge over a hole
            b.write(b"c")
        with pytest.raises(Unavailable):
            b.committer.admit(ALWAYS)
        assert b.db.flushes == 0


@pytest.mark.allow_errors("cannot write its database")
async def test_a_failed_write_ends_everything() -> None:
    async with bench() as b:
        waits = b.put(b"a")
        await b.flush_started()
        b.db.refuse = Unavailable("no space")
        with pytest.raises(Unavailable, match="stops: no space"):
            b.write(b"b")
        with pytest.raises(Unavailable):
            await asyncio.wait_for(waits, WAIT_S)
        assert b.committer.failed.is_set()


@pytest.mark.allow_errors("did not answer a flush")
async def test_a_flush_that_hangs_ends_everything() -> None:
    async with bench(flush_timeout_s=0.01) as b:
        with pytest.raises(Unavailable, match="did not answer a flush"):
            await asyncio.wait_for(b.put(b"a"), WAIT_S)


@pytest.mark.allow_errors("cannot write its database")
async def test_the_pulse_finds_a_lost_drive_without_traffic() -> None:
    async with bench() as b:
        await b.committer.pulse()
        assert b.db.get(Cf.META, META_PULSE) is not None
        await b.flush_started()
        b.db.broken = Unavailable("gone")
        b.db.turn.release()
        await asyncio.wait_for(b.committer.failed.wait(), WAIT_S)


async def test_the_reserve_stops_mutations_before_the_drive_is_full(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as b:
        b.db.turn.release(100)
        await b.committer.pulse()
        assert b.committer.shortage == ""
        b.free = 99
        for _ in range(2):
            await b.committer.pulse()
        assert b.committer.shortage.startswith("new names are refused: the master's drive has 99 B left, and 100 B are")
        with pytest.raises(NoSpace, match="99 B left"):
            b.committer.admit()
        b.committer.admit(SHRINKS)
        b.free = 24
        await b.committer.pulse()
        with pytest.raises(NoSpace):
            b.committer.admit(SHRINKS)
        b.committer.admit(ALWAYS)
        b.free = 100
        await b.committer.pulse()
        b.committer.admit()
        assert [r.getMessage()[:30] for r in caplog.records if r.levelno == logging.WARNING] == [
            "new names are refused: the mas",
            "the master's drive has room ag",
        ]


async def test_damage_stops_mutations_but_no_heartbeat() -> None:
    async with bench() as b:
        b.db.turn.release(100)
        b.committer.stop_mutations("000009.sst is damaged; restore it")
        for share in (GROWS, SHRINKS):
            with pytest.raises(ReadOnly, match=r"000009\.sst is damaged; restore it"):
                b.committer.admit(share)
        b.committer.admit(ALWAYS)
        await asyncio.wait_for(b.put(b"a"), WAIT_S)
        assert not b.committer.failed.is_set()


@pytest.mark.allow_errors("cannot write its database")
async def test_a_drive_that_cannot_be_asked_for_its_space_has_failed() -> None:
    async with bench() as b:
        b.db.turn.release(100)

        def gone() -> int:
            raise OSError(5, "Input/output error")

        b.committer._free_bytes = gone
        await b.committer.pulse()
        with pytest.raises(Unavailable, match="Input/output error"):
            b.committer.admit(ALWAYS)


async def test_the_durable_sequence_is_the_one_from_before_the_flush() -> None:
    async with bench() as b:
        for sequence in (1, 2):
            change = Change.begin(b.db, 0, JournalLimits(10, 1000))
            change.put(Cf.NAMES, b"k", b"v")
            change.counters.sequence = sequence
            b.committer.write(change)
            if sequence == 1:
                await b.flush_started()
        b.db.turn.release()
        await b.flush_started()
        assert b.committer.durable_sequence == 1
        b.db.turn.release()
        await asyncio.wait_for(b.committer.durable(), WAIT_S)
        assert b.committer.durable_sequence == 2
