"""Cached entries of the SDK: positive ones only, for at most `ttl_s`, at most `max_entries`.

An entry's age counts from the moment its lookup was *sent*. A lookup that was under way while this client changed the
path (or a directory above it) brings an entry that may be the old one: `put` refuses it. So a client sees its own
changes at once, and others' within the TTL. Pure but for the clock, which is injected. Safe for many threads.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvstore.core.types import Entry

MAX_ENTRIES = 65_536
"""About 40 MB."""
MAX_CHANGES = 4_096
"""Own changes remembered one by one, to be compared with lookups under way; older ones refuse all lookups from before
them.
"""


class Token(NamedTuple):
    """Taken before a lookup is sent, given back with its entries."""

    sent_s: float
    change: int


class MetadataCache:
    """`_entries`: path → (expiry, entry), least recently used first. `_changes`: path → its last own change."""

    def __init__(
        self,
        ttl_s: float,
        max_entries: int = MAX_ENTRIES,
        max_changes: int = MAX_CHANGES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s, self._max_entries, self._max_changes, self._clock = ttl_s, max_entries, max_changes, clock
        self._entries: OrderedDict[str, tuple[float, Entry]] = OrderedDict()
        self._changes: OrderedDict[str, int] = OrderedDict()
        self._change = 0
        self._floor = 0
        """Changes up to this number are no longer in `_changes`."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def token(self) -> Token:
        return Token(self._clock(), self._change)

    def get(self, path: str) -> Entry | None:
        with self._lock:
            expiry_s, entry = self._entries.get(path, (0.0, None))
            if entry is None or expiry_s <= self._clock():
                self._entries.pop(path, None)
                return None
            self._entries.move_to_end(path)
            return entry

    def put(self, token: Token, path: str, entry: Entry) -> None:
        """Keep an entry that a lookup brought which began at `token`."""
        with self._lock:
            if token.change < self._floor or any(self._changes.get(p, 0) > token.change for p in _and_above(path)):
                return
            self._entries[path] = (token.sent_s + self._ttl_s, entry)
            self._entries.move_to_end(path)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def drop(self, path: str) -> None:
        """Forget one entry because it did not hold what it said."""
        with self._lock:
            self._entries.pop(path, None)

    def changed(self, path: str, *, tree: bool = False) -> None:
        """This client changed the path, or may have; with `tree` also all below it."""
        with self._lock:
            self._change += 1
            self._changes[path] = self._change
            self._changes.move_to_end(path)
            self._entries.pop(path, None)
            if tree:
                for below in [p for p in self._entries if p.startswith(path + "/") or not path]:
                    del self._entries[below]
            while len(self._changes) > self._max_changes:
                self._floor = self._changes.popitem(last=False)[1]


def _and_above(path: str) -> Iterator[str]:
    """The path and every directory above it, whose removal or renaming changes it too."""
    yield path
    while path:
        path = path.rpartition("/")[0]
        yield path
