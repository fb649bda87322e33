"""The local worker on its Unix socket: `AsyncLocalWorker` (one connection, multiplexed on the loop), and for threads
`sync_local.LocalWorker` (a small pool of blocking connections), with the same verbs.

Both connect at the first call and again by themselves after the worker restarted. A request is repeated only when it
certainly did not reach the worker (its connection was dead when it was sent), or when it is a question (open, touch,
stat, probe). An fd in a result belongs to the caller; the fds of an answer that nobody waits for any more are closed.

Whoever waits longer than `SILENCE_S` asks on a connection of its own whether the worker lives. One that does may take
its time; one that does not is Silent and opens the breaker: from then on calls are NotAsked at once, until a probe in
the background is answered. A caller's own short timeout proves nothing.

Staging handles are valid for the session, not for the connection. Errors: the worker's own, Unavailable (not there,
gone), Timeout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvstore.client import sockets
from kvstore.client.connection import (
    DEFAULT_S,
    NAME,
    TOLD_S,
    AsyncConnection,
    Lost,
    OnHello,
    given,
    no_hello,
    turned_away,
)
from kvstore.client.deadline import Deadline
from kvstore.client.flight import AsyncFlight
from kvstore.client.sockets import Answer, Opened, ProbedVolume, SealedBlock, StagedFile, Wanted
from kvstore.client.sync_local import LocalWorker
from kvstore.client.weakly import weakly_async
from kvstore.core import sockproto as sp
from kvstore.core.errors import Overloaded, Timeout, Unavailable
from kvstore.core.limits import METADATA_TIMEOUT_S, fetch_timeout_s, store_timeout_s
from kvstore.core.types import Address
from kvstore.rpc.breaker import AsyncBreaker

__all__ = ["AsyncLocalWorker", "LocalWorker"]


class AsyncLocalWorker:
    """For asyncio. Bound to the loop of its first call.

    Attributes: `hello` is the worker's introduction, None before the first connection: its node, cluster and limits.
    """

    def __init__(self, path: str, session: int, cluster: str = "", on_hello: OnHello = lambda hello: None) -> None:
        self.path, self.session, self.cluster, self._on_hello = path, session, cluster, on_hello
        self.hello: sp.HelloReply | None = None
        self._connection: AsyncConnection | None = None
        self._closed = False
        self._connecting: AsyncFlight[AsyncConnection] = AsyncFlight()
        self._weak_ping = weakly_async(self.ping)
        self.breaker = AsyncBreaker(NAME, [path], self._weak_ping, math.inf, owner=self)

    def __repr__(self) -> str:
        return f"<AsyncLocalWorker {self.path} {'connected' if self._connection else 'not connected'}>"

    def __del__(self) -> None:
        """Dropped without `close`: the loop knows the connection, and would keep it."""
        if self._connection and self._connection.alive:
            self._connection.abandon()

    async def connect(self, timeout_s: float = DEFAULT_S) -> sp.HelloReply:
        """Connect if it is not; the worker's introduction."""
        with self.breaker.call(timeout_s):
            await self._connected(Deadline(timeout_s))
        assert self.hello is not None
        return self.hello

    async def stage(self, size_bytes: int, *, timeout_s: float | None = None) -> StagedFile:
        """A new staging file with room for `size_bytes`. Raises NoSpace when there is none."""
        return sockets.staged(await self._request(sp.Stage(size_bytes), given(timeout_s, store_timeout_s(0))))

    async def reserve(
        self, staging: int, size_bytes: int, *, evict: bool = True, timeout_s: float | None = None
    ) -> None:
        """Make the reservation `size_bytes` in all. Raises NoSpace, without `evict` wherever that is not free now."""
        await self._ok(sp.Reserve(staging, size_bytes, evict), given(timeout_s, store_timeout_s(0)))

    async def seal(
        self,
        staging: int,
        size_bytes: int,
        *,
        hash: int | None = None,
        mtime_ns: int | None = None,
        timeout_s: float | None = None,
    ) -> SealedBlock:
        """Make it a block; every fd of it should be closed. `hash` was taken at this size and mtime."""
        request = sp.Seal(staging, size_bytes, hash, mtime_ns)
        return sockets.sealed(await self._request(request, given(timeout_s, store_timeout_s(size_bytes))))

    async def seal_copy(self, staging: int, *, size_bytes: int = 0, timeout_s: float | None = None) -> SealedBlock:
        """Make a block of what it holds now; it stays. `size_bytes` only sizes the default deadline."""
        request = sp.SealCopy(staging)
        return sockets.sealed(await self._request(request, given(timeout_s, store_timeout_s(size_bytes))))

    async def abort(self, staging: int, *, timeout_s: float = DEFAULT_S) -> None:
        """A worker that does not answer is told, too, but nobody waits for it."""
        await self._tell(sp.Abort(staging), timeout_s)

    async def give_up(self, addresses: Sequence[Address], *, timeout_s: float = DEFAULT_S) -> None:
        """Blocks that it sealed for this session, which will not publish them; like `abort`."""
        deadline = Deadline(timeout_s)
        for request in sockets.give_up_requests(addresses):
            await self._tell(request, deadline.left_s)

    async def open(self, wanted: Sequence[Wanted], *, timeout_s: float | None = None) -> Opened:
        """Read-only fds of whole, verified blocks; what is not here is fetched from its replicas."""
        deadline = Deadline(given(timeout_s, fetch_timeout_s(sum(a.length_bytes for a, _ in wanted))))
        fds: Opened = []
        try:
            for part in sockets.batches(wanted):
                left_s = deadline.left_s
                answer = await self._request(sockets.open_request(part, left_s), left_s, repeat=True)
                fds += sockets.opened(answer, len(part))
        except BaseException:
            sockets.close_all(fd for fd in fds if isinstance(fd, int))
            raise
        return fds

    async def touch(self, addresses: Sequence[Address], *, timeout_s: float = DEFAULT_S) -> None:
        deadline = Deadline(timeout_s)
        for request in sockets.touch_requests(addresses):
            await self._ok(request, deadline.left_s, repeat=True)

    async def stat(self, *, timeout_s: float = DEFAULT_S) -> sp.StatReply:
        return sockets.body_of(await self._request(sp.Stat(), timeout_s, repeat=True), sp.StatReply)

    async def probe(self, *, timeout_s: float = DEFAULT_S) -> list[ProbedVolume]:
        """The volumes in service, the fastest tier first, each with an fd of a file in it."""
        return sockets.probed(await self._request(sp.Probe(), timeout_s, repeat=True))

    async def unfinished(self, *, timeout_s: float = DEFAULT_S) -> list[int]:
        """Handles of all that this session has in staging."""
        answer = await self._request(sp.Unfinished(), timeout_s, repeat=True)
        return sockets.body_of(answer, sp.Handles).staging

    async def ping(self, timeout_s: float) -> None:
        """Whether it answers at all, on a connection of its own. Raises its word, Unavailable, Timeout."""
        connection, _ = await AsyncConnection.open(self.path, self._hello(), Deadline(timeout_s))
        connection.close(Unavailable("it was for a ping"))

    def close(self) -> None:
        """Ends the connection, and with it the session unless another connection has it too."""
        self._closed = True
        self.breaker.stop()
        if self._connection:
            self._connection.close(Unavailable("the client was closed"))

    async def _tell(self, request: sp.Request, timeout_s: float) -> None:
        if self.breaker.closed:
            await self._ok(request, timeout_s)
        else:
            await self._ask(request, Deadline(TOLD_S))

    async def _ok(self, request: sp.Request, timeout_s: float, repeat: bool = False) -> None:
        sockets.body_of(await self._request(request, timeout_s, repeat), sp.Ok)

    async def _request(self, request: sp.Request, timeout_s: float, repeat: bool = False) -> Answer:
        with self.breaker.call(timeout_s):
            return await self._ask(request, Deadline(timeout_s), repeat)

    async def _ask(self, request: sp.Request, deadline: Deadline, repeat: bool = False) -> Answer:
        connection = await self._connected(deadline)
        try:
            return await connection.request(request, deadline)
        except Lost as lost:
            if lost.sent and not repeat:
                raise
        connection = await self._connected(deadline)
        return await connection.request(request, deadline)

    async def _connected(self, deadline: Deadline) -> AsyncConnection:
        if self._connection and self._connection.alive:
            return self._connection
        step = Deadline(deadline.at_most(METADATA_TIMEOUT_S))
        try:
            return await self._connecting.run(self._connect, step.timeout_s)
        except Timeout:  # its backlog is full, it says no hello, or another caller waits for it already
            raise no_hello(self.path, step) from None

    async def _connect(self, deadline: Deadline) -> AsyncConnection:
        if self._closed:
            raise Unavailable("the client was closed")
        if self._connection is None or not self._connection.alive:
            try:
                opened = await AsyncConnection.open(self.path, self._hello(), deadline, self._weak_ping)
            except Overloaded as error:
                raise turned_away(self.path, error) from None
            self._connection, self.hello = opened
            self._on_hello(self.hello)
        return self._connection

    def _hello(self) -> sp.Hello:
        return sp.Hello(sp.PROTOCOL_VERSION, self.session, self.cluster)
