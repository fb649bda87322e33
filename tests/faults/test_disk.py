"""The system calls of workers: each of them fails once, or it and all that follow, or it is the last of its process."""

from __future__ import annotations

import errno
from typing import Final

import pytest

from tests.faults import operations as op
from tests.faults.cluster import Operation
from tests.faults.course import fail_each
from tests.support.nth import DISK_FAULTS, Fault

OPERATIONS: Final = (
    op.PUBLISH, op.REMOTE, op.REPLACE, op.RENAME, op.REMOVE, op.SEAL_COPY, op.FETCH, op.EVICT, op.PROMOTE, op.DEMOTE,
    op.QUOTA, op.SCRUB, op.UPKEEP,
)  # fmt: skip


@pytest.mark.parametrize("fault", DISK_FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_any_system_call_may_fail(operation: Operation, fault: Fault) -> None:
    calls = fail_each(operation, fault)
    assert calls > 0 or fault.effect in (errno.ENOSPC, errno.EMFILE)
