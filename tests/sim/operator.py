"""The master's disk is lost, or an older copy comes back, and somebody mends that: by `--rebuild`, then `--discard`."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from kvstore.core.types import Address, BlockId, Seen
from kvstore.master.recovery.rebuild import Kind, Wanted
from kvstore.master.storage.db import Cf
from kvstore.master.storage.records import (
    CLUSTER,
    COUNTERS,
    INCARNATIONS,
    META_CLUSTER,
    META_COUNTERS,
    META_INCARNATIONS,
)
from kvstore.worker.reports import note as notes
from kvstore.worker.reports.note import Note
from kvstore.worker.volumes.disk import Disk
from tests.sim.db import Log
from tests.sim.faults import Violation
from tests.sim.ledger import Ledger
from tests.sim.oracle import Oracle
from tests.sim.programs import MasterHost, WorkerHost

LOOK_S: Final = 0.1
MEND_S: Final = 90.0
"""A rebuild and a discard, with all workers there."""
NOTES_S: Final = 12.0
"""By then each name is noted beside its block: a full report, and the reports that ask for names."""


class Operator:
    """`has_work`: from a loss on until all is mended. Meanwhile nothing is collected of who knows better (rule 16)."""

    def __init__(
        self,
        master: MasterHost,
        workers: Sequence[WorkerHost],
        oracle: Oracle,
        ledger: Ledger,
        source: random.Random,
    ) -> None:
        self._master, self._workers, self._oracle, self._ledger = master, workers, oracle, ledger
        self._random = source
        self._lost: list[_Loss] = []
        self._discards = False
        self._coming: asyncio.Task[None] | None = None
        ledger.may_order = self._may_order

    @property
    def has_work(self) -> bool:
        return bool(self._lost)

    def lose_disk(self, share: float) -> str:
        """What is there again is this share of what was; what was done, in words."""
        self._master.crash()
        log, now_s = self._master.log, self._master.loop.time()
        before = _starts(log)
        cluster = _cluster(log)
        done = log.put_back(int(log.synced * share))
        self._lost.append(_Loss(log, before, cluster))
        self._oracle.lose()
        self._ledger.lose(now_s)
        return done

    def come(self, delay_s: float) -> None:
        """In a while: whoever is served by such a master until then meets it as it is."""

        async def later() -> None:
            await asyncio.sleep(delay_s)
            await self._mend()

        self._coming = asyncio.get_running_loop().create_task(later())

    def go_away(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            self._coming = None

    async def mend(self) -> None:
        """If there is anything to. Raises Violation when it does not come to its end; nobody breaks anything now."""
        if not self.has_work:
            return
        try:
            await asyncio.wait_for(self._mend(), MEND_S)
        except TimeoutError:
            unseen = "; ".join(self._master.loop.troubles)
            raise Violation(f"names were not taken back within {MEND_S:.0f} s {unseen}") from None

    async def discard_rest(self) -> None:
        """A volume that was out of service when all was mended comes back with what it had seen before (rule 16)."""
        master = self._master.master
        if self._discards and master is not None and not all(node.row.collects for node in master.nodes):
            await asyncio.wait_for(self._restart(Kind.DISCARD), MEND_S)

    async def drill(self) -> None:
        """In peace: of an empty disk every name comes back that was noted beside its block (rule 22)."""
        await asyncio.sleep(NOTES_S)
        noted = self._noted()
        self._master.trace.add(f"DRILL: {self.lose_disk(0.0)}, {len(noted)} names are noted")
        self._master.start()
        await asyncio.sleep(self._random.random() * 2 * LOOK_S)
        await self.mend()
        files = self._ledger.durable_files()
        for path, block in noted.items():
            if path not in files or files[path].block != block:
                text = str(BlockId.unpack(block))
                raise Violation(f"{path}: its block {text} was noted, and did not come back", [path, text])

    # ---- the steps

    async def _mend(self) -> None:
        log = self._master.log
        if self._lost[-1].cluster != _cluster(log):
            self._master.crash()
            log.put_back(0)  # it began anew with an id of its own
            for worker in self._workers:
                self._wipe_strangers(worker)
        await self._restart(Kind.REBUILD)
        master = self._master.master
        if master is None or not all(node.row.collects for node in master.nodes):
            await self._restart(Kind.DISCARD)
        self._lost.clear()
        self._discards = True
        self._oracle.regain(self._master.loop.time())

    def _wipe_strangers(self, worker: WorkerHost) -> None:
        """Volumes that were new, and joined the cluster of the empty master."""
        for path, identity in worker.identities():
            if identity.cluster not in ("", self._lost[0].cluster):
                worker.wipe(path)
                worker.start()

    async def _restart(self, kind: Kind) -> None:
        host = self._master
        host.crash()
        host.wanted_rebuild = Wanted(kind, workers=len(self._workers))
        host.trace.add(f"OPERATOR: --{kind.value}")
        host.start()
        while host.master is None or host.master.rebuild is not None:  # noqa: ASYNC110 - it may be another one each time
            await asyncio.sleep(LOOK_S)
        host.trace.add(f"OPERATOR: {host.master.notice}")
        host.wanted_rebuild = None

    # ---- what must hold

    def _may_order(self, host: str, incarnation: int) -> bool:
        """Not a worker that has seen what is lost, unless the rebuild is just over, or it does not obey this start of
        the master yet: it registers anew first."""
        master = self._master.master
        if master is not None and master.rebuild is None and self._master.wanted_rebuild is not None:
            return True
        (worker,) = (worker for worker in self._workers if worker.name == host)
        if worker.worker is None or not worker.worker.membership.is_judge(incarnation):
            return True
        return not any(
            loss.has_lost(Seen(identity.incarnation, identity.sequence))
            for loss in self._lost
            for _, identity in worker.identities()
        )

    def _noted(self) -> dict[str, bytes]:
        """Path → block of each name whose block has it beside it, and no other block has: after its directory was
        renamed one may."""
        claims: defaultdict[str, set[bytes]] = defaultdict(set)
        for worker in self._workers:
            for note in _notes(worker):
                claims[note.path].add(note.block)
        files = self._ledger.durable_files()
        return {
            path: files[path].block
            for path, blocks in claims.items()
            if path in files and blocks == {files[path].block}
        }


class _Loss:
    """What the log had, and has no more: its starts since, and the end of the one in which it was cut."""

    def __init__(self, log: Log, before: Sequence[Seen], cluster: str) -> None:
        left = _starts(log)
        self.cluster = cluster
        self._gone = {seen.incarnation for seen in before} - {seen.incarnation for seen in left}
        self._cut = left[-1].incarnation if left else 0
        stored = log.durable.get(Cf.META, META_COUNTERS)
        self._end = COUNTERS.load(stored).sequence if stored is not None else 0

    def has_lost(self, seen: Seen) -> bool:
        return seen.incarnation in self._gone or (seen.incarnation == self._cut and seen.sequence > self._end)


def _starts(log: Log) -> Sequence[Seen]:
    stored = log.durable.get(Cf.META, META_INCARNATIONS)
    return INCARNATIONS.load(stored).starts if stored is not None else ()


def _cluster(log: Log) -> str:
    stored = log.durable.get(Cf.META, META_CLUSTER)
    return CLUSTER.load(stored).id if stored is not None else ""


def _notes(worker: WorkerHost) -> list[Note]:
    disk = Disk()
    found = []
    for path in worker.block_files():
        note = notes.decode(disk.attribute(str(path), notes.ATTRIBUTE), Address.parse(path.name))
        if note is not None:
            found.append(note)
    return found
