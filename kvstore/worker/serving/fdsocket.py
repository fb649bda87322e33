"""The worker's Unix socket: SOCK_SEQPACKET, one message a request, open file descriptors beside the answers.

Own non-blocking sockets with `loop.add_reader`: asyncio's streams cannot pass fds, and `loop.sock_recv` drops them
silently. Nobody waits for a client that does not read: its answers queue, bounded, and it gets no further requests
served until they went.
"""

from __future__ import annotations

import array
import asyncio
import collections
import errno
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from kvstore.core import sockproto as sp
from kvstore.core.errors import Denied, InvalidRequest, KvError, Overloaded
from kvstore.core.limits import (
    HELLO_TIMEOUT_S,
    MAX_QUEUED_FDS,
    MAX_SOCKET_CLIENTS,
    MAX_SOCKET_MESSAGE_BYTES,
    RETRY_AFTER_S,
    STALL_TIMEOUT_S,
)
from kvstore.worker.serving.door import Door, refuse

log = logging.getLogger(__name__)
MAX_OUTSTANDING = 64
"""Requests of one connection that are not answered yet, counting answers it has not read."""
_FULL: Final = f"the worker has {MAX_SOCKET_CLIENTS} clients already; retry later"
_KERNEL_MAX_FDS = 253
_ANCILLARY_BYTES = socket.CMSG_SPACE(_KERNEL_MAX_FDS * array.array("i").itemsize)


class Answer(NamedTuple):
    """The server closes the fds after sending."""

    body: sp.Message
    fds: Sequence[int] = ()


class Handler(Protocol):
    """Serves requests; `session` is the one that the connection's hello named."""

    def hello(self, hello: sp.Hello) -> sp.HelloReply:
        """Raises KvError for who is not welcome."""

    def enter(self, session: int) -> None:
        """Raises Overloaded."""

    def leave(self, session: int) -> None: ...

    def serve_now(self, session: int, request: sp.Request) -> Answer | None:
        """The answer if it needs no waiting: no task is made for it."""

    async def serve(self, session: int, request: sp.Request) -> Answer: ...


