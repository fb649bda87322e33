"""Whatever a handler raises reaches its caller as the same kind of error."""

from __future__ import annotations

import pytest

from kvstore.core import errors
from kvstore.core.errors import KvError
from kvstore.rpc import breaker
from kvstore.rpc.status import CODE_KEY, STATUS, to_status


@pytest.mark.parametrize("kind", errors.BY_CODE.values(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_status(kind: type[KvError]) -> None:
    status, details, trailing = to_status(kind("why"))
    assert (status, details) == (STATUS[kind], "why")
    assert dict(trailing)[CODE_KEY] == str(kind.code)


@pytest.mark.parametrize(
    ("finer", "known"),
    [
        (breaker.NotAsked, errors.Unavailable),
        (breaker.Broken, errors.Unavailable),
        (breaker.Silent, errors.Timeout),
        (breaker.OutOfDescriptors, errors.Overloaded),
    ],
)
def test_finer_errors_of_one_room_travel_as_the_kind_they_are(finer: type[KvError], known: type[KvError]) -> None:
    """A worker whose peer is silent says so to its own client."""
    status, _, trailing = to_status(finer("why"))
    assert status == STATUS[known]
    assert dict(trailing)[CODE_KEY] == str(known.code)
