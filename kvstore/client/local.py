"""The local worker on its Unix socket: `AsyncLocalWorker` (one connection, multiplexed on the loop) and `LocalWorker`
(a small pool of blocking connections for threads), with the same verbs.

Both connect at the first call and again by themselves after the worker restarted. A request is repeated only when it
certainly did not reach the worker (its connection was dead when it was sent), or when it is a question (open, touch,
stat, probe). An fd in a result belongs to the caller; the fds of an answer that nobody waits for any more are closed.

Staging handles are valid for the session, not for the connection. Errors: the worker's own, Unavailable (not there,
gone), Timeout.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from kvstore.client import fork, sockets
from kvstore.client.connection import BACKLOG_PAUSE_S, AsyncConnection, Lost, connect_now, timed_out
from kvstore.client.deadline import Deadline
from kvstore.client.flight import AsyncFlight
from kvstore.client.sockets import Answer, Opened, ProbedVolume, SealedBlock, StagedFile, Wanted, unreachable
from kvstore.core import sockproto as sp
from kvstore.core.errors import Timeout, Unavailable
from kvstore.core.limits import CONNECT_TIMEOUT_S, METADATA_TIMEOUT_S, fetch_timeout_s, store_timeout_s
from kvstore.core.types import Address

_DEFAULT_S = METADATA_TIMEOUT_S
OnHello = Callable[[sp.HelloReply], None]
"""Told of every new connection: the worker may be another one since."""
_MAX_IDLE = 8
"""Idle blocking connections kept; a burst of more threads opens more and closes them again."""


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

    def __repr__(self) -> str:
        return f"<AsyncLocalWorker {self.path} {'connected' if self._connection else 'not connected'}>"

    async def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> sp.HelloReply:
        """Connect if it is not; the worker's introduction."""
        await self._connected(Deadline(timeout_s))
        assert self.hello is not None
        return self.hello

    async def stage(self, size_bytes: int, *, timeout_s: float | None = None) -> StagedFile:
        """A new staging file with room for `size_bytes`. Raises NoSpace when there is none."""
        return sockets.staged(await self._request(sp.Stage(size_bytes), _given(timeout_s, store_timeout_s(0))))

    async def reserve(
        self, staging: int, size_bytes: int, *, evict: bool = True, timeout_s: float | None = None
    ) -> None:
        """Make the reservation `size_bytes` in all. Raises NoSpace, without `evict` wherever that is not free now."""
        await self._ok(sp.Reserve(staging, size_bytes, evict), _given(timeout_s, store_timeout_s(0)))

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
        return sockets.sealed(await self._request(request, _given(timeout_s, store_timeout_s(size_bytes))))

    async def seal_copy(self, staging: int, *, size_bytes: int = 0, timeout_s: float | None = None) -> SealedBlock:
        """Make a block of what it holds now; it stays. `size_bytes` only sizes the default deadline."""
        request = sp.SealCopy(staging)
        return sockets.sealed(await self._request(request, _given(timeout_s, store_timeout_s(size_bytes))))

    async def abort(self, staging: int, *, timeout_s: float = _DEFAULT_S) -> None:
        await self._ok(sp.Abort(staging), timeout_s)

    async def open(self, wanted: Sequence[Wanted], *, timeout_s: float | None = None) -> Opened:
        """Read-only fds of whole, verified blocks; what is not here is fetched from its replicas."""
        deadline = Deadline(_given(timeout_s, fetch_timeout_s(sum(a.length_bytes for a, _ in wanted))))
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

    async def touch(self, addresses: Sequence[Address], *, timeout_s: float = _DEFAULT_S) -> None:
        deadline = Deadline(timeout_s)
        for request in sockets.touch_requests(addresses):
            await self._ok(request, deadline.left_s, repeat=True)

    async def stat(self, *, timeout_s: float = _DEFAULT_S) -> sp.StatReply:
        return sockets.body_of(await self._request(sp.Stat(), timeout_s, repeat=True), sp.StatReply)

    async def probe(self, *, timeout_s: float = _DEFAULT_S) -> list[ProbedVolume]:
        """The volumes in service, the fastest tier first, each with an fd of a file in it."""
        return sockets.probed(await self._request(sp.Probe(), timeout_s, repeat=True))

    async def unfinished(self, *, timeout_s: float = _DEFAULT_S) -> list[int]:
        """Handles of all that this session has in staging."""
        answer = await self._request(sp.Unfinished(), timeout_s, repeat=True)
        return sockets.body_of(answer, sp.Handles).staging

    def close(self) -> None:
        """Ends the connection, and with it the session unless another connection has it too."""
        self._closed = True
        if self._connection:
            self._connection.close(Unavailable("the client was closed"))

    async def _ok(self, request: sp.Request, timeout_s: float, repeat: bool = False) -> None:
        sockets.body_of(await self._request(request, timeout_s, repeat), sp.Ok)

    async def _request(self, request: sp.Request, timeout_s: float, repeat: bool = False) -> Answer:
        deadline = Deadline(timeout_s)
        connection = await self._connected(deadline)
        try:
            return await connection.request(request, deadline)
        except Lost as lost:
            if lost.sent and not repeat:
                raise Unavailable(lost.message, fault=self.path) from None
        connection = await self._connected(deadline)
        return await connection.request(request, deadline)

    async def _connected(self, deadline: Deadline) -> AsyncConnection:
        if self._connection and self._connection.alive:
            return self._connection
        step = Deadline(deadline.at_most(CONNECT_TIMEOUT_S))
        try:
            return await self._connecting.run(self._connect, step.timeout_s)
        except Timeout:  # its backlog is full, it says no hello, or another caller waits for it already
            raise timed_out(self.path, step) from None

    async def _connect(self, deadline: Deadline) -> AsyncConnection:
        if self._closed:
            raise Unavailable("the client was closed")
        if self._connection is None or not self._connection.alive:
            self._connection, self.hello = await AsyncConnection.open(self.path, self._hello(), deadline)
            self._on_hello(self.hello)
        return self._connection

    def _hello(self) -> sp.Hello:
        return sp.Hello(sp.PROTOCOL_VERSION, self.session, self.cluster)


