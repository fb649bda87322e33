"""The worker's side of its talk with the master: what it says of itself, and how it obeys what the answers say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from kvstore import __version__
from kvstore.core.errors import KvError
from kvstore.core.limits import MAX_BLOCK_BYTES
from kvstore.core.types import BlockId
from kvstore.pb import master_pb2 as m
from kvstore.rpc.failover import AsyncFailover
from kvstore.rpc.metadata import Caller
from kvstore.rpc.transport import Transport
from kvstore.worker.background import Background
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.blocks.store import Store
from kvstore.worker.capacity.evict import Evictor
from kvstore.worker.capacity.policies import Policies
from kvstore.worker.reports import told
from kvstore.worker.reports.heartbeat import Heart, MakeNerve
from kvstore.worker.reports.membership import Membership
from kvstore.worker.reports.names import Names
from kvstore.worker.reports.recover import Recovery
from kvstore.worker.reports.report import Judged, Reporter
from kvstore.worker.settings import Settings
from kvstore.worker.writes.sessions import Sessions
from kvstore.worker.writes.staging import Staging

log = logging.getLogger(__name__)


class MasterSync:
    """Owner of the heart, listener of the reporter (`heartbeat.Owner`, `report.Listener`). Made on the worker's loop.

    `joined` and `refused`: as of the `Worker`.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        membership: Membership,
        sessions: Sessions,
        staging: Staging,
        evictor: Evictor,
        policies: Policies,
        background: Background,
        caller: Callable[[], Caller],
        transport: Transport,
        nerve: MakeNerve,
        names: Names,
    ) -> None:
        self._settings, self._store, self._membership = settings, store, membership
        self._sessions, self._staging, self._evictor = sessions, staging, evictor
        self._policies, self._background, self._caller, self._nerve = policies, background, caller, nerve
        self._names = names
        self.joined = asyncio.Event()
        self.refused: asyncio.Future[KvError] = asyncio.get_running_loop().create_future()
        self._endpoint = ""
        self._report_link = AsyncFailover(settings.master, caller(), transport)
        self._reporter = Reporter(
            settings.node, store, self._report_link, self, settings.full_report_s, store.runtime.monotonic_s
        )
        self._recovery = Recovery(settings.node, store, names.disk, self._report_link, background)
        self._heart: Heart | None = None

    def join(self, endpoint: str) -> None:
        """Register as reachable at `endpoint`, and send heartbeats from here on. The store has found all blocks: the
        fences must know what may still be published.
        """
        self._endpoint = endpoint
        self._heart = Heart(self, self._nerve(self._settings.master, self._caller()))
        self._heart.start()

    async def report(self) -> None:
        """Send reports, until cancelled."""
        await self._reporter.run()

    async def leave(self) -> None:
        """The last heartbeat."""
        if self._heart:
            await self._heart.stop()

    async def close(self) -> None:
        await self._report_link.close()

    @property
    def complaint(self) -> str:
        """As of the `Worker`."""
        return self._heart.complaint if self._heart else ""

    def changed(self, block: BlockId) -> None:
        """Tell of this block with the next report."""
        self._reporter.changed(block)

    async def announce(self, blocks: Sequence[BlockId]) -> bool:
        """Tell of these now; whether the master has taken it."""
        return await self._reporter.announce(blocks)

    # ---- heartbeat.Owner

    @property
    def known_sequence(self) -> int:
        return self._membership.sequence

    def beat(self, *, leaving: bool = False) -> m.HeartbeatRequest:
        beat = m.HeartbeatRequest(
            node=self._settings.node,
            boot=self._store.fences.boot,
            volumes=told.volumes(self._store),
            counters=self._store.counters.to_pb(),
            blocks=len(self._store),
            leaving=leaving,
            tiers=told.tiers(self._store),
        )
        self._policies.tell(beat)
        return beat

    async def registration(self) -> m.RegisterRequest:
        return m.RegisterRequest(
            node=self._settings.node,
            boot=self._store.fences.boot,
            endpoint=self._endpoint,
            http=self._settings.http,
            cluster=self._membership.cluster,
            sequence=self._membership.sequence,
            volumes=told.volumes(self._store),
            version=__version__,
            fences=[m.Fence(boot=boot, counter=counter) for boot, counter in self._store.fences],
            seen=[m.Seen(incarnation=seen.incarnation, sequence=seen.sequence) for seen in self._membership.seen],
            minted=self._store.fences.next_counter,
        )

    def on_registered(self, reply: m.RegisterReply, known_sequence: int) -> None:
        if self._register(reply, known_sequence):
            self._staging.max_block_bytes = reply.max_block_bytes or MAX_BLOCK_BYTES
            log.info(
                "registered as %s with cluster %s at sequence %d", self._settings.node, reply.cluster, reply.sequence
            )
            self._reporter.registered(reply.next_report)
            self._names.want_all()  # files may have been renamed while nobody could tell us
            self.joined.set()

    def on_beat(self, reply: m.HeartbeatReply, known_sequence: int) -> None:
        if not self._meet(reply, known_sequence):
            return
        if any(command.HasField("register") for command in reply.commands):
            self._reporter.unregistered()  # the heart has read it too, and registers with its next beat
        self._obey(command for command in reply.commands if not command.HasField("register"))
        self._policies.on_beat(reply, collects=self._membership.collects)

    def on_refused(self, error: KvError) -> None:
        if not self.refused.done():
            self.refused.set_result(error)

    # ---- report.Listener

    def is_doomed(self, block: BlockId) -> bool:
        known = self._store.get(block)
        return known is not None and self._is_over(known) and self._store.fences.is_mine(block)

    def on_verdicts(self, verdicts: Sequence[Judged]) -> None:
        """Owned: a victim from now on. Dead: unlink. Unknown past its grace: a leftover, if it cannot be made dead."""
        dead: list[Block] = []
        leftover: list[Block] = []
        for block_id, verdict, policy in verdicts:
            block = self._store.get(block_id)
            if block is None or block.leaving:
                continue
            if verdict == m.OWNED:
                self._store.own(block)
                self._policies.label(block, policy)
            elif not self._membership.collects:
                continue
            elif verdict == m.DEAD:
                dead.append(block)
            else:
                self._store.disown(block)
                if self._is_over(block) and not self._store.fences.is_mine(block_id):
                    leftover.append(block)
        self._remove(dead, leftover)

    def is_judge(self, incarnation: int) -> bool:
        return self._membership.is_judge(incarnation)

    def on_report(self, reply: m.ReportReply, known_sequence: int) -> None:
        if self._meet(reply, known_sequence):
            self._obey(reply.commands)

    def names_to_ask(self, held: Sequence[BlockId]) -> list[BlockId]:
        return self._names.take(held)

    def on_names(self, asked: Sequence[BlockId], reply: m.ReportReply | None) -> None:
        self._names.on_reply(asked, reply)

    # ---- the rest

    def _remove(self, dead: Sequence[Block], leftover: Sequence[Block]) -> None:
        going: dict[Reason, list[Block]] = {}
        for block in dead:  # one that is over died at our own word, as nobody had published it
            going.setdefault(Reason.ORPHAN if self._is_over(block) else Reason.REMOVED, []).append(block)
        for reason, blocks in going.items():
            self._background.start(self._evictor.drop(blocks, reason))
        if leftover:
            self._background.start(self._evictor.evict(leftover, Reason.ORPHAN))

    def _is_over(self, block: Block) -> bool:
        """Rule 11: unowned, and nobody will come back for it."""
        if block.owned or not self._membership.collects:
            return False
        now = self._store.runtime.monotonic_s()
        late = now >= block.since_s + self._settings.session_grace_s
        return block.given_up or block.fetched or (late and self._sessions.is_over(block.session, now))

    def _register(self, reply: m.RegisterReply, known: int) -> bool:
        if not reply.cluster:
            return True
        try:
            self._membership.registered(
                reply.incarnation, reply.cluster, reply.sequence, known,
                rolled_back=reply.rolled_back, recovering=reply.recovering, recovered=reply.recovered,
            )  # fmt: skip
        except KvError as error:
            self.on_refused(error)
            return False
        return True

    def _meet(self, reply: m.HeartbeatReply | m.ReportReply, known: int) -> bool:
        if not reply.cluster:
            return True  # an answer that says nothing of itself
        if not self._membership.is_judge(reply.incarnation):
            self._register_again()
            return False
        try:
            self._membership.meet(reply.cluster, reply.sequence, known)
        except KvError as error:
            self.on_refused(error)
            return False
        return True

    def _obey(self, commands: Iterable[m.Command]) -> None:
        for command in commands:
            match command.WhichOneof("command"):
                case "register":
                    self._register_again()
                case "full_report" if self._reporter.is_registered:
                    self._reporter.tell_all()
                case "unlink":
                    self._unlink(command.unlink.block_ids)
                case "report_again":
                    for block in unpacked(command.report_again.block_ids):
                        self._store.on_change(block)
                        self._names.want(block)
                case "send_names":
                    self._recovery.start()

    def _register_again(self) -> None:
        if self._heart:
            self._reporter.unregistered()
            self._heart.register_again()

    def _unlink(self, packed: bytes) -> None:
        """The master's word that these are dead; it repeats it until it hears that they are nowhere."""
        if not self._membership.collects:
            return
        ids = unpacked(packed)
        blocks = [block for block in map(self._store.get, ids) if block is not None]
        self._remove(blocks, ())
        for block in ids:
            self._store.on_change(block)


def unpacked(ids: bytes) -> list[BlockId]:
    return [BlockId.unpack(ids, at) for at in range(0, len(ids) - 15, 16)]
