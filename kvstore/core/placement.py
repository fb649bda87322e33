"""Where a new block goes when there is no local worker: power of two choices on free bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A live worker as the cluster map shows it."""

    node: str
    endpoint: str
    free_bytes: int


def choose(candidates: Sequence[Candidate], length_bytes: int, first: int, second: int) -> Candidate | None:
    """The freer of two candidates; `first` and `second` are random 64-bit numbers drawn by the caller.

    Workers with room come first; when none claims to have room one is chosen all the same, since it can evict.
    None only without candidates.
    """
    if not candidates:
        return None
    pool = [c for c in candidates if c.free_bytes >= length_bytes] or list(candidates)
    a, b = pool[first % len(pool)], pool[second % len(pool)]
    return a if a.free_bytes >= b.free_bytes else b
