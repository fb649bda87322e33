"""One connection to the worker's Unix socket on the loop, multiplexed by request id; and the parts a blocking one
shares with it.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import socket

from kvstore.client import sockets
from kvstore.client.deadline import Deadline
from kvstore.client.sockets import Answer, unreachable
from kvstore.core import sockproto as sp
from kvstore.core.errors import KvError, Timeout, Unavailable

BACKLOG_PAUSE_S = 0.005
"""A Unix socket whose backlog is full says EAGAIN to a non-blocking connect; there is no event to wait for."""
_READS_PER_WAKE = 32
"""Answers taken before the loop gets its turn back."""


class Lost(Unavailable):
    """The connection ended under a request. `sent`: the worker may have got it."""

    def __init__(self, message: str, sent: bool, fault: str | None) -> None:
        super().__init__(message, fault=fault)
        self.sent = sent


class AsyncConnection:
    """One connection on the loop. Futures in `_waiting` by request id; messages that did not fit into the socket in
    `_unsent`.

    asyncio's own streams cannot pass fds and `loop.sock_recv` drops them in silence, hence the bare readers.
    """

    def __init__(self, sock: socket.socket, path: str) -> None:
        self.alive = True
        self._sock, self._path = sock, path
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._unsent: collections.deque[tuple[int, bytes]] = collections.deque()
        self._loop.add_reader(sock, self._readable)

    @classmethod
    async def open(cls, path: str, hello: sp.Hello, deadline: Deadline) -> tuple[AsyncConnection, sp.HelloReply]:
        sock = sockets.new_socket()
        sock.setblocking(False)
        try:
            while not connect_now(sock, path):  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(min(BACKLOG_PAUSE_S, deadline.left_s))
        except BaseException:
            sock.close()
            raise
        connection = cls(sock, path)
        try:
            answer = await connection.request(hello, deadline)
            return connection, sockets.body_of(answer, sp.HelloReply)
        except BaseException as error:
            connection.close(error if isinstance(error, KvError) else Unavailable("the caller gave up"))
            raise

    async def request(self, request: sp.Request, deadline: Deadline) -> Answer:
        """Send and wait. Raises Lost when the connection ends, Timeout."""
        request_id = next(self._ids)
        data = sockets.encode(request_id, request)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[request_id] = future
        try:
            self._send(request_id, data)
            async with asyncio.timeout(deadline.left_s):
                return await future
        except TimeoutError:
            _drop(future)
            raise timed_out(self._path, deadline) from None
        except BaseException:
            _drop(future)
            raise
        finally:
            self._waiting.pop(request_id, None)

    def close(self, error: KvError) -> None:
        """End it; whoever waits gets the error."""
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        unsent = {request_id for request_id, _ in self._unsent}
        for request_id, future in self._waiting.items():
            if not future.done():
                future.set_exception(Lost(error.message, request_id not in unsent, error.fault))

    def _send(self, request_id: int, data: bytes) -> None:
        if not self.alive:
            raise Lost(f"the worker on {self._path} closed the connection", False, self._path)
        self._unsent.append((request_id, data))
        if len(self._unsent) == 1:
            self._writable()

    def _writable(self) -> None:
        while self._unsent:
            try:
                self._sock.send(self._unsent[0][1])
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._writable)
                return
            except OSError as error:
                self.close(unreachable(self._path, error))
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        for _ in range(_READS_PER_WAKE):
            try:
                answer = sockets.receive(self._sock, self._path)
            except BlockingIOError:
                return
            except Unavailable as error:
                self.close(error)
                return
            except OSError as error:
                self.close(unreachable(self._path, error))
                return
            self._deliver(answer)

    def _deliver(self, answer: Answer) -> None:
        future = self._waiting.get(answer.request_id)
        if future is None or future.done():
            sockets.close_all(answer.fds)
        else:
            future.set_result(answer)


def _drop(future: asyncio.Future[Answer]) -> None:
    """Nobody waits any more: an answer that is there already takes its fds with it, a later one finds the future
    cancelled.
    """
    if not future.cancel() and not future.cancelled() and future.exception() is None:
        sockets.close_all(future.result().fds)


def connect_now(sock: socket.socket, path: str) -> bool:
    """False when the backlog is full and it must be tried again."""
    try:
        sock.connect(path)
    except BlockingIOError:
        return False
    except OSError as error:
        raise unreachable(path, error) from None
    return True


def timed_out(path: str, deadline: Deadline) -> Timeout:
    return Timeout(f"the worker on {path} did not answer within {deadline.timeout_s:g} s", fault=path)
