"""What the method is worth: bugs that were put in on purpose, some of which it has found here, and it finds again."""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from unittest import mock

import pytest

from kvstore.master.storage.commit import Committer
from kvstore.worker.volumes import held
from kvstore.worker.writes.staging import Staged, Staging
from tests.faults import operations as op
from tests.faults.cluster import Operation
from tests.faults.course import fail_each
from tests.support.nth import DB_FAULTS, DISK_FAULTS, Fault


class Plant(NamedTuple):
    """`owner.attribute` is replaced by `bug`."""

    name: str
    owner: Any
    attribute: str
    bug: object
    operation: Operation
    fault: Fault


async def _reply_before_commit(self: Committer) -> None:
    """Nobody waits for the flush."""


async def _leave_staging(self: Staging, staged: Staged) -> bool:
    """What failed stays where it is."""
    staged.busy = False
    return False


PLANTS: Final = (
    Plant("no-fd-no-unlink", held, "SHORT_ERRNOS", (), op.PROMOTE, DISK_FAULTS[2]),
    Plant("staging-stays", Staging, "drop", _leave_staging, op.SEAL_COPY, DISK_FAULTS[1]),
    Plant("reply-before-commit", Committer, "durable", _reply_before_commit, op.PUBLISH, DB_FAULTS[1]),
)  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_bug_is_found(plant: Plant) -> None:
    with mock.patch.object(plant.owner, plant.attribute, plant.bug), pytest.raises(AssertionError, match=r": call \d+"):
        fail_each(plant.operation, plant.fault)
