"""Writes and flushes of the master's database: each fails, which ends it (rule 20), or the power is cut there."""

from __future__ import annotations

from typing import Final

import pytest

from tests.faults import operations as op
from tests.faults.cluster import Operation
from tests.faults.course import fail_each
from tests.support.nth import DB_FAULTS, Fault

OPERATIONS: Final = (
    op.PUBLISH, op.REPLACE, op.RENAME, op.REMOVE, op.EVICT, op.QUOTA,
)  # fmt: skip


@pytest.mark.parametrize("fault", DB_FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_any_commit_may_fail(operation: Operation, fault: Fault) -> None:
    assert fail_each(operation, fault) > 0
