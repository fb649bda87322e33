"""A change: reads see what it has already written, and nothing reaches the database before the one write at its end.

change = Change.begin(db, now_ns, limits)
part = change.nested()          # all or nothing within it
part.put(…); part.merge()       # or forget it
db.write(change.ops())
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from kvstore.master.storage.db import Cf, Op, Pair, Reader
from kvstore.master.storage.records import COUNTERS, META_COUNTERS, Counters, JournalLimits, dump


class Change:
    """Pending rows on top of a `Reader`.

    `now_ns`    wall clock of the whole change: every time it writes is this one;
    `counters`  its own copy, written with the rows;
    `touched`   inodes of directories whose times are already `now_ns`;
    `relabelled`  owned blocks that have another name or count for another policy by it, with the volumes that hold
                them;
    `grown`     policy → published bytes that came under it;
    `refused`   policy → bytes of a name for which its quota had no room, the largest.
    """

    def __init__(self, below: Reader, now_ns: int, limits: JournalLimits, counters: Counters) -> None:
        self._below = below
        self.now_ns = now_ns
        self.limits = limits
        self.counters = counters
        self.touched: set[int] = set()
        self.relabelled: list[tuple[bytes, Sequence[int]]] = []
        self.grown: Counter[int] = Counter()
        self.refused: Counter[int] = Counter()
        self._rows: dict[Cf, dict[bytes, bytes | None]] = {}
        self._keys: dict[Cf, list[bytes]] = {}

    @classmethod
    def begin(cls, below: Reader, now_ns: int, limits: JournalLimits) -> Change:
        stored = below.get(Cf.META, META_COUNTERS)
        return cls(below, now_ns, limits, Counters() if stored is None else COUNTERS.load(stored))

    def nested(self) -> Change:
        part = Change(self, self.now_ns, self.limits, msgspec.structs.replace(self.counters))
        part.touched = set(self.touched)
        return part

    def merge(self) -> None:
        """Hand everything down to the change that this one is nested in."""
        below = self._below
        assert isinstance(below, Change)
        for cf, rows in self._rows.items():
            for key, value in rows.items():
                below._set(cf, key, value)
        below.counters, below.touched = self.counters, self.touched
        below.relabelled += self.relabelled
        below.grown += self.grown

    def __bool__(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._rows)

    def ops(self) -> Iterator[Op]:
        for cf, rows in self._rows.items():
            for key, value in rows.items():
                yield Op(cf, key, value)
        yield Op(Cf.META, META_COUNTERS, dump(self.counters))

    def mint(self) -> int:
        """A new inode number. It is durable with the row that uses it, so none is ever given out twice."""
        inode = self.counters.next_inode
        self.counters.next_inode += 1
        return inode

    def put(self, cf: Cf, key: bytes, value: bytes) -> None:
        self._set(cf, key, value)

    def delete(self, cf: Cf, key: bytes) -> None:
        self._set(cf, key, None)

    def get(self, cf: Cf, key: bytes) -> bytes | None:
        rows = self._rows.get(cf)
        if rows is not None and key in rows:
            return rows[key]
        return self._below.get(cf, key)

    def get_many(self, cf: Cf, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        rows = self._rows.get(cf)
        values = self._below.get_many(cf, keys)
        return values if not rows else [rows.get(k, v) for k, v in zip(keys, values, strict=True)]

    def scan(self, cf: Cf, start: bytes, end: bytes | None, limit: int) -> list[Pair]:
        pending = self._pending(cf, start, end)
        if not pending:
            return self._below.scan(cf, start, end, limit)
        # Each pending row hides at most one row below, so this many from below are enough for `limit`.
        merged: dict[bytes, bytes | None] = dict(self._below.scan(cf, start, end, limit + len(pending)))
        merged.update(pending)
        return [(k, v) for k, v in sorted(merged.items()) if v is not None][:limit]

    def _set(self, cf: Cf, key: bytes, value: bytes | None) -> None:
        rows = self._rows.setdefault(cf, {})
        if key not in rows:
            bisect.insort(self._keys.setdefault(cf, []), key)
        rows[key] = value

    def _pending(self, cf: Cf, start: bytes, end: bytes | None) -> dict[bytes, bytes | None]:
        keys = self._keys.get(cf)
        if not keys:
            return {}
        first = bisect.bisect_left(keys, start)
        last = len(keys) if end is None else bisect.bisect_left(keys, end)
        rows = self._rows[cf]
        return {key: rows[key] for key in keys[first:last]}
