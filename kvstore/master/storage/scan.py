"""The background scan: reads the whole database at a bounded rate, since RocksDB opens over a table with flipped bits
and finds out only when somebody asks for that very block."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from kvstore.core.errors import Corrupt, KvError
from kvstore.master.storage.db import Cf
from kvstore.master.storage.wal import REMEDY
from kvstore.runtime import Runtime

log = logging.getLogger(__name__)

STEP_ROWS: Final = 2000
"""About a millisecond: the interpreter is not shared while RocksDB reads."""
PAUSE: Final = 9.0
"""Times what the step took: a tenth of a core, and of the drive when that is what takes time."""
MIN_PAUSE_S: Final = 0.01
TRIES: Final = 3
TRY_PAUSE_S: Final = 60.0
"""Of reads that fail in another way than by a checksum: want of file descriptors passes, a broken drive does not."""


class Scanned(Protocol):
    """A database whose every stored byte can be checked."""

    def forget_cached(self) -> None:
        """What is read from now on comes from the drive."""

    def verify(self, cf: Cf, after: bytes | None, limit: int) -> bytes | None:
        """Read at most `limit` rows behind the key `after` (None = from the first) with their checksums; the last key,
        None at the column's end. Raises Corrupt, Unavailable. Blocks: call it in a thread."""


class Scan:
    """One task. `finished` counts whole scans; `damage` is the line that says what was found, and ends the scanning."""

    def __init__(self, db: Scanned, runtime: Runtime, interval_s: float, on_damage: Callable[[str], None]) -> None:
        self._db, self._runtime, self._interval_s, self._on_damage = db, runtime, interval_s, on_damage
        self.finished = 0
        self.damage: str | None = None

    async def run(self) -> None:
        """One at the start, then one every interval, until damage is found. For the life of the process."""
        while True:
            if self.damage is None:
                await self.once()
            await self._runtime.sleep(self._interval_s)

    async def once(self) -> None:
        """Look at everything."""
        await self._runtime.in_thread(self._db.forget_cached)
        for cf in Cf:
            if error := await self._trouble(cf):
                self._found(cf, error)
                return
        self.finished += 1
        log.debug("the whole database was read, and is sound")

    async def _trouble(self, cf: Cf) -> KvError | None:
        """Why a column cannot be read; None when all of it can."""
        for left in reversed(range(TRIES)):
            try:
                await self._column(cf)
                return None
            except KvError as error:
                if isinstance(error, Corrupt) or not left:
                    return error
                log.warning("the scan of column %s failed, and is tried again: %s", cf.value, error)
            await self._runtime.sleep(TRY_PAUSE_S)
        return None

    async def _column(self, cf: Cf) -> None:
        key: bytes | None = None
        while True:
            began_s = self._runtime.monotonic_s()
            key = await self._runtime.in_thread(self._db.verify, cf, key, STEP_ROWS)
            if key is None:
                return
            await self._runtime.sleep(max(MIN_PAUSE_S, PAUSE * (self._runtime.monotonic_s() - began_s)))

    def _found(self, cf: Cf, error: KvError) -> None:
        self.damage = (
            f"the master changes nothing any more, as its database is damaged in column {cf.value}: {error}; {REMEDY}"
        )
        log.critical("%s", self.damage)
        self._on_damage(self.damage)
