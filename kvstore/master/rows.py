"""One row of a batch is one error: each row of a request is a change of its own inside the request's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from kvstore.core.errors import InvalidRequest, KvError, Overloaded
from kvstore.core.limits import MAX_BATCH
from kvstore.master.storage.change import Change

Q = TypeVar("Q")
A = TypeVar("A")


def check_batch(count: int) -> None:
    """Raises InvalidRequest for more rows than one request may have."""
    if count > MAX_BATCH:
        raise InvalidRequest(f"{count} rows are too many for one request; at most {MAX_BATCH}")


def each(change: Change, rows: Iterable[Q], decide: Callable[[Change, Q], A]) -> list[A | KvError]:
    """Per row what `decide` returned, or the error it raised; what an erring row had changed is forgotten.

    But for Overloaded: it says that a bounded step was done and more are needed (see `tree.make_empty`).
    """
    results: list[A | KvError] = []
    for row in rows:
        part = change.nested()
        try:
            results.append(decide(part, row))
        except Overloaded as error:
            results.append(error)
        except KvError as error:
            results.append(error)
            continue
        part.merge()
    return results
