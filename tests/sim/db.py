"""The master's database in memory: what was flushed stays, of the rest a power cut keeps a prefix."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from kvstore.core.errors import Unavailable
from kvstore.master.storage.db import Cf, MemoryDb, Op, Pair

Batch = list[Op]


class Log:
    """What survives processes: every batch in order, and how many of them are synced.

    `broken`: chance that a write or a flush fails. `listen` hears of each batch when it is written, `forget` that
    everything is to be heard anew from the first batch on.
    """

    def __init__(self, source: random.Random) -> None:
        self.random = source
        self.batches: list[Batch] = []
        self.synced = 0
        self.broken = 0.0
        self.durable = MemoryDb()
        self.listen: Callable[[Batch], None] = lambda batch: None
        self.forget: Callable[[], None] = lambda: None

    def append(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.listen(batch)

    def sync(self) -> None:
        for batch in self.batches[self.synced :]:
            self.durable.write(batch)
        self.synced = len(self.batches)

    def power_cut(self) -> str:
        """What was done, in words."""
        kept = self.random.randint(self.synced, len(self.batches))
        lost = len(self.batches) - kept
        self._keep(kept)
        self.sync()
        return f"{lost} batches lost"

    def put_back(self, kept: int) -> str:
        """An older copy of the disk takes its place, or (0) an empty one. What was done, in words."""
        lost = len(self.batches) - kept
        self._keep(kept)
        self.durable, self.synced = MemoryDb(), 0
        self.sync()
        return f"{lost} of {lost + kept} batches lost"

    def _keep(self, count: int) -> None:
        del self.batches[count:]
        self.forget()
        for batch in self.batches:
            self.listen(batch)

    def fails(self) -> bool:
        return bool(self.broken) and self.random.random() < self.broken


class SimDb:
    """One open database (`kvstore.master.storage.db.Db`). After a flush that failed the kernel has dropped what was
    dirty.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._rows = MemoryDb()
        self._closed = False
        for batch in log.batches:
            self._rows.write(batch)

    def get(self, cf: Cf, key: bytes) -> bytes | None:
        return self._rows.get(cf, key)

    def get_many(self, cf: Cf, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        return self._rows.get_many(cf, keys)

    def scan(self, cf: Cf, start: bytes, end: bytes | None, limit: int) -> list[Pair]:
        return self._rows.scan(cf, start, end, limit)

    def write(self, ops: Iterable[Op]) -> None:
        if self._closed or self._log.fails():
            raise Unavailable("the drive failed a write")
        batch = list(ops)
        self._rows.write(batch)
        self._log.append(batch)

    def flush(self) -> None:
        if self._closed:
            raise Unavailable("the database is closed")
        if self._log.fails():
            self._log._keep(self._log.synced)
            raise Unavailable("the drive failed a flush")
        self._log.sync()

    def forget_cached(self) -> None:
        """Nothing is cached."""

    def verify(self, cf: Cf, after: bytes | None, limit: int) -> bytes | None:
        rows = self._rows.scan(cf, b"" if after is None else after + b"\0", None, limit)
        return rows[-1][0] if len(rows) == limit else None

    def close(self) -> None:
        self._closed = True
