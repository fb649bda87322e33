"""Starts of a worker and of the master, also on a new drive with a rebuild: what fails on the way loses nothing."""

from __future__ import annotations

from typing import Final

import pytest

from tests.faults import operations as op
from tests.faults.cluster import Operation
from tests.faults.course import fail_each
from tests.support.nth import DB_FAULTS, DISK_FAULTS, NET_FAULTS, Fault

CASES: Final = [
    *((op.START_WORKER, fault) for fault in (*DISK_FAULTS, *NET_FAULTS, *DB_FAULTS)),
    *((op.START_MASTER, fault) for fault in (*NET_FAULTS, *DB_FAULTS)),
    *((op.REBUILD, fault) for fault in (*NET_FAULTS, *DB_FAULTS)),
]


@pytest.mark.parametrize(("operation", "fault"), CASES, ids=lambda part: part.name)
def test_a_start_that_fails_loses_nothing(operation: Operation, fault: Fault) -> None:
    assert fail_each(operation, fault) > 0
