"""Names are taken back from the workers after the master's disk was lost, emptied or replaced by an older one, or what
the workers have beyond the database is forgotten (rules 16, 22): `kvstore master --rebuild`, `--discard`. After damage
at the end of its log (`wal.CUT`) a start *mends* by itself: a rebuild beside the clients, who go on.

    gather   workers register and, unless all is discarded, send what is noted beside their blocks (`gather`). Ends when
             as many as the operator expects are there, or when no new one has come for a while, and all have sent
             everything; a mend expects all that the database knows
    place    the claims become entries (`claims`)
    settle   blocks without a note get their holders where another replica had a name; the rest are counted
    clear    the column `claims` is emptied
    finish   workers of which every block has a name, and all workers after a discard, are collected from again

Until the end nothing is unlinked, and clients are refused but by a mend. A crash in between: it begins anew at the next
start, from what is there. Blocks without a name are kept until an operator discards them: an older copy of the database
may know them.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from kvstore.config.units import format_size
from kvstore.core.errors import InvalidRequest, Unavailable
from kvstore.core.types import U63_MAX, BlockId, Seen
from kvstore.master.recovery import claims, gather
from kvstore.master.recovery.claims import Claim, Outcome, Unnamed
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, Reader
from kvstore.master.storage.records import META_REBUILD, NODE, REBUILD, RebuildRow, dump
from kvstore.master.workers.nodes import MAX_NODES, Node, Nodes
from kvstore.master.workers.told import Registration

log = logging.getLogger(__name__)

WAIT_S: Final = 30.0
"""For another worker, when nobody says how many there are."""
MEND_WAIT_S: Final = 600.0
"""For those that the database knows, when a rack comes up again after a power cut: nobody waits for a mend."""
MEND_QUIET_S: Final = 5.0
"""After the last of them has come: puts that the restart has interrupted are published meanwhile."""
PROGRESS_EVERY_S: Final = 2.0
MAX_SHOWN: Final = 5
"""Workers that a line names."""
MAX_TELLING: Final = 8
"""Workers that send their names at the same time: a page takes the loop for some 30 ms, and its worker waits for it."""
INODES_AT: Final = 40
"""Inode numbers go on at a random multiple of 2^40: none that a mount may still know comes again for other content."""


class Kind(enum.Enum):
    REBUILD = "rebuild"
    DISCARD = "discard"
    MEND = "mend"


class Wanted(NamedTuple):
    """What the operator asks for. `workers`: how many there are; 0: until no new one comes for `wait_s`."""

    kind: Kind
    workers: int = 0
    wait_s: float = WAIT_S


MEND: Final = Wanted(Kind.MEND, wait_s=MEND_WAIT_S)


class Step(enum.Enum):
    GATHER = enum.auto()
    PLACE = enum.auto()
    SETTLE = enum.auto()
    CLEAR = enum.auto()
    DONE = enum.auto()


class _Worker:
    """One that has registered. `seen`: what of other histories; `is_told`: it has sent everything."""

    def __init__(self, new: Registration) -> None:
        self.boot, self.minted, self.seen, self.is_told = new.boot, new.minted, list(new.seen), False

    def is_new(self, block: BlockId) -> bool:
        """Whether it came to be under this master: of a put that is under way, and nothing that was ever lost."""
        return block.boot == self.boot and 0 < self.minted <= block.counter


def begin(change: Change, wanted: Wanted | None, random: int) -> Wanted | None:
    """Which rebuild this start of a master has to do, one that a crash cut short included. None: none."""
    stored = change.get(Cf.META, META_REBUILD)
    begun = Kind(REBUILD.load(stored).kind) if stored is not None else None
    if begun is not None and wanted in (None, MEND):
        wanted = MEND if begun is Kind.MEND else Wanted(begun)
    if wanted is None:
        return None
    if wanted.kind is Kind.MEND:
        _distrust_all(change)
    elif begun in (None, Kind.MEND):
        change.counters.next_inode = max(change.counters.next_inode, _inodes(random))
    change.put(Cf.META, META_REBUILD, dump(RebuildRow(wanted.kind.value)))
    return wanted


def _distrust_all(change: Change) -> None:
    """Any worker may hold a block whose name was in what was lost: none is collected from before it has told all."""
    for id, stored in change.scan(Cf.NODES, b"", None, MAX_NODES):
        change.put(Cf.NODES, id, dump(msgspec.structs.replace(NODE.load(stored), collects=False)))


def is_empty(reader: Reader) -> bool:
    """Whether a database has nothing but its root: no other name, and nobody was ever here."""
    at_most = ((Cf.NAMES, 1), (Cf.BLOCKS, 0), (Cf.NODES, 0))
    return all(len(reader.scan(column, b"", None, count + 1)) <= count for column, count in at_most)


def _inodes(random: int) -> int:
    return (random % (1 << 61 - INODES_AT) + 1) << INODES_AT


class Rebuild:
    """`step` and `notice`: what it is doing. The methods that take a `Change` belong to the step that writes it."""

    def __init__(self, wanted: Wanted, nodes: Nodes, base_sequence: int, now_s: float) -> None:
        """`base_sequence`: of the database as it was."""
        self.wanted, self.step, self.notice = wanted, Step.GATHER, f"{wanted.kind.value}: waiting for the first worker"
        self.base_sequence = base_sequence
        self._nodes = nodes
        self._known = {node.id for node in nodes if node.row.volumes} if wanted.kind is Kind.MEND else set()
        self._workers: dict[str, _Worker] = {}
        self._tally: Counter[Outcome] = Counter()
        self._unnamed: dict[str, Unnamed] = {}
        self._at = b""
        self._newest_s = self._said_s = now_s

    @property
    def refuses_clients(self) -> bool:
        """A mend lacks little, and clients can do without."""
        return self.wanted.kind is not Kind.MEND

    def refuse(self) -> Unavailable:
        """The error for clients."""
        return Unavailable(f"the master takes names back from its workers ({self.notice}); try again later")

    # ---- gather

    def prepare(self, change: Change, new: Registration) -> None:
        """Before a registration: the sequence goes on above all that its worker has seen. Raises InvalidRequest."""
        highest = max((new.sequence, *(seen.sequence for seen in new.seen)))
        if highest > U63_MAX:
            raise InvalidRequest(f"sequence {highest} is out of range")
        change.counters.sequence = max(change.counters.sequence, highest)

    def registered(self, new: Registration, now_s: float) -> None:
        known = self._workers.get(new.node)
        if known is None:
            self._newest_s = now_s
        if known is None or known.boot != new.boot:
            self._workers[new.node] = _Worker(new)

    def wants(self, node: Node) -> bool:
        """Whether this worker is to begin to send its names: a few at a time, in the order in which they came."""
        return self.takes(node) and node.id in itertools.islice(self._silent(), MAX_TELLING)

    def takes(self, node: Node) -> bool:
        """Whether names of this worker are of use."""
        worker = self._workers.get(node.id)
        is_gathering = self.step is Step.GATHER and self.wanted.kind is not Kind.DISCARD
        return is_gathering and worker is not None and not worker.is_told

    def take(self, change: Change, node: Node, page: Sequence[Claim]) -> None:
        """One page of a worker's; what it says of volumes that it does not have is ignored. Raises InvalidRequest."""
        gather.check(page)
        mine, worker = set(node.row.volumes), self._workers[node.id]
        own = [claim for claim in page if claim.volume in mine and not worker.is_new(claim.address.block)]
        self._tally += gather.take(change, self._nodes.cluster, node.id, own, self._is_ahead)

    def told_all(self, node: Node) -> None:
        """That was its last page."""
        worker = self._workers.get(node.id)
        if worker is not None:
            worker.is_told = True

    def _is_ahead(self, seen: Seen) -> bool:
        return self._nodes.lacks(seen, self.base_sequence)

    # ---- the rest, a bounded step at a time

    def go_on(self, change: Change, now_s: float) -> bool:
        """The next step, or a look whether it is time for it. False when there is nothing to do for a moment."""
        if self.step is Step.GATHER:
            self._look(now_s)
            return self.step is not Step.GATHER
        if self.step is Step.PLACE:
            self._at = claims.place_step(change, self._at, self._tally)
            self.step = Step.PLACE if self._at else Step.SETTLE
        elif self.step is Step.SETTLE:
            self._at = claims.settle_step(change, self._nodes.cluster, self._at, self._unnamed)
            self.step = Step.SETTLE if self._at else Step.CLEAR
        elif self.step is Step.CLEAR and not claims.clear_step(change):
            self._finish(change)
            self.step = Step.DONE
        return True

    def _look(self, now_s: float) -> None:
        told, waiting = self._progress()
        self.notice = (
            f"{self.wanted.kind.value}: {len(self._workers)} workers here, {told} have told all; "
            f"{sum(self._tally[outcome] for outcome in gather.OUTCOMES):,} blocks, {self._tally[Outcome.CLAIMED]:,} "
            f"names{self._missing(now_s)}"
        )
        if not waiting and self._are_all_here(now_s):
            self.step = Step.PLACE
        elif now_s >= self._said_s + PROGRESS_EVERY_S:
            self._said_s = now_s
            log.info("%s", self.notice)

    def _are_all_here(self, now_s: float) -> bool:
        if self.wanted.kind is Kind.MEND:
            wait_s = MEND_QUIET_S if self._known <= self._workers.keys() else self.wanted.wait_s
            return now_s >= self._newest_s + wait_s
        if not self._workers:
            return False
        if self.wanted.workers:
            return len(self._workers) >= self.wanted.workers
        return now_s >= self._newest_s + self.wanted.wait_s

    def _missing(self, now_s: float) -> str:
        """Whom it waits for, and who was refused."""
        parts = []
        if absent := sorted(self._known - self._workers.keys()):
            parts.append(f"{_some(absent)} are awaited")
        elif self.wanted.workers:
            parts.append(f"{self.wanted.workers} workers are awaited")
        elif not self._workers:
            parts.append("waiting for the first worker")
        elif self.wanted.kind is not Kind.MEND:
            left_s = max(0.0, self._newest_s + self.wanted.wait_s - now_s)
            parts.append(f"others are awaited for {left_s:.0f} s more")
        if strangers := self._nodes.strangers:
            clusters = [f"{node} (of cluster {cluster})" for node, cluster in sorted(strangers.items())]
            parts.append(f"refused: {_some(clusters)}")
        return "".join(f"; {part}" for part in parts)

    def _progress(self) -> tuple[int, int]:
        """(workers that have told all, live ones that have not yet)."""
        told = sum(worker.is_told for worker in self._workers.values())
        if self.wanted.kind is Kind.DISCARD:
            return told, 0
        return told, sum(1 for _ in self._silent())

    def _silent(self) -> Iterator[str]:
        """Live workers that have not told all."""
        for id, worker in self._workers.items():
            node = self._nodes.get(id)
            if not worker.is_told and node is not None and self._nodes.live(node):
                yield id

    def _finish(self, change: Change) -> None:
        change.delete(Cf.META, META_REBUILD)
        for id, worker in self._workers.items():
            node = self._nodes.get(id)
            if node is None:
                continue
            is_whole = worker.is_told and not self._unnamed.get(id, Unnamed()).blocks
            if self.wanted.kind is Kind.DISCARD or is_whole:
                self._nodes.trust(change, node, worker.seen)
            node.is_to_register = True
        self._sum_up(change)

    def _sum_up(self, change: Change) -> None:
        lost, without = self._tally[Outcome.LOST], self._tally[Outcome.WITHOUT_NOTE]
        unnamed = [sum(column) for column in zip(*self._unnamed.values(), strict=True)] or [0, 0]
        counters = change.counters
        self.notice = (
            f"{self.wanted.kind.value} complete: {counters.files:,} files in {counters.directories - 1:,} directories "
            f"from {len(self._workers)} workers; blocks without a note {without:,}, names that a later one has "
            f"replaced {lost:,}, malformed {self._tally[Outcome.MALFORMED]:,}"
        )
        log.info("%s", self.notice)
        if self.wanted.kind is Kind.DISCARD:
            return
        if self.wanted.kind is Kind.REBUILD:
            self._say_what_may_be_old()
        silent = {node for node, worker in self._workers.items() if not worker.is_told}
        if absent := sorted(silent | self._known - self._workers.keys()):
            log.warning("have not told all: %s; when they are back, --rebuild takes the rest", ", ".join(absent))
        if unnamed[0]:
            kept = f"{unnamed[0]:,} blocks ({format_size(unnamed[1])}) have no name"
            self.notice += f"; {kept}: kept until the master is started with --discard"
            log.warning(
                "%s: they are kept, and nothing is collected on their workers (%s), until the master is started with "
                "--discard", kept, ", ".join(sorted(self._unnamed)),
            )  # fmt: skip

    def _say_what_may_be_old(self) -> None:
        log.warning(
            "what may be old: files of directories that were renamed are back under the old path, files that were "
            "removed while every holder was away may be back; empty files and directories, modes of directories, "
            "quotas, TTLs and pins that this database did not have are gone: set them again"
        )


def distrust(workers: Sequence[str]) -> str:
    """The notice for workers that nothing is collected from; "" without any."""
    if not workers:
        return ""
    return (
        f"nothing is collected on {len(workers):,} workers ({_some(workers)}): they may hold what this database lacks. "
        "Start the master with --rebuild (the names come back) or --discard (what it does not know goes)"
    )


def _some(names: Sequence[str]) -> str:
    """Not all of a thousand."""
    more = f" and {len(names) - MAX_SHOWN:,} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more
