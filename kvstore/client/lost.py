"""Names whose block this client could not read a moment ago though the master has an entry: its next put of such a name
asks the master to replace the entry even by equal content, or the bytes would be dropped and the name stay unreadable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvstore.core.errors import MISSES, KvError, NotFound, Timeout
from kvstore.core.recently import Recently
from kvstore.core.types import Entry

LOST_S = 60.0
"""Who finds a miss puts the value within this time; longer would replace good entries, too."""
MAX_LOST = 10_000


class LostNames:
    """At most `max_names` for `ttl_s` each; the oldest go first. Safe for many threads."""

    def __init__(
        self, ttl_s: float = LOST_S, max_names: int = MAX_LOST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._names: Recently[str] = Recently(ttl_s, max_names)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return self._names.has(name, self._clock())

    def failed(self, name: str, error: KvError) -> None:
        """A read of an entry's block ended so. Says nothing: what is no miss, and the end of the reader's own time."""
        if isinstance(error, MISSES) and not (isinstance(error, Timeout) and error.fault is None):
            self._add(name)

    def looked_up(self, names: Sequence[str], rows: Sequence[Entry | KvError]) -> None:
        """The master knows itself of an entry without live replicas."""
        for name, row in zip(names, rows, strict=True):
            if isinstance(row, NotFound) and row.reason == "no_replica":
                self._add(name)

    def forget(self, name: str) -> None:
        """It was read, or is another one now."""
        with self._lock:
            self._names.discard(name)

    def _add(self, name: str) -> None:
        with self._lock:
            self._names.add(name, self._clock())
