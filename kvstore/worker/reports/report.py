"""The numbered stream of reports (rule 15): states, read at the moment of sending; one message in flight.

What is to be said is only a set of ids. A message that got no answer is sent again as it was (the master knows it by
its bytes), so its effect happens once; a gap means a full report.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from kvstore.core.errors import KvError
from kvstore.core.limits import MAX_BATCH, REPORT_TIMEOUT_S
from kvstore.core.policies import NONE
from kvstore.core.types import BlockId
from kvstore.pb import master_pb2 as m
from kvstore.rpc.methods import REPORT, A, Method, Q
from kvstore.worker.blocks.store import Store
from kvstore.worker.reports.fullreport import FullReport, Piece

log = logging.getLogger(__name__)
REPORT_INTERVAL_S = 0.5
"""How often changes are told that nobody waits for, and how often blocks without an owner are asked about."""
ANNOUNCE_WAIT_S = 1.0
"""How long an eviction waits for the master's reply before it goes on without it (rule 12)."""
RETRY_S = 0.5


class MasterLink(Protocol):
    def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> Awaitable[A]: ...


class Judged(NamedTuple):
    """What the master says of a block."""

    block: BlockId
    verdict: m.Verdict.ValueType
    policy: int = NONE
    """The nearest one of its entry, if it is owned."""


class Listener(Protocol):
    """What the reporter leaves to others."""

    @property
    def known_sequence(self) -> int: ...

    def is_doomed(self, block: BlockId) -> bool:
        """Unowned and past its grace: to be made dead."""

    def on_verdicts(self, verdicts: Sequence[Judged]) -> None: ...

    def is_judge(self, incarnation: int) -> bool:
        """Whether the master that answers is the one that has registered us: nothing else of it counts before."""

    def on_report(self, reply: m.ReportReply, known_sequence: int) -> None:
        """Commands, cluster and sequence of any reply."""

    def names_to_ask(self, held: Sequence[BlockId]) -> list[BlockId]:
        """Blocks whose names the report asks for that tells of the blocks `held` (rule 22)."""

    def on_names(self, asked: Sequence[BlockId], reply: m.ReportReply | None) -> None:
        """The names of these; None: there was no answer."""


@dataclasses.dataclass(slots=True)
class _Message:
    request: m.ReportRequest
    held: Sequence[BlockId]
    nowhere: Sequence[BlockId]
    piece: Piece | None
    named: Sequence[BlockId]


@dataclasses.dataclass(slots=True, eq=False)
class _Waiter:
    missing: set[BlockId]
    told: asyncio.Future[bool]


