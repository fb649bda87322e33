"""A whole worker on one loop: makes the parts, keeps them going, takes them apart. `main` adds the process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine, Iterable, Sequence

from kvstore import __version__
from kvstore.core.errors import KvError
from kvstore.core.limits import MAX_BLOCK_BYTES
from kvstore.core.types import BlockId
from kvstore.pb import master_pb2 as m
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.failover import AsyncFailover, Failover
from kvstore.rpc.link import AsyncLink
from kvstore.rpc.metadata import Caller
from kvstore.rpc.server import Server, serve, stop_all
from kvstore.runtime import Runtime
from kvstore.worker import told
from kvstore.worker.background import Background
from kvstore.worker.block import Block
from kvstore.worker.bulk import Bulk
from kvstore.worker.counters import Counters, Reason
from kvstore.worker.disk import Disk
from kvstore.worker.evict import Evictor
from kvstore.worker.fdsocket import FdServer
from kvstore.worker.fences import Fences
from kvstore.worker.fetch import Fetcher
from kvstore.worker.growth import Growth
from kvstore.worker.heartbeat import Heart
from kvstore.worker.heatfile import HeatFile
from kvstore.worker.held import PROBE_INTERVAL_S, HeldFiles
from kvstore.worker.membership import Membership
from kvstore.worker.mover import Mover, Pace
from kvstore.worker.opener import Opener
from kvstore.worker.peers import Peers
from kvstore.worker.policies import Policies
from kvstore.worker.report import Judged, Reporter
from kvstore.worker.room import Room
from kvstore.worker.seal import Sealer
from kvstore.worker.seals import Seals
from kvstore.worker.service import WorkerService
from kvstore.worker.sessions import Sessions
from kvstore.worker.settings import Settings
from kvstore.worker.staging import Staging
from kvstore.worker.store import Store
from kvstore.worker.verbs import Introduction, Verbs
from kvstore.worker.verify import Verifier
from kvstore.worker.volume import Volume

log = logging.getLogger(__name__)
UPKEEP_INTERVAL_S = 1.0
"""Staging sizes, free space of the disks, ends of sessions, identities."""
STOP_TIMEOUT_S = 5.0
ANY_HOST = ("0.0.0.0", "[::]")
"""Listening everywhere says nothing of how others get here."""


class Worker:
    """Made on its loop with its open volumes; then `start`.

    joined   set once a master has registered us
    refused  the error to end with: the master will have nothing to do with us, or a part of the worker broke
    """

    def __init__(self, settings: Settings, runtime: Runtime, volumes: Sequence[Volume], disk: Disk) -> None:
        s = self.settings = settings
        self.runtime, self.disk = runtime, disk
        self.counters, self.background = Counters(), Background()
        self.membership = Membership(volumes)
        if s.accept_rollback:
            self.membership.accept_rollback()
        self.store = Store(runtime, volumes, Fences(runtime.random_u64() or 1), self.counters, s.pin_share)
        self.heat_file = HeatFile(self.store)
        self.sessions = Sessions(s.session_grace_s, runtime.monotonic_s())
        self.held = HeldFiles(runtime, disk)
        self.evictor = Evictor(self.store, disk, self.held, self.background, self._announce)
        self.room = Room(self.store, self.evictor)
        self.staging = Staging(self.store, disk, self.room, self.held, self.background, MAX_BLOCK_BYTES)
        self.room.look = self.staging.look
        self.growth = Growth(self.store, disk, self.staging, self.room, self.background)
        self.sealer = Sealer(self.store, disk, self.staging, self.background)
        self.seals = Seals(self.store, self.staging, self.sealer)
        self.verifier = Verifier(runtime, self.store, disk, self.background)
        self.policies = Policies(self.store, self.evictor, self.background)
        pace = Pace(s.move_bytes_per_s, s.moves_at_a_time)
        self.mover = Mover(
            self.store, disk, self.staging, self.sealer, self.evictor, self.verifier, self.background, pace
        )
        self.store.on_touch, self.store.on_full = self.mover.touched, self.room.refill
        self.room.demote, self.room.on_take = self.mover.demote, self.mover.filled
        self.peers = Peers(self._connect)
        self.fetcher = Fetcher(
            s.node,
            self.store,
            disk,
            self.staging,
            self.sealer,
            self.peers,
            self.held,
            self.background,
            self.mover.place_fetched,
        )
        self.opener = Opener(self.store, disk, self.verifier, self.fetcher)
        self.bulk = Bulk(self.store, disk, self.sessions, self.staging, self.sealer, self.opener)
        self.refused: asyncio.Future[KvError] = asyncio.get_running_loop().create_future()
        self.joined = asyncio.Event()
        self.endpoint = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._server: Server | None = None
        self._fd_server: FdServer | None = None
        self._heart: Heart | None = None
        self._reporter: Reporter | None = None
        self._report_link: AsyncFailover | None = None

    async def start(self) -> None:
        """Serve. The master may be away: it is tried until it is there. Raises KvError, OSError."""
        await self.staging.restore()
        await self.heat_file.load()
        await self.membership.save(self.runtime, self.store, self.store.fences)
        service = WorkerService(self.stat, self.policies.describe, self.bulk, lambda: self.membership.cluster)
        self._server = await serve(self.settings.listen, [service.add_to], service.raw_handlers())
        self.endpoint = self._advertised(self._server)
        self._start_reporting()
        self._start_socket()
        self._tasks += [
            self._spawn(work())
            for work in (
                self._join,
                self._upkeep,
                self._probe,
                self.growth.run,
                self.heat_file.run,
                self.mover.run,
                self.mover.run_relief,
            )
        ]
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """Stop serving, let what touches files end, give the volumes back."""
        if self._heart:
            await self._heart.stop()
        await stop_all(*self._tasks)
        if self._fd_server:
            await self._fd_server.close()
        if self._server:
            await self._server.stop()
        await self.background.close(STOP_TIMEOUT_S)
        await self.peers.close()
        if self._report_link:
            await self._report_link.close()
        await self.membership.save(self.runtime, self.store, self.store.fences)
        await self.heat_file.save()
        self.held.close()
        for volume in self.store.volumes:
            volume.close()

    @property
    def complaint(self) -> str:
        """Why the last heartbeat did not reach a master that takes it; "" when it did, or none was sent yet."""
        return self._heart.complaint if self._heart else ""

    def stat(self) -> w.WorkerStatReply:
        return w.WorkerStatReply(
            node=self.settings.node,
            cluster=self.membership.cluster,
            volumes=told.volumes(self.store),
            blocks=len(self.store),
            sessions=len(self.sessions),
            staging_files=len(self.staging),
            unpublished_blocks=self.store.fences.count,
            version=__version__,
        )

    # ---- heartbeat.Owner

    @property
    def known_sequence(self) -> int:
        return self.membership.sequence

    def beat(self, *, leaving: bool = False) -> m.HeartbeatRequest:
        beat = m.HeartbeatRequest(
            node=self.settings.node,
            boot=self.store.fences.boot,
            volumes=told.volumes(self.store),
            counters=self.counters.to_pb(),
            blocks=len(self.store),
            leaving=leaving,
            tiers=told.tiers(self.store),
        )
        self.policies.tell(beat)
        return beat

    async def registration(self) -> m.RegisterRequest:
        return m.RegisterRequest(
            node=self.settings.node,
            boot=self.store.fences.boot,
            endpoint=self.endpoint,
            http=self.settings.http,
            cluster=self.membership.cluster,
            sequence=self.membership.sequence,
            volumes=told.volumes(self.store),
            version=__version__,
            fences=[m.Fence(boot=boot, counter=counter) for boot, counter in self.store.fences],
            seen=[m.Seen(incarnation=seen.incarnation, sequence=seen.sequence) for seen in self.membership.seen],
        )

    def on_registered(self, reply: m.RegisterReply, known_sequence: int) -> None:
        if self._register(reply, known_sequence) and self._reporter:
            self.staging.max_block_bytes = reply.max_block_bytes or MAX_BLOCK_BYTES
            log.info(
                "registered as %s with cluster %s at sequence %d", self.settings.node, reply.cluster, reply.sequence
            )
            self._reporter.registered(reply.next_report)
            self.joined.set()

    def on_beat(self, reply: m.HeartbeatReply, known_sequence: int) -> None:
        if not self._meet(reply, known_sequence):
            return
        if self._reporter and any(command.HasField("register") for command in reply.commands):
            self._reporter.unregistered()  # the heart has read it too, and registers with its next beat
        self._obey(command for command in reply.commands if not command.HasField("register"))
        self.policies.on_beat(reply, collects=self.membership.collects)

    def on_refused(self, error: KvError) -> None:
        if not self.refused.done():
            self.refused.set_result(error)

    # ---- report.Listener

    def is_doomed(self, block: BlockId) -> bool:
        known = self.store.get(block)
        return known is not None and self._is_over(known) and self.store.fences.is_mine(block)

    def on_verdicts(self, verdicts: Sequence[Judged]) -> None:
        """Owned: a victim from now on. Dead: unlink. Unknown past its grace: a leftover, if it cannot be made dead."""
        dead: list[Block] = []
        leftover: list[Block] = []
        for block_id, verdict, policy in verdicts:
            block = self.store.get(block_id)
            if block is None or block.leaving:
                continue
            if verdict == m.OWNED:
                self.store.own(block)
                self.policies.label(block, policy)
            elif not self.membership.collects:
                continue
            elif verdict == m.DEAD:
                dead.append(block)
            else:
                self.store.disown(block)
                if self._is_over(block) and not self.store.fences.is_mine(block_id):
                    leftover.append(block)
        self._remove(dead, leftover)

    def is_judge(self, incarnation: int) -> bool:
        return self.membership.is_judge(incarnation)

    def on_report(self, reply: m.ReportReply, known_sequence: int) -> None:
        if self._meet(reply, known_sequence):
            self._obey(reply.commands)

    # ---- the rest

    def _remove(self, dead: Sequence[Block], leftover: Sequence[Block]) -> None:
        going: dict[Reason, list[Block]] = {}
        for block in dead:  # one that is over died at our own word, as nobody had published it
            going.setdefault(Reason.ORPHAN if self._is_over(block) else Reason.REMOVED, []).append(block)
        for reason, blocks in going.items():
            self.background.start(self.evictor.drop(blocks, reason))
        if leftover:
            self.background.start(self.evictor.evict(leftover, Reason.ORPHAN))

    def _is_over(self, block: Block) -> bool:
        """Rule 11: unowned, and nobody will come back for it."""
        if block.owned or not self.membership.collects:
            return False
        now = self.runtime.monotonic_s()
        late = now >= block.since_s + self.settings.session_grace_s
        return block.given_up or block.fetched or (late and self.sessions.is_over(block.session, now))

    def _register(self, reply: m.RegisterReply, known: int) -> bool:
        if not reply.cluster:
            return True
        try:
            self.membership.registered(
                reply.incarnation, reply.cluster, reply.sequence, known, rolled_back=reply.rolled_back
            )
        except KvError as error:
            self.on_refused(error)
            return False
        return True

    def _meet(self, reply: m.HeartbeatReply | m.ReportReply, known: int) -> bool:
        if not reply.cluster:
            return True  # an answer that says nothing of itself
        if not self.membership.is_judge(reply.incarnation):
            self._register_again()
            return False
        try:
            self.membership.meet(reply.cluster, reply.sequence, known)
        except KvError as error:
            self.on_refused(error)
            return False
        return True

    def _obey(self, commands: Iterable[m.Command]) -> None:
        for command in commands:
            match command.WhichOneof("command"):
                case "register":
                    self._register_again()
                case "full_report" if self._reporter and self._reporter.is_registered:
                    self._reporter.tell_all()
                case "unlink":
                    self._unlink(command.unlink.block_ids)
                case "report_again":
                    for block in unpacked(command.report_again.block_ids):
                        self.store.on_change(block)

    def _register_again(self) -> None:
        if self._heart and self._reporter:
            self._reporter.unregistered()
            self._heart.register_again()

    def _unlink(self, packed: bytes) -> None:
        """The master's word that these are dead; it repeats it until it hears that they are nowhere."""
        if not self.membership.collects:
            return
        ids = unpacked(packed)
        blocks = [block for block in map(self.store.get, ids) if block is not None]
        self._remove(blocks, ())
        for block in ids:
            self.store.on_change(block)

    async def _announce(self, blocks: Sequence[BlockId]) -> bool:
        return self._reporter is not None and await self._reporter.announce(blocks)

    async def _join(self) -> None:
        """Find all blocks, then tell the master of them: its fences must know what may still be published."""
        await self.store.scan()
        blocks, volumes = len(self.store), self.store.in_service
        log.info("%s on %s", counted(blocks, "block"), counted(len(volumes), "volume"))
        for volume in volumes:
            if doubt := volume.books.doubt():
                log.warning("%s: %s", volume.path, doubt)
        self._heart = Heart(self, Failover(self.settings.master, self._caller()))
        self._heart.start()

    async def _upkeep(self) -> None:
        while True:
            await self.runtime.sleep(UPKEEP_INTERVAL_S)
            now = self.runtime.monotonic_s()
            for volume in self.store.in_service:
                await self.staging.look(volume)
            await self.staging.expire(self.sessions, now)
            self.seals.forget_over(self.sessions, now)
            self.sessions.forget_over(now)
            self.policies.upkeep(expire=self.membership.collects)
            if self.store.scanned.is_set():
                await self.membership.save(self.runtime, self.store, self.store.fences)

    async def _probe(self) -> None:
        while True:
            await self.runtime.sleep(PROBE_INTERVAL_S)
            if len(self.held):
                await self.held.probe()

    def _start_reporting(self) -> None:
        self._report_link = AsyncFailover(self.settings.master, self._caller())
        interval = self.settings.full_report_s
        link = self._report_link
        self._reporter = Reporter(self.settings.node, self.store, link, self, interval, self.runtime.monotonic_s)
        self.store.on_change, self.store.on_free = self._reporter.changed, self.room.freed
        self._tasks.append(self._spawn(self._reporter.run()))

    def _start_socket(self) -> None:
        me = Introduction(self.settings.node, self.endpoint)
        verbs = Verbs(
            me, self.membership, self.store, self.sessions, self.staging, self.sealer, self.seals, self.opener,
            self.background,
        )  # fmt: skip
        self._fd_server = FdServer(self.settings.socket, self.settings.socket_mode, verbs)
        self._fd_server.start()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A worker without one of its loops would only look alive: it ends, and its supervisor starts it anew."""
        if not task.cancelled() and (error := task.exception()):
            log.error("a loop of the worker failed", exc_info=error)
            self.on_refused(KvError("internal error; the worker's log has the trace"))

    def _advertised(self, server: Server) -> str:
        host = self.settings.advertise or server.host
        return f"{socket.gethostname() if host in ANY_HOST else host}:{server.port}"

    def _caller(self) -> Caller:
        return Caller(self.store.fences.boot, self.settings.node, self.membership.cluster)

    def _connect(self, endpoint: str) -> AsyncLink:
        return AsyncLink(endpoint, self._caller())


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def unpacked(ids: bytes) -> list[BlockId]:
    return [BlockId.unpack(ids, at) for at in range(0, len(ids) - 15, 16)]
