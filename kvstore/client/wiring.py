"""What a client is made of, put together: link to the master, cluster, local worker, blocks; for asyncio and for
threads.

Nothing is connected when it is made. `start` learns the cluster's id from the master and says hello to the local
worker with it, so that a worker of another cluster is not used (rule 16); from the hello the client knows its node,
and says so in every later call: the master counts replicas on the caller's own node as live (rule 14).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from functools import partial

from kvstore.client import url
from kvstore.client.blocks import AsyncBlocks, AsyncLocalBlocks, AsyncRemoteBlocks
from kvstore.client.cluster import AsyncCluster, Cluster
from kvstore.client.deadline import Deadline
from kvstore.client.either import AsyncEitherBlocks, EitherBlocks
from kvstore.client.flight import AsyncFlight, Flight
from kvstore.client.local import AsyncLocalWorker
from kvstore.client.masterlink import AsyncMasterLink, MasterLink
from kvstore.client.meta import AsyncMeta, Meta
from kvstore.client.remote import AsyncRemote, Remote
from kvstore.client.sync_blocks import Blocks, LocalBlocks, RemoteBlocks
from kvstore.client.sync_local import LocalWorker
from kvstore.client.threads import Threads
from kvstore.client.weakly import weakly
from kvstore.core.errors import KvError, Unavailable
from kvstore.core.limits import METADATA_TIMEOUT_S
from kvstore.core.sockproto import HelloReply
from kvstore.rpc.failover import AsyncFailover, Failover
from kvstore.rpc.metadata import Caller
from kvstore.rpc.transport import GRPC, Transport
from kvstore.runtime import Runtime, SystemRuntime

log = logging.getLogger(__name__)

THREADS = 8
"""For copies and hashes of an AsyncClient that was given no runtime."""


def new_session() -> int:
    """64 random bits, and not 0: that one is the worker's own."""
    return secrets.randbits(64) or 1


class AsyncParts:
    """For one event loop.

    Attributes: `target`, `session`, `meta`, `cluster`, `remote`, `blocks`, `worker` (None without a
    socket), `runtime`.
    """

    def __init__(
        self,
        target: url.Target,
        socket_path: str,
        staging_dir: str | None,
        runtime: Runtime | None,
        session: int | None = None,
        transport: Transport = GRPC,
    ) -> None:
        asyncio.get_running_loop()  # RuntimeError here rather than a channel on some other loop
        self.target = target
        self._owns_runtime = runtime is None
        self.runtime: Runtime = runtime or SystemRuntime(THREADS, "kvstore-client")
        self.session = new_session() if session is None else session
        self._pid = os.getpid()
        self._caller = Caller(self.session)
        self._link = AsyncFailover(target.endpoints, self._caller, transport)
        self._master = AsyncMasterLink(self._link, target.endpoints)
        self.meta = AsyncMeta(self._master, self.session)
        self.cluster = AsyncCluster(self.meta, self._caller, transport)
        self.remote = AsyncRemote(self.cluster, self.session)
        self.worker = AsyncLocalWorker(socket_path, self.session, on_hello=weakly(self._met)) if socket_path else None
        self.blocks = self._blocks(staging_dir)
        self._starting: AsyncFlight[None] = AsyncFlight()
        self._started = self._closed = False

    async def start(self, deadline: Deadline, known_cluster: str = "") -> None:
        """Once, at the first call. Raises what keeps it from reaching the master, and Timeout."""
        self.check_usable()
        deadline.check()
        if not self._started:
            await self._starting.run(partial(self._begin, known_cluster), deadline.at_most(deadline.answer_s))

    def check_usable(self) -> None:
        """Raises Unavailable after close, and in the child of a fork: the loop and its channels are the parent's."""
        if self._closed:
            raise Unavailable("this client was closed; make a new one")
        if os.getpid() != self._pid:
            raise Unavailable("this AsyncClient was made before a fork; make a new one in the child")

    def check_master(self, deadline: Deadline) -> None:
        """Before bytes are stored that nobody could name: they would lie at the worker as long as this session does.

        Raises NotAsked while the master is away, unless the caller would rather wait.
        """
        self._master.check(deadline.answer_s)

    async def close(self) -> None:
        self._closed = True
        if self.worker is not None:
            self.worker.close()
        await self.remote.close()
        await self._master.close()
        await self.cluster.close()
        await self._link.close()
        if self._owns_runtime:
            self.runtime.close()

    def _blocks(self, staging_dir: str | None) -> AsyncBlocks:
        remote = AsyncRemoteBlocks(self.remote, self.runtime, staging_dir)
        if self.worker is None:
            return remote
        local = AsyncLocalBlocks(self.worker, self.runtime)
        return AsyncEitherBlocks(local, remote, self.worker.path)

    async def _begin(self, known_cluster: str, deadline: Deadline) -> None:
        if self._started:  # while this caller came
            return
        cluster = known_cluster or (await self.cluster.map(timeout_s=deadline.left_s)).cluster
        self._introduce(self._caller._replace(cluster=cluster))
        await self._meet(deadline)
        self._started = True

    async def _meet(self, deadline: Deadline) -> None:
        """Without the local worker the client goes on with remote ones, and meets it when it is there again."""
        if self.worker is None:
            return
        self.worker.cluster = self._caller.cluster
        try:
            await self.worker.connect(deadline.at_most(METADATA_TIMEOUT_S))
        except KvError as error:
            log.warning("the local worker is not used for now: %s", error)

    def _met(self, hello: HelloReply) -> None:
        self._introduce(self._caller._replace(node=hello.node))

    def _introduce(self, caller: Caller) -> None:
        self._caller = caller
        self._link.introduce(caller)
        self.cluster.introduce(caller)


