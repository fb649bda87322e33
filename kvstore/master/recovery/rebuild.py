"""Names are taken back from the workers after the master's disk was lost, emptied or replaced by an older one, or what
the workers have beyond the database is forgotten (rules 16, 22): `kvstore master --rebuild`, `--discard`. After damage
at the end of its log (`wal.CUT`) a start *mends* by itself: a rebuild of a few seconds, beside those who read.

    gather   workers register and, unless all is discarded, send what is noted beside their blocks (`gather`). Ends when
             as many as the operator expects are there, or when no new one has come for a while, and all have sent
             everything, but for those that are asked and send nothing (`telling`). A mend expects those that the
             database knows, for MEND_MAX_S at most; who is telling may go on
    place    the claims become entries (`claims`)
    settle   blocks without a note get their holders where another replica had a name; those whose name a later one has
             taken die; the rest are counted
    clear    the column `claims` is emptied
    finish   workers of which every block has a name, and all workers after a discard, are collected from again; after a
             mend all that have told everything

Until the end nothing is unlinked, and clients are refused; a mend lets them read. So nothing that somebody was told can
be undone. A crash in between: it begins anew at the next start, from what is there. Blocks without a name are kept by a
rebuild until an operator discards them, as a newer copy of the database may know them; of a mend's there is none.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Final, NamedTuple

import msgspec

from kvstore.config.units import format_size
from kvstore.core.errors import InvalidRequest, Unavailable
from kvstore.core.types import U63_MAX, Seen
from kvstore.master.recovery import claims, gather
from kvstore.master.recovery.claims import Claim, Outcome, Unnamed
from kvstore.master.recovery.telling import Telling
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, Reader
from kvstore.master.storage.records import META_REBUILD, NODE, REBUILD, RebuildRow, dump
from kvstore.master.workers import incarnations
from kvstore.master.workers.nodes import MAX_NODES, Node, Nodes
from kvstore.master.workers.told import Registration

log = logging.getLogger(__name__)

WAIT_S: Final = 30.0
"""For another worker, when nobody says how many there are."""
STUCK_S: Final = 60.0
"""Without a page from a worker that is asked: twice what it gives the call that brings one."""
MEND_STUCK_S: Final = 10.0
MEND_QUIET_S: Final = 5.0
"""After the last worker has come, for others that the database knows."""
MEND_MAX_S: Final = 30.0
"""Changes are refused meanwhile: who has not begun to tell by then is not collected from, and an operator hears of it.
"""
PROGRESS_EVERY_S: Final = 2.0
MAX_SHOWN: Final = 5
"""Workers that a line names."""
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


MEND: Final = Wanted(Kind.MEND, wait_s=MEND_QUIET_S)


class Step(enum.Enum):
    GATHER = enum.auto()
    PLACE = enum.auto()
    SETTLE = enum.auto()
    CLEAR = enum.auto()
    DONE = enum.auto()


def begin(change: Change, wanted: Wanted | None, random: int) -> Wanted | None:
    """Which rebuild this start of a master has to do, one that a crash cut short included. None: none."""
    stored = change.get(Cf.META, META_REBUILD)
    row = REBUILD.load(stored) if stored is not None else None
    begun = Kind(row.kind) if row is not None else None
    if begun is not None and wanted in (None, MEND):
        wanted = MEND if begun is Kind.MEND else Wanted(begun)
    if wanted is None:
        return None
    if wanted.kind is Kind.MEND:
        _distrust_all(change)
    elif begun in (None, Kind.MEND):
        change.counters.next_inode = max(change.counters.next_inode, _inodes(random))
    served = incarnations.last(change) if row is None else row.served
    change.put(Cf.META, META_REBUILD, dump(RebuildRow(wanted.kind.value, served)))
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
    """`step` and `notice`: what it is doing; `is_exhaustive`: at its end all had told all. The methods that take a
    `Change` belong to the step that writes it.
    """

    def __init__(self, wanted: Wanted, nodes: Nodes, base_sequence: int, now_s: float) -> None:
        """`base_sequence`: of the database as it was."""
        self.wanted, self.step, self.notice = wanted, Step.GATHER, f"{wanted.kind.value}: waiting for the first worker"
        self.base_sequence = base_sequence
        self._nodes = nodes
        self._is_mend = wanted.kind is Kind.MEND
        self._known = {node.id for node in nodes if node.row.volumes} if self._is_mend else set()
        self.is_exhaustive = False
        self._telling = Telling(nodes, MEND_STUCK_S if self._is_mend else STUCK_S, now_s)
        self._tally: Counter[Outcome] = Counter()
        self._unnamed: dict[str, Unnamed] = {}
        self._at = b""
        self._began_s = self._said_s = now_s

    @property
    def refuses_reads(self) -> bool:
        """A mend lacks little: what it does not know yet is a miss."""
        return not self._is_mend

    def refuse(self) -> Unavailable:
        """The error for clients."""
        if self._is_mend:
            return Unavailable(
                f"the master takes back what its log has lost; try again in a few seconds ({self.notice})"
            )
        does = "forgets what it does not know" if self.wanted.kind is Kind.DISCARD else "takes names back"
        return Unavailable(f"the master {does}, with its workers ({self.notice}); try again later")

    # ---- gather

    def prepare(self, change: Change, new: Registration) -> None:
        """Before a registration: the sequence goes on above all that its worker has seen. Raises InvalidRequest."""
        highest = max((new.sequence, *(seen.sequence for seen in new.seen)))
        if highest > U63_MAX:
            raise InvalidRequest(f"sequence {highest} is out of range")
        change.counters.sequence = max(change.counters.sequence, highest)

    def registered(self, new: Registration, now_s: float) -> None:
        self._telling.registered(new, now_s)

    def wants(self, node: Node, now_s: float) -> bool:
        """Whether this worker is to begin to send its names."""
        return self.takes(node) and self._telling.is_turn(node, now_s)

    def takes(self, node: Node) -> bool:
        """Whether names of this worker are of use."""
        is_gathering = self.step is Step.GATHER and self.wanted.kind is not Kind.DISCARD
        return is_gathering and self._telling.has_more(node)

    def take(self, change: Change, node: Node, page: Sequence[Claim], now_s: float) -> None:
        """One page of a worker's; what it says of volumes that it does not have is ignored. Raises InvalidRequest."""
        gather.check(page)
        mine, worker = set(node.row.volumes), self._telling.workers[node.id]
        own = [claim for claim in page if claim.volume in mine and not worker.is_new(claim.address.block)]
        self._tally += gather.take(change, self._nodes.cluster, node.id, own, self._is_ahead)
        self._telling.heard(node, now_s)

    def told_all(self, node: Node) -> None:
        """That was its last page."""
        self._telling.told_all(node)

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
        self._telling.look(now_s)
        self.notice = (
            f"{self.wanted.kind.value}: {len(self._telling.workers)} workers here, {self._telling.told} have told all; "
            f"{sum(self._tally[outcome] for outcome in gather.OUTCOMES):,} blocks, {self._tally[Outcome.CLAIMED]:,} "
            f"names{self._missing(now_s)}"
        )
        if self._is_all_told(now_s):
            self.step = Step.PLACE
        elif now_s >= self._said_s + PROGRESS_EVERY_S:
            self._said_s = now_s
            log.info("%s", self.notice)

    def _is_all_told(self, now_s: float) -> bool:
        """Whether there is nobody to wait for any more."""
        here = self._telling.workers
        if self.wanted.kind is not Kind.DISCARD and any(self._telling.silent()):
            return False  # whoever sends nothing is not waited for long, see `Telling`
        if self._is_mend and now_s >= self._began_s + MEND_MAX_S:
            return True
        is_quiet = now_s >= self._telling.newest_s + self.wanted.wait_s
        if not here:
            return self._is_mend and not self._known and is_quiet
        if self._is_mend:
            return is_quiet or not self._awaited()
        return len(here) >= self.wanted.workers if self.wanted.workers else is_quiet

    def _awaited(self) -> list[str]:
        """Workers that a mend has reason to expect: those that the database knows, while they count as live (rule 17),
        and as long as nobody is here all of them."""
        here = self._telling.workers
        absent = [(id, self._nodes.get(id)) for id in sorted(self._known - here.keys())]
        return [id for id, node in absent if not here or (node is not None and self._nodes.live(node))]

    def _missing(self, now_s: float) -> str:
        """Whom it waits for, who does not tell, and who was refused."""
        parts = []
        if awaited := self._awaited():
            parts.append(f"{_some(awaited)} are awaited")
        elif self.wanted.workers:
            parts.append(f"{self.wanted.workers} workers are awaited")
        elif not self._telling.workers:
            parts.append("waiting for the first worker")
        elif not self._is_mend:
            left_s = max(0.0, self._telling.newest_s + self.wanted.wait_s - now_s)
            parts.append(f"others are awaited for {left_s:.0f} s more")
        if stuck := self._telling.stuck:
            parts.append(f"asked, and silent: {_some(stuck)}")
        if strangers := self._nodes.strangers:
            clusters = [f"{node} (of cluster {cluster})" for node, cluster in sorted(strangers.items())]
            parts.append(f"refused: {_some(clusters)}")
        return "".join(f"; {part}" for part in parts)

    def _finish(self, change: Change) -> None:
        change.delete(Cf.META, META_REBUILD)
        for id, worker in self._telling.workers.items():
            node = self._nodes.get(id)
            if node is None:
                continue
            is_whole = worker.is_told and (self._is_mend or not self._unnamed.get(id, Unnamed()).blocks)
            if self.wanted.kind is Kind.DISCARD or is_whole:
                self._nodes.trust(change, node, worker.seen)
            node.is_to_register = True
        self._sum_up(change)

    def _sum_up(self, change: Change) -> None:
        lost, without = self._tally[Outcome.LOST], self._tally[Outcome.WITHOUT_NOTE]
        counters = change.counters
        self.notice = (
            f"{self.wanted.kind.value} complete: {counters.files:,} files in {counters.directories - 1:,} directories "
            f"from {len(self._telling.workers)} workers; blocks without a note {without:,}, names that a later one has "
            f"replaced {lost:,}, malformed {self._tally[Outcome.MALFORMED]:,}"
        )
        log.info("%s", self.notice)
        if self.wanted.kind is Kind.DISCARD:
            self.notice += "; what the workers have beyond these is unlinked from now on"
            return
        if self.wanted.kind is Kind.REBUILD:
            self._say_what_may_be_old()
        absent = self._telling.untold | (self._known - self._telling.workers.keys())
        self.is_exhaustive = not absent
        if absent:
            self.notice += f"; have not told all: {_some(sorted(absent))}"
            log.warning("have not told all: %s; when they are back, --rebuild takes the rest", _some(sorted(absent)))
        self._say_what_has_no_name(absent)

    def _say_what_has_no_name(self, absent: Set[str]) -> None:
        """A mend lets them go, but for those on workers that may still have a name for them."""
        here = {id: unnamed for id, unnamed in self._unnamed.items() if not (self._is_mend and id in absent)}
        count, size = (sum(column) for column in zip(*here.values(), strict=True)) if here else (0, 0)
        if not count:
            return
        what = f"{count:,} blocks ({format_size(size)}) have no name"
        if self._is_mend:
            self.notice += f"; {what}: they go"
            log.warning("%s: they go, as nothing can tell what they were (%s)", what, _some(sorted(here)))
        else:
            self.notice += f"; {what}: kept until the master is started with --discard"
            log.warning(
                "%s: they are kept, and nothing is collected on their workers (%s), until the master is started with "
                "--discard", what, _some(sorted(here)),
            )  # fmt: skip

    def _say_what_may_be_old(self) -> None:
        log.warning(
            "what may be old: files of directories that were renamed are back under the old path, files that were "
            "removed while every holder was away may be back; empty files and directories, modes of directories, "
            "quotas, TTLs and pins that this database did not have are gone: set them again"
        )


def distrust(workers: Sequence[str], *, is_rebuilt: bool) -> str:
    """The notice for workers that nothing is collected from; "" without any. `is_rebuilt`: all that they could tell is
    known already, but for those that the rebuild's own words name."""
    if not workers:
        return ""
    remedy = "--discard" if is_rebuilt else "--rebuild (the names come back) or --discard"
    return (
        f"nothing is collected on {len(workers):,} workers ({_some(workers)}): they may hold what this database lacks. "
        f"Start the master with {remedy} (what it does not know goes)"
    )


def refused(strangers: Mapping[str, str]) -> str:
    """The notice for workers (node → cluster) that do not belong here; "" without any."""
    if not strangers:
        return ""
    return (
        f"{len(strangers):,} workers of another cluster are refused ({_some(sorted(strangers))}): point them at their "
        "own master; if this one has lost its disk, move its data directory away and start it on an empty one with "
        "--rebuild (the names come back) or --discard (they are forgotten)"
    )


def _some(names: Sequence[str]) -> str:
    """Not all of a thousand."""
    more = f" and {len(names) - MAX_SHOWN:,} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more
