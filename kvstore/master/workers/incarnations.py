"""The starts of this database's masters: tells a worker that has seen a history which this database has lost (rule 16).

A sequence alone does not: a database that was restored from a backup counts on, and has soon overtaken what its workers
have seen of the other history. So each start draws 64 random bits and writes down where it began.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstore.core.types import Seen
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf
from kvstore.master.storage.records import INCARNATIONS, META_INCARNATIONS, IncarnationsRow, dump

MAX_STARTS: Final = 256
"""A worker that was away for more of them counts as one that has seen another history: nothing of it is collected."""


class Incarnations:
    """`starts`: (incarnation, sequence at its start), oldest first; the last one is the running master."""

    def __init__(self, starts: Iterable[Seen]) -> None:
        self.starts = list(starts)

    @property
    def current(self) -> int:
        return self.starts[-1].incarnation

    def is_ahead(self, seen: Seen, sequence: int) -> bool:
        """Whether a worker that has seen this knows more than the database, which is at `sequence` now."""
        ends = [start.sequence for start in self.starts[1:]] + [sequence]
        for start, end in zip(self.starts, ends, strict=True):
            if start.incarnation == seen.incarnation:
                return seen.sequence > end
        return True


def begin(change: Change, incarnation: int) -> Incarnations:
    """Write down that a master starts."""
    starts = [*_starts(change), Seen(incarnation, change.counters.sequence)][-MAX_STARTS:]
    change.put(Cf.META, META_INCARNATIONS, dump(IncarnationsRow(starts)))
    return Incarnations(starts)


def last(change: Change) -> int:
    """The incarnation that started last; 0: none ever did."""
    starts = _starts(change)
    return starts[-1].incarnation if starts else 0


def _starts(change: Change) -> list[Seen]:
    stored = change.get(Cf.META, META_INCARNATIONS)
    return INCARNATIONS.load(stored).starts if stored is not None else []
