"""Bugs that were put in on purpose, each with the seed that finds it: what the simulation is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from unittest import mock

from kvstore.core.errors import Stale
from kvstore.core.types import Seen
from kvstore.master.namespace import blocks
from kvstore.master.namespace.cluster import Cluster
from kvstore.master.recovery import claims
from kvstore.master.recovery.claims import Claim, NotedName
from kvstore.master.storage.change import Change
from kvstore.master.storage.commit import Committer
from kvstore.master.storage.db import Cf
from kvstore.master.storage.records import BlockRow
from kvstore.master.workers.nodes import Nodes
from kvstore.master.workers.told import Registration
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.verify import Verifier
from kvstore.worker.capacity.evict import Evictor
from kvstore.worker.reports.heartbeat import Heart
from tests.sim.run import Outcome, run_seed


class Plant(NamedTuple):
    name: str
    what: str
    owner: object
    attribute: str
    bug: Callable[..., Any]
    faults: Sequence[str]
    """Kinds of faults under which it shows soon."""

    def find(self, most: int) -> Outcome | None:
        """What the first seed that finds it says; None when none of so many does."""
        with mock.patch.object(self.owner, self.attribute, self.bug):
            outcomes = (run_seed(seed, faults=self.faults) for seed in range(1, most + 1))
            return next((outcome for outcome in outcomes if outcome.error), None)


async def _reply_before_commit(self: Committer) -> None:
    """Nobody waits for the flush."""


def _no_fence(change: Change, cluster: Cluster, block: bytes) -> None:
    if change.get(Cf.BLOCKS, block) is not None:
        raise Stale("this block was published before")


def _leaving_twice(self: Evictor, told: Iterable[Block]) -> list[Block]:
    """As it was until the simulation came: a block that a report holds twice goes twice."""
    going = [block for block in told if not block.leaving and self._store.get(block.id) is block]
    for block in going:
        block.leaving = True
    return going


def _no_second_try(self: Heart, text: str) -> None:
    """The heart stops at the first call that fails."""
    self._stopping = self._stopping or bool(text)


def _never_doubted(self: Verifier, block: Block, fd: int) -> bool:
    return True


def _never_behind(self: Nodes, new: Registration, sequence: int, recovered: Sequence[Seen]) -> bool:
    """A database that was put back takes itself for whole."""
    return False


def _note_without_effect(change: Change, claim: Claim, name: NotedName, row: BlockRow | None) -> claims.Outcome:
    return claims.Outcome.LOST


PLANTS = (
    Plant("reply before commit", "the master answers without waiting for the flush (rule 19)",
          Committer, "durable", _reply_before_commit, ["power_master"]),
    Plant("skip a fence", "the master publishes ids below their boot's fence (rule 10)",
          blocks, "check_publishable", _no_fence, ["echo"]),
    Plant("count twice", "a worker frees the bytes of a block that a report holds twice, twice",
          Evictor, "_leaving", _leaving_twice, ["crash_worker", "power_worker"]),
    Plant("drop a retry", "a worker's heart gives up after one call that failed",
          Heart, "_complain", _no_second_try, ["crash_master"]),
    Plant("forget to verify", "a worker hands out blocks whose pages left memory without reading them (rule 6)",
          Verifier, "is_good", _never_doubted, ["rot"]),
    Plant("believe an old disk", "a master that lost state orders workers to unlink what it does not know (rule 16)",
          Nodes, "_is_ahead", _never_behind, ["lose_disk"]),
    Plant("lose the notes", "a rebuild takes no name back (rule 22)",
          claims, "_claimed", _note_without_effect, ["crash_worker"]),
)  # fmt: skip
