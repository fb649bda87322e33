"""Group commit (rules 18 to 20).

`write` is synchronous: read, decide and write are one step on the loop. Only the flush is shared: one runs at a time,
in a thread, and acknowledges what was written *before* it started. A write or a flush that fails, or a flush that
does not come back, ends the process: after an I/O error the kernel drops what was dirty, and the next flush would
acknowledge over a hole.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from kvstore.config.units import format_size
from kvstore.core.errors import KvError, NoSpace, ReadOnly, Unavailable
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, Db, Op
from kvstore.master.storage.records import META_PULSE, pack_u64
from kvstore.runtime import Runtime

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S: Final = 30.0
"""A drive that has not answered by then is taken for lost."""
GROWS: Final = 1.0
SHRINKS: Final = 0.25
ALWAYS: Final = 0.0
"""Which share of the reserve a change leaves alone. Publishes: all of it. Removals and reports, which free space in the
end: a quarter. Heartbeats may use the last byte, or a full drive would make all workers dead."""
SETTLE_S: Final = 0.15
"""Longer than the database waits between two marks."""


class Committer:
    """Owns the write side of the database.

    `_written`  number of the last write;            `_durable`  of the last one known to be in the synced log;
    `_waiters`  (number, future) in order of number;  `failure`   set once, and never cleared.
    `damage`    what the scan found, or None.
    """

    def __init__(
        self, db: Db, runtime: Runtime, free_bytes: Callable[[], int], reserve_bytes: int,
        flush_timeout_s: float = FLUSH_TIMEOUT_S,
    ) -> None:  # fmt: skip
        self._db, self._runtime = db, runtime
        self._free_bytes, self._reserve_bytes = free_bytes, reserve_bytes
        self._flush_timeout_s = flush_timeout_s
        self._written = self._durable = 0
        self._sequence = self.durable_sequence = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._work = asyncio.Event()
        self._free: int | None = None
        self.failure: KvError | None = None
        self.failed = asyncio.Event()
        self.damage: str | None = None
        self.flushes = 0

    def admit(self, share: float = GROWS) -> None:
        """Refuse a mutation before it starts: Unavailable after a failure, ReadOnly when the database is damaged,
        NoSpace when the reserve is reached."""
        if self.failure is not None:
            raise self.failure
        if self.damage is not None and share > ALWAYS:
            raise ReadOnly(self.damage)
        if why := self._shortage(share):
            raise NoSpace(why)

    @property
    def shortage(self) -> str:
        """Why nothing that grows the database is taken; "" while the drive has room."""
        return self._shortage(GROWS)

    def _shortage(self, share: float) -> str:
        reserve = int(self._reserve_bytes * share)
        if self._free is None or self._free >= reserve:
            return ""
        kind = "new names" if share == GROWS else "removals, too,"
        return (
            f"{kind} are refused: the master's drive has {format_size(self._free)} left, and {format_size(reserve)} "
            "are kept in reserve (master.free_reserve); free some"
        )

    def stop_mutations(self, damage: str) -> None:
        """From now on `admit` lets only registrations and heartbeats pass: without them files would be hidden."""
        self.damage = damage

    def write(self, change: Change) -> None:
        """Make a change visible; `durable` says when it is safe. Raises Unavailable if it cannot be written, and the
        process ends."""
        if self.failure is not None:
            raise self.failure
        if change:
            self._write(list(change.ops()), change.counters.sequence)

    async def durable(self) -> None:
        """Wait until everything written so far is in the synced log. Raises Unavailable when that failed."""
        if self.failure is not None:
            raise self.failure
        if self._durable == self._written:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._written, waiter))
        await waiter

    def start_at(self, sequence: int) -> None:
        """The sequence of a database that was just opened, all of it durable."""
        self._sequence = self.durable_sequence = sequence

    async def run(self) -> None:
        """Flush whenever something was written. One task, for the life of the process."""
        while self.failure is None:
            await self._work.wait()
            self._work.clear()
            while self._durable < self._written and self.failure is None:
                await self._flush()
            await self._settle()

    async def _settle(self) -> None:
        """One more flush when it has been quiet for a moment: the database marks how far it is synced with flushes,
        though not with each of a burst, and what is behind the mark cannot be told from what a power cut left."""
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._work.wait()
        except TimeoutError:
            if self.failure is None:
                await self._flush()

    async def pulse(self) -> None:
        """Once a second: a tiny write, so that a lost drive shows without traffic, and a look at the space that is
        left."""
        if self.failure is not None:
            return
        try:
            self._write([Op(Cf.META, META_PULSE, pack_u64(self._runtime.wall_ns()))], self._sequence)
            self._look_at(await self._runtime.in_thread(self._free_bytes))
        except (KvError, OSError) as error:
            self._fail(error)

    def _look_at(self, free: int) -> None:
        """What is left of the drive, said once when it becomes too little and once when it is enough again."""
        before, self._free = self.shortage, free
        if bool(before) != bool(self.shortage):
            log.warning("%s", self.shortage or "the master's drive has room again: new names are taken")

    def close(self) -> None:
        """Answer all who still wait."""
        self._fail(Unavailable("the master is stopping"), loud=False)

    def _write(self, ops: list[Op], sequence: int) -> None:
        try:
            self._db.write(ops)
        except KvError as error:
            raise self._fail(error) from None
        self._written += 1
        self._sequence = sequence
        self._work.set()

    async def _flush(self) -> None:
        written, sequence = self._written, self._sequence  # before the flush starts: what comes later is not in it
        try:
            async with asyncio.timeout(self._flush_timeout_s):
                await self._runtime.in_thread(self._db.flush)
        except TimeoutError:
            self._fail(Unavailable(f"the drive did not answer a flush within {self._flush_timeout_s:.0f} s"))
        except Exception as error:  # noqa: BLE001 - whatever it was, nothing after it may be acknowledged
            self._fail(error)
        else:
            self.flushes += 1
            self._durable, self.durable_sequence = written, sequence
            self._wake()

    def _wake(self) -> None:
        while self._waiters and self._waiters[0][0] <= self._durable:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _fail(self, error: Exception, *, loud: bool = True) -> KvError:
        if self.failure is None:
            self.failure = Unavailable(f"the master cannot write its database and stops: {error}")
            if loud:
                log.critical("%s", self.failure)
            self.failed.set()
            self._work.set()
        while self._waiters:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(self.failure)
        return self.failure
