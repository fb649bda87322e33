"""A whole worker on one loop: makes the parts, keeps them going, takes them apart. `main` adds the process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine, Sequence

from kvstore import __version__
from kvstore.core.errors import KvError
from kvstore.core.limits import MAX_BLOCK_BYTES
from kvstore.core.types import BlockId
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.link import AsyncLink
from kvstore.rpc.metadata import Caller
from kvstore.rpc.server import Server, serve, stop_all
from kvstore.rpc.transport import GRPC, Transport
from kvstore.runtime import Runtime
from kvstore.worker.background import Background
from kvstore.worker.blocks.counters import Counters
from kvstore.worker.blocks.fences import Fences
from kvstore.worker.blocks.heatfile import HeatFile
from kvstore.worker.blocks.scrub import Limits, Scrubber
from kvstore.worker.blocks.store import Store
from kvstore.worker.blocks.verify import Verifier
from kvstore.worker.capacity.evict import Evictor
from kvstore.worker.capacity.policies import Policies
from kvstore.worker.capacity.room import Room
from kvstore.worker.mover import Mover, Pace
from kvstore.worker.reports import told
from kvstore.worker.reports.heartbeat import MakeNerve, own_thread
from kvstore.worker.reports.mastersync import MasterSync
from kvstore.worker.reports.membership import Membership
from kvstore.worker.reports.names import Names
from kvstore.worker.serving.bulk import Bulk
from kvstore.worker.serving.fdsocket import FdServer
from kvstore.worker.serving.fetch import Fetcher
from kvstore.worker.serving.opener import Opener
from kvstore.worker.serving.peers import Peers
from kvstore.worker.serving.service import WorkerService
from kvstore.worker.serving.verbs import Introduction, Verbs
from kvstore.worker.settings import Settings
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.volumes.held import PROBE_INTERVAL_S, HeldFiles
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.writes.growth import Growth
from kvstore.worker.writes.seal import Sealer
from kvstore.worker.writes.seals import Seals
from kvstore.worker.writes.sessions import Sessions
from kvstore.worker.writes.staging import Staging

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

    def __init__(
        self, settings: Settings, runtime: Runtime, volumes: Sequence[Volume], disk: Disk,
        transport: Transport = GRPC, nerve: MakeNerve = own_thread,
    ) -> None:  # fmt: skip
        s = self.settings = settings
        self.runtime, self.disk, self._transport = runtime, disk, transport
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
        self.scrubber = Scrubber(self.store, disk, self.verifier, Limits(s.scrub_bytes_per_s, s.scrub_interval_s))
        self.policies = Policies(self.store, self.evictor, self.background)
        self.names = Names(self.store, disk, self.background, self.room, lambda: self.membership.collects)
        pace = Pace(s.move_bytes_per_s, s.moves_at_a_time)
        self.mover = Mover(
            self.store, disk, self.staging, self.sealer, self.evictor, self.verifier, self.background, pace, self.names
        )
        self.store.on_touch, self.store.on_full = self.mover.touched, self.room.refill
        self.room.demote, self.room.on_take = self.mover.demote, self.mover.filled
        self.peers = Peers(self._connect, runtime.monotonic_s)
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
        self.master_sync = MasterSync(
            s, self.store, self.membership, self.sessions, self.staging, self.evictor, self.policies, self.background,
            self._caller, transport, nerve, self.names,
        )  # fmt: skip
        self.joined, self.refused = self.master_sync.joined, self.master_sync.refused
        self.endpoint = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._server: Server | None = None
        self._fd_server: FdServer | None = None

    async def start(self) -> None:
        """Serve. The master may be away: it is tried until it is there. Raises KvError, OSError."""
        await self.staging.restore()
        await self.heat_file.load()
        await self.membership.save(self.runtime, self.store, self.store.fences)
        service = WorkerService(
            self.stat, self.policies.describe, self.seals.give_up, self.bulk, lambda: self.membership.cluster
        )
        self._server = await serve(self.settings.listen, [service.add_to], service.raw_handlers(), self._transport)
        self.endpoint = self._advertised(self._server)
        self.store.on_change, self.store.on_free = self.master_sync.changed, self.room.freed
        self._tasks.append(self._spawn(self.master_sync.report()))
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
                self.scrubber.run,
            )
        ]
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """Stop serving, let what touches files end, give the volumes back."""
        await self.master_sync.leave()
        await stop_all(*self._tasks)
        if self._fd_server:
            await self._fd_server.close()
        if self._server:
            await self._server.stop()
        await self.background.close(STOP_TIMEOUT_S)
        await self.peers.close()
        await self.master_sync.close()
        await self.membership.save(self.runtime, self.store, self.store.fences)
        await self.heat_file.save()
        await self.scrubber.save()
        self.held.close()
        for volume in self.store.volumes:
            volume.close()

    @property
    def complaint(self) -> str:
        """Why the last heartbeat did not reach a master that takes it; "" when it did, or none was sent yet."""
        return self.master_sync.complaint

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

    async def _announce(self, blocks: Sequence[BlockId]) -> bool:
        return await self.master_sync.announce(blocks)

    async def _join(self) -> None:
        """Find all blocks, then tell the master of them: its fences must know what may still be published."""
        await self.store.scan()
        blocks, volumes = len(self.store), self.store.in_service
        log.info("%s on %s", counted(blocks, "block"), counted(len(volumes), "volume"))
        for volume in volumes:
            if doubt := volume.books.doubt():
                log.warning("%s: %s", volume.path, doubt)
        self.master_sync.join(self.endpoint)

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
            self.master_sync.on_refused(KvError("internal error; the worker's log has the trace"))

    def _advertised(self, server: Server) -> str:
        host = self.settings.advertise or server.host
        return f"{socket.gethostname() if host in ANY_HOST else host}:{server.port}"

    def _caller(self) -> Caller:
        return Caller(self.store.fences.boot, self.settings.node, self.membership.cluster)

    def _connect(self, endpoint: str) -> AsyncLink:
        return AsyncLink(endpoint, self._caller(), self._transport)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
