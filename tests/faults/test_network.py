"""Messages between clients, workers and the master: each is lost in silence, or breaks its connection. Without a
request nothing was done; without a reply it was, and the caller does not know.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.faults import operations as op
from tests.faults.cluster import Operation
from tests.faults.course import fail_each
from tests.support.nth import NET_FAULTS, Fault

OPERATIONS: Final = (
    op.PUBLISH, op.REMOTE, op.REPLACE, op.RENAME, op.REMOVE, op.FETCH, op.EVICT, op.QUOTA, op.PROMOTE,
)  # fmt: skip


@pytest.mark.parametrize("fault", NET_FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_any_message_may_be_lost(operation: Operation, fault: Fault) -> None:
    assert fail_each(operation, fault) > 0
