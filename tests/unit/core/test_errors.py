from __future__ import annotations

from kvstore.core import errors, limits
from kvstore.core.errors import KvError
from kvstore.rpc.status import STATUS


def test_codes_are_unique_and_pinned() -> None:
    codes = {cls.__name__: code for code, cls in errors.BY_CODE.items()}
    assert codes == {
        "KvError": 1, "InvalidRequest": 2, "NotFound": 3, "AlreadyExists": 4, "NotEmpty": 5, "NotDirectory": 6,
        "IsDirectory": 7, "ReadOnly": 8, "Stale": 9, "Unavailable": 10, "Overloaded": 11, "NoSpace": 12, "Denied": 13,
        "Timeout": 14, "Corrupt": 15, "Unsupported": 16, "NameTooLong": 17, "TooLarge": 18,
        "OtherPolicy": 19,
    }  # fmt: skip


def test_every_class_has_a_status() -> None:
    assert set(STATUS) == set(errors.BY_CODE.values())


def test_an_error_survives_the_wire() -> None:
    error = errors.from_wire(3, "no replica of /a lives", "no_replica")
    assert isinstance(error, errors.NotFound)
    assert (error.reason, error.message) == ("no_replica", "no replica of /a lives")
    assert type(errors.from_wire(250, "from the future")) is KvError


def test_deadlines_grow_with_size() -> None:
    assert limits.open_timeout_s(0) == 1.0
    assert limits.open_timeout_s(200_000_000) == 2.0
    assert limits.fetch_timeout_s(50_000_000) == 6.0