class LocalWorker:
    """For threads: the verbs of `AsyncLocalWorker`, see there. A connection carries one request at a time.

    After a fork the child has no connections and opens its own (rule: nothing of the parent's is used); see `Client`
    for its session.
    """

    def __init__(self, path: str, session: int, cluster: str = "", on_hello: OnHello = lambda hello: None) -> None:
        self.path, self.session, self.cluster, self._on_hello = path, session, cluster, on_hello
        self.hello: sp.HelloReply | None = None
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._all: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._closed = False
        fork.watch(self)

    def __repr__(self) -> str:
        return f"<LocalWorker {self.path} {len(self._idle)} idle>"

    def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> sp.HelloReply:
        self._give_back(self._take(Deadline(timeout_s))[0])
        assert self.hello is not None
        return self.hello

    def stage(self, size_bytes: int, *, timeout_s: float | None = None) -> StagedFile:
        return sockets.staged(self._request(sp.Stage(size_bytes), _given(timeout_s, store_timeout_s(0))))

    def reserve(self, staging: int, size_bytes: int, *, evict: bool = True, timeout_s: float | None = None) -> None:
        self._ok(sp.Reserve(staging, size_bytes, evict), _given(timeout_s, store_timeout_s(0)))

    def seal(
        self,
        staging: int,
        size_bytes: int,
        *,
        hash: int | None = None,
        mtime_ns: int | None = None,
        timeout_s: float | None = None,
    ) -> SealedBlock:
        request = sp.Seal(staging, size_bytes, hash, mtime_ns)
        return sockets.sealed(self._request(request, _given(timeout_s, store_timeout_s(size_bytes))))

    def seal_copy(self, staging: int, *, size_bytes: int = 0, timeout_s: float | None = None) -> SealedBlock:
        return sockets.sealed(self._request(sp.SealCopy(staging), _given(timeout_s, store_timeout_s(size_bytes))))

    def abort(self, staging: int, *, timeout_s: float = _DEFAULT_S) -> None:
        self._ok(sp.Abort(staging), timeout_s)

    def open(self, wanted: Sequence[Wanted], *, timeout_s: float | None = None) -> Opened:
        deadline = Deadline(_given(timeout_s, fetch_timeout_s(sum(a.length_bytes for a, _ in wanted))))
        fds: Opened = []
        try:
            for part in sockets.batches(wanted):
                left_s = deadline.left_s
                answer = self._request(sockets.open_request(part, left_s), left_s, repeat=True)
                fds += sockets.opened(answer, len(part))
        except BaseException:
            sockets.close_all(fd for fd in fds if isinstance(fd, int))
            raise
        return fds

    def touch(self, addresses: Sequence[Address], *, timeout_s: float = _DEFAULT_S) -> None:
        deadline = Deadline(timeout_s)
        for request in sockets.touch_requests(addresses):
            self._ok(request, deadline.left_s, repeat=True)

    def stat(self, *, timeout_s: float = _DEFAULT_S) -> sp.StatReply:
        return sockets.body_of(self._request(sp.Stat(), timeout_s, repeat=True), sp.StatReply)

    def probe(self, *, timeout_s: float = _DEFAULT_S) -> list[ProbedVolume]:
        return sockets.probed(self._request(sp.Probe(), timeout_s, repeat=True))

    def close(self) -> None:
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for sock in idle:
            sock.close()

    def forget(self) -> None:
        """In the child of a fork: drop what is the parent's. Its lock may have been held by another thread."""
        self._lock = threading.Lock()
        self._idle = []
        for sock in list(self._all):
            sock.close()

    def _ok(self, request: sp.Request, timeout_s: float, repeat: bool = False) -> None:
        sockets.body_of(self._request(request, timeout_s, repeat), sp.Ok)

    def _request(self, request: sp.Request, timeout_s: float, repeat: bool = False) -> Answer:
        deadline, request_id = Deadline(timeout_s), next(self._ids)
        data = sockets.encode(request_id, request)
        sock, fresh = self._take(deadline)
        while True:
            try:
                answer = self._exchange(sock, request_id, data, deadline)
            except Lost as lost:
                if fresh or (lost.sent and not repeat):
                    raise Unavailable(lost.message, fault=self.path) from None
                sock, fresh = self._fresh(deadline), True
                continue
            self._give_back(sock)
            return answer

    def _exchange(self, sock: socket.socket, request_id: int, data: bytes, deadline: Deadline) -> Answer:
        """One request and its answer; the connection is closed when it cannot be used again."""
        sent = False
        try:
            sock.settimeout(deadline.left_s)
            sock.send(data)
            sent = True
            sock.settimeout(deadline.left_s)
            answer = sockets.receive(sock, self.path)
            if answer.request_id != request_id:
                sockets.close_all(answer.fds)
                raise Unavailable(f"the worker on {self.path} answered another request", fault=self.path)
            return answer
        except BaseException as error:  # noqa: BLE001 - raised again, as what it is for the caller
            sock.close()  # an answer that comes late, and the fds in it, go with it
            raise self._lost(error, sent, deadline) from None

    def _lost(self, error: BaseException, sent: bool, deadline: Deadline) -> BaseException:
        if isinstance(error, TimeoutError):
            return timed_out(self.path, deadline)
        if isinstance(error, Unavailable):
            return Lost(error.message, sent, self.path)
        return Lost(unreachable(self.path, error).message, sent, self.path) if isinstance(error, OSError) else error

    def _take(self, deadline: Deadline) -> tuple[socket.socket, bool]:
        """A connection, and whether it is new. Last in, first out: the others grow old and are closed."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        return self._fresh(deadline), True

    def _fresh(self, deadline: Deadline) -> socket.socket:
        step = Deadline(deadline.at_most(CONNECT_TIMEOUT_S))
        sock = sockets.new_socket()
        try:
            sock.settimeout(step.left_s)
            while not connect_now(sock, self.path):
                time.sleep(min(BACKLOG_PAUSE_S, step.left_s))
        except Timeout:
            sock.close()
            raise timed_out(self.path, step) from None
        except BaseException:
            sock.close()
            raise
        self._all.add(sock)
        hello = sp.Hello(sp.PROTOCOL_VERSION, self.session, self.cluster)
        answer = self._exchange(sock, 0, sockets.encode(0, hello), step)
        try:
            self.hello = sockets.body_of(answer, sp.HelloReply)
        except BaseException:
            sock.close()
            raise
        self._on_hello(self.hello)
        return sock

    def _give_back(self, sock: socket.socket) -> None:
        with self._lock:
            keep = len(self._idle) < _MAX_IDLE and not self._closed
            if keep:
                self._idle.append(sock)
        if not keep:
            sock.close()


def _given(timeout_s: float | None, default_s: float) -> float:
    return default_s if timeout_s is None else timeout_s