class _Connection:
    """One client.

    session      named by its hello, None before
    outstanding  requests without an answer on its way
    queue        answers that did not fit into the socket
    closing      no further request is read; ends when the queue is empty
    limit        ends it: no hello came in time, or nobody reads its answers
    """

    def __init__(self, server: FdServer, sock: socket.socket) -> None:
        self._server, self._sock, self._loop = server, sock, asyncio.get_running_loop()
        self._fd = sock.fileno()
        self._session: int | None = None
        self._outstanding = 0
        self._queue: collections.deque[tuple[bytes, Sequence[int]]] = collections.deque()
        self._reading = self._closing = self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit: asyncio.TimerHandle | None = self._loop.call_later(HELLO_TIMEOUT_S, self.close)
        self._read_on()

    def close(self) -> None:
        """Work under way goes on (it touches files); its answers go nowhere."""
        if self._closed:
            return
        self._closed = True
        self._unlimit()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        for _, fds in self._queue:
            self._server.queued_fds -= len(fds)
            close_all(fds)
        self._queue.clear()
        self._server.closed(self, self._session)

    async def finish(self) -> None:
        """Close, and await what runs."""
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _read_on(self) -> None:
        wanted = not self._closing and self._outstanding + len(self._queue) < MAX_OUTSTANDING
        if wanted and not self._reading:
            self._loop.add_reader(self._fd, self._readable)
        elif not wanted and self._reading:
            self._loop.remove_reader(self._fd)
        self._reading = wanted

    def _readable(self) -> None:
        """One message; the loop comes back for more, after others had their turn."""
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                MAX_SOCKET_MESSAGE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        close_all(_received_fds(ancillary))  # nobody asked for them
        if not data:
            self.close()
            return
        if flags & socket.MSG_TRUNC:
            error = InvalidRequest(
                f"a message is longer than {MAX_SOCKET_MESSAGE_BYTES} bytes; ask for fewer blocks at once"
            )
            self._last_word(0, error)
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            request_id, request = sp.decode_request(data)
        except InvalidRequest as error:
            self._last_word(0, error)
            return
        if isinstance(request, sp.Hello):
            self._greet(request_id, request)
        elif self._session is None:
            self._last_word(request_id, Denied("the first message of a connection is hello"))
        else:
            self._serve(request_id, self._session, request)

    def _greet(self, request_id: int, hello: sp.Hello) -> None:
        try:
            if self._session is not None:
                raise InvalidRequest("a connection has one hello")
            reply = self._server.handler.hello(hello)
            self._server.handler.enter(hello.session)
        except KvError as error:
            self._last_word(request_id, error)
            return
        self._unlimit()
        self._session = hello.session
        self._send(sp.encode_reply(request_id, reply), ())

    def _serve(self, request_id: int, session: int, request: sp.Request) -> None:
        try:
            answer = self._server.handler.serve_now(session, request)
        except KvError as error:
            self._send(sp.encode_error(request_id, error), ())
            return
        if answer is not None:
            self._send(sp.encode_reply(request_id, answer.body), answer.fds)
            return
        self._outstanding += 1
        task = self._loop.create_task(self._serve_later(request_id, session, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._read_on()

    async def _serve_later(self, request_id: int, session: int, request: sp.Request) -> None:
        fds: Sequence[int] = ()
        try:
            answer = await self._server.handler.serve(session, request)
            data, fds = sp.encode_reply(request_id, answer.body), answer.fds
        except KvError as error:
            data = sp.encode_error(request_id, error)
        except Exception:
            log.exception("internal error while serving %s", type(request).__name__)
            data = sp.encode_error(request_id, KvError("internal error; the worker's log has the trace"))
        self._outstanding -= 1
        self._send(data, fds)

    def _last_word(self, request_id: int, error: KvError) -> None:
        """Answer, and hang up: whoever sent this does not speak the protocol, or is not welcome."""
        self._closing = True
        self._send(sp.encode_error(request_id, error), ())

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        if self._closed:
            close_all(fds)
            return
        if fds and self._server.queued_fds + len(fds) > MAX_QUEUED_FDS:
            close_all(fds)
            data, fds = _overloaded(data, "too many fds wait for clients that do not read their answers"), ()
        self._queue.append((data, fds))
        self._server.queued_fds += len(fds)
        if len(self._queue) == 1:
            self._flush()
        self._after_send()

    def _writable(self) -> None:
        self._unlimit()
        self._flush()
        self._after_send()

    def _unlimit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _after_send(self) -> None:
        if self._closed:
            return
        if self._closing and not self._queue:
            self.close()
            return
        self._read_on()

    def _flush(self) -> None:
        """Send what the socket takes; wait for the rest to be readable by the client."""
        while self._queue:
            data, fds = self._queue[0]
            try:
                self._sock.sendmsg([data], _ancillary(fds))
            except BlockingIOError:
                self._loop.add_writer(self._fd, self._writable)
                self._limit = self._limit or self._loop.call_later(STALL_TIMEOUT_S, self.close)
                return
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    self.close()
                    return
                # Fds in flight to this user's processes are at their limit: it must read first.
                self._drop_fds(fds)
                reason = "too many fds are on their way to your processes; read your answers"
                self._queue[0] = (_overloaded(data, reason), ())
                continue
            self._queue.popleft()
            self._drop_fds(fds)  # our own copy: whoever holds the block is found out by its leases
        self._loop.remove_writer(self._fd)

    def _drop_fds(self, fds: Sequence[int]) -> None:
        self._server.queued_fds -= len(fds)
        close_all(fds)


class FdServer:
    """Serves who comes to the socket at `path`. `queued_fds`: in answers that are not sent yet."""

    def __init__(self, path: str, mode: int, handler: Handler) -> None:
        self.path, self.handler = path, handler
        self._door = Door(path, mode, self._came)
        self._connections: set[_Connection] = set()
        self.queued_fds = 0

    def start(self) -> None:
        """Raises OSError when there is no place for the socket."""
        self._door.open()

    async def close(self) -> None:
        """Stop listening and drop all connections; what runs comes to its end."""
        self._door.close()
        await asyncio.gather(*(connection.finish() for connection in tuple(self._connections)))

    def closed(self, connection: _Connection, session: int | None) -> None:
        self._connections.discard(connection)
        if session is not None:
            self.handler.leave(session)

    def _came(self, sock: socket.socket) -> None:
        if len(self._connections) >= MAX_SOCKET_CLIENTS:
            refuse(sock, _FULL)
        else:
            self._connections.add(_Connection(self, sock))


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _ancillary(fds: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def _received_fds(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _overloaded(data: bytes, reason: str) -> bytes:
    """The error answer in place of an answer whose fds cannot be sent."""
    request_id, _ = sp.decode_reply(data)
    return sp.encode_error(request_id, Overloaded(reason, retry_after_s=RETRY_AFTER_S))