class Parts:
    """For threads, see `AsyncParts`; `threads` in place of `runtime`. Of one process: after a fork `Client` makes new
    ones.
    """

    def __init__(self, target: url.Target, socket_path: str, staging_dir: str | None) -> None:
        self.target = target
        self.session = new_session()
        self._caller = Caller(self.session)
        self._link = Failover(target.endpoints, self._caller)
        self.threads = Threads()
        self._master = MasterLink(self._link, target.endpoints)
        self.meta = Meta(self._master, self.session)
        self.cluster = Cluster(self.meta, self._caller)
        self.remote = Remote(self.cluster, self.session)
        self.worker = LocalWorker(socket_path, self.session, on_hello=weakly(self._met)) if socket_path else None
        self.blocks = self._blocks(staging_dir)
        self._starting: Flight[None] = Flight()
        self._started = self._closed = False

    def start(self, deadline: Deadline) -> None:
        self.check_usable()
        deadline.check()
        if not self._started:
            self._starting.run(self._begin, deadline.at_most(deadline.answer_s))

    def check_usable(self) -> None:
        if self._closed:
            raise Unavailable("this client was closed; make a new one")

    def check_master(self, deadline: Deadline) -> None:
        self._master.check(deadline.answer_s)

    def close(self) -> None:
        self._closed = True
        if self.worker is not None:
            self.worker.close()
        self._master.close()
        self.cluster.close()
        self._link.close()
        self.threads.close()

    def _blocks(self, staging_dir: str | None) -> Blocks:
        remote = RemoteBlocks(self.remote, self.threads, staging_dir)
        if self.worker is None:
            return remote
        return EitherBlocks(LocalBlocks(self.worker, self.threads), remote, self.worker.path)

    def _begin(self, deadline: Deadline) -> None:
        if self._started:
            return
        cluster = self.cluster.map(timeout_s=deadline.left_s)
        self._introduce(self._caller._replace(cluster=cluster.cluster))
        self._meet(deadline)
        self._started = True

    def _meet(self, deadline: Deadline) -> None:
        if self.worker is None:
            return
        self.worker.cluster = self._caller.cluster
        try:
            self.worker.connect(deadline.at_most(METADATA_TIMEOUT_S))
        except KvError as error:
            log.warning("the local worker is not used for now: %s", error)

    def _met(self, hello: HelloReply) -> None:
        self._introduce(self._caller._replace(node=hello.node))

    def _introduce(self, caller: Caller) -> None:
        self._caller = caller
        self._link.introduce(caller)
        self.cluster.introduce(caller)