class Reporter:
    """``_changed`` holds ids to tell of, ``_urgent`` those that somebody waits for; a dict keeps the order."""

    def __init__(
        self, node: str, store: Store, link: MasterLink, listener: Listener, full_interval_s: float,
        now_s: Callable[[], float],
    ) -> None:  # fmt: skip
        self._node, self._store, self._link, self._listener = node, store, link, listener
        self._full_interval_s, self._now_s = full_interval_s, now_s
        self._changed: dict[BlockId, None] = {}
        self._urgent: dict[BlockId, None] = {}
        self._waiters: list[_Waiter] = []
        self._unanswered: _Message | None = None
        self._full: FullReport | None = None
        self._number = 0
        self._told_fences: list[tuple[int, int]] = []
        self._next_full_s = self._next_ask_s = 0.0
        self._wake = asyncio.Event()
        self._complaint = ""

    @property
    def is_registered(self) -> bool:
        return self._number > 0

    def changed(self, block: BlockId) -> None:
        """Tell of this block with the next report."""
        self._changed[block] = None

    async def announce(self, blocks: Sequence[BlockId]) -> bool:
        """Tell of these now; whether the master has taken it. False soon when it cannot be reached."""
        if not self.is_registered or self._complaint:
            self._changed.update(dict.fromkeys(blocks))
            return False
        waiter = _Waiter(set(blocks), asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._urgent.update(dict.fromkeys(blocks))
        self._wake.set()
        try:
            async with asyncio.timeout(ANNOUNCE_WAIT_S):
                return await waiter.told
        except TimeoutError:
            return False
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def registered(self, next_report: int) -> None:
        """A new registration: everything is told in full, from this number on."""
        self._number = next_report
        self._forget_unanswered()
        self.tell_all()

    def unregistered(self) -> None:
        self._number = 0
        self._disappoint()

    def tell_all(self) -> None:
        """Begin a full report."""
        self._full = FullReport(self._store)
        self._next_full_s = self._now_s() + self._full_interval_s
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._rest()
            try:
                await self._tell()
                self._complain("")
            except KvError as error:
                self._complain(error.message)
                self._disappoint()
                await self._store.runtime.sleep(RETRY_S)

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(REPORT_INTERVAL_S):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _tell(self) -> None:
        if self.is_registered and self._full is None and self._now_s() >= self._next_full_s:
            self.tell_all()
        while self.is_registered:
            if self._unanswered is None:
                self._unanswered = self._compose()
            if self._unanswered is None:
                return
            await self._send(self._unanswered)
            if self._full is None and not self._urgent and len(self._changed) < MAX_BATCH:
                return  # what came meanwhile can wait and travel together

    async def _send(self, message: _Message) -> None:
        known = self._listener.known_sequence
        reply = await self._link.call(REPORT, message.request, REPORT_TIMEOUT_S)
        if self._unanswered is not message:
            return  # registered anew meanwhile: numbers have begun again
        if not self._listener.is_judge(reply.incarnation):
            pass  # its verdicts wait for the next registration, and so does the message
        elif reply.gap:
            self._forget_unanswered()
            self._number = reply.next_report
            self.tell_all() if reply.next_report else self.unregistered()
        else:
            self._unanswered = None
            self._number = reply.next_report
            self._take_verdicts(message, reply)
        self._listener.on_report(reply, known)

    def _compose(self) -> _Message | None:
        """The next message, or None when there is nothing to say."""
        piece = self._next_piece() if self._full is not None and self._full.has_begun else None
        is_within = piece is not None
        ids = self._pick(with_unowned=not is_within)
        held, nowhere = self._states(ids)
        if is_within:  # verdicts of new blocks wait for its end: until then the fence shields them
            self._changed.update(dict.fromkeys(held))
            held = []
        elif not self._changed:  # a block that moved untold would be missed where the master has it
            piece = self._next_piece()
        fences = list(self._store.fences)
        named = [] if is_within else self._listener.names_to_ask(held)
        if not (held or nowhere or piece or named or fences != self._told_fences):
            return None
        self._told_fences = fences
        return self._message(held, nowhere, piece, named)

    def _next_piece(self) -> Piece | None:
        piece = self._full.next_piece() if self._full else None
        if piece is None:
            self._full = None
        return piece

    def _pick(self, *, with_unowned: bool) -> list[BlockId]:
        ids = self._take(self._urgent, MAX_BATCH)
        ids += self._take(self._changed, MAX_BATCH - len(ids))
        if with_unowned and self._now_s() >= self._next_ask_s:
            self._next_ask_s = self._now_s() + REPORT_INTERVAL_S
            ids += self._oldest_unowned(MAX_BATCH - len(ids))
        return list(dict.fromkeys(ids))

    def _take(self, source: dict[BlockId, None], count: int) -> list[BlockId]:
        taken = list(itertools.islice(source, count))
        for block in taken:
            del source[block]
        return taken

    def _oldest_unowned(self, count: int) -> list[BlockId]:
        """Those asked about longest ago; asked again later in turn."""
        unowned = self._store.unowned
        ids = list(itertools.islice(unowned, count))
        for block in ids:
            unowned.move_to_end(block)
        return ids

    def _states(self, ids: Iterable[BlockId]) -> tuple[list[BlockId], list[BlockId]]:
        held: list[BlockId] = []
        nowhere: list[BlockId] = []
        for block in ids:
            known = self._store.get(block)
            (nowhere if known is None or known.leaving else held).append(block)
        return held, nowhere

    def _message(
        self, held: Sequence[BlockId], nowhere: Sequence[BlockId], piece: Piece | None, named: Sequence[BlockId]
    ) -> _Message:
        volumes = [volume.id for volume in self._store.volumes]
        at = {volume: index for index, volume in enumerate(volumes)}
        homes = [self._store.get(block) for block in held]
        request = m.ReportRequest(
            node=self._node,
            boot=self._store.fences.boot,
            number=self._number,
            fences=[m.Fence(boot=boot, counter=counter) for boot, counter in self._told_fences],
            held_ids=_packed(held),
            held_volume=[at[home.volume.id] for home in homes if home is not None],
            volumes=volumes,
            nowhere_ids=_packed(nowhere),
            # Also among the held: only the verdict on it says whether it really died (somebody may have published it).
            dead_ids=_packed([block for block in held if self._listener.is_doomed(block)]),
            name_ids=_packed(named),
        )
        if piece is not None:
            first, last = piece.first, piece.last
            request.full.CopyFrom(m.FullPiece(volume=piece.volume, first=first, last=last, ids=_packed(piece.ids)))
        return _Message(request, held, nowhere, piece, named)

    def _take_verdicts(self, message: _Message, reply: m.ReportReply) -> None:
        full = message.piece.ids if message.piece else ()
        held = _judged(message.held, reply.held, reply.held_policy)
        self._listener.on_verdicts(held + _judged(full, reply.full, reply.full_policy))
        self._listener.on_names(message.named, reply)
        for waiter in self._waiters:
            waiter.missing.difference_update(message.nowhere)
            if not waiter.missing and not waiter.told.done():
                waiter.told.set_result(True)

    def _forget_unanswered(self) -> None:
        """It was not taken, or nobody knows: what it told of is told again."""
        if self._unanswered is not None:
            self._changed.update(dict.fromkeys((*self._unanswered.held, *self._unanswered.nowhere)))
            self._listener.on_names(self._unanswered.named, None)
            self._unanswered = None

    def _disappoint(self) -> None:
        for waiter in self._waiters:
            if not waiter.told.done():
                waiter.told.set_result(False)

    def _complain(self, text: str) -> None:
        if text and text != self._complaint:
            log.warning("no report reached the master: %s; trying on", text)
        self._complaint = text


def _judged(ids: Sequence[BlockId], verdicts: Sequence[m.Verdict.ValueType], policies: Sequence[int]) -> list[Judged]:
    """`policies` may be missing: then no block has one. Raises KvError when the lengths differ."""
    policies = policies or [NONE] * len(ids)
    if not len(ids) == len(verdicts) == len(policies):
        raise KvError("the master's reply to a report is malformed: verdicts do not fit the ids")
    return [Judged(*each) for each in zip(ids, verdicts, policies, strict=True)]


def _packed(blocks: Iterable[BlockId]) -> bytes:
    return b"".join(block.pack() for block in blocks)
