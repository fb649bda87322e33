"""One connection to the worker's Unix socket on the loop, multiplexed by request id; and the parts a blocking one
shares with it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable

from kvstore.client import sockets
from kvstore.client.deadline import Deadline
from kvstore.client.sockets import Answer, unreachable
from kvstore.core import sockproto as sp
from kvstore.core.errors import KvError, Overloaded, Timeout, Unavailable
from kvstore.core.limits import METADATA_TIMEOUT_S, PING_TIMEOUT_S, SILENCE_S
from kvstore.rpc.breaker import Broken, OutOfDescriptors, Silent

log = logging.getLogger(__name__)

DEFAULT_S = METADATA_TIMEOUT_S
OnHello = Callable[[sp.HelloReply], None]
"""Told of every new connection: the worker may be another one since."""
TOLD_S = 0.01
"""So long an abort may take to be sent to a worker that does not answer (it reads it when it goes on), or whose caller
has no time left."""
NAME = "the local worker"
BACKLOG_PAUSE_S = 0.005
"""A Unix socket whose backlog is full says EAGAIN to a non-blocking connect; there is no event to wait for."""
_READS_PER_WAKE = 32
"""Answers taken before the loop gets its turn back."""


class Lost(Broken):
    """The connection ended under a request. `sent`: the worker may have got it."""

    def __init__(self, message: str, sent: bool, fault: str | None) -> None:
        super().__init__(message, fault=fault)
        self.sent = sent


Ping = Callable[[float], Awaitable[None]]
"""Whether the worker lives, asked on another connection: this one may have its bound of unanswered requests. Raises
Timeout or Unavailable when there is no answer in so many seconds.
"""


class AsyncConnection:
    """One connection on the loop. Futures in `_waiting` by request id; messages that did not fit into the socket in
    `_unsent`.

    While somebody waits and nothing has come for `SILENCE_S`, the worker is asked by `ping` whether it lives. If it
    does not, all who wait get Silent; the connection stays, for a worker that only slept.

    asyncio's own streams cannot pass fds and `loop.sock_recv` drops them in silence, hence the bare readers.
    """

    def __init__(self, sock: socket.socket, path: str) -> None:
        self.alive = True
        self._sock, self._path = sock, path
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()  # 0 = hello, and whatever a worker says that has not read one
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._unsent: collections.deque[tuple[int, bytes]] = collections.deque()
        self._ping: Ping | None = None
        self._heard_s = 0.0
        """When it last was heard, or began to be listened to."""
        self._listening: asyncio.TimerHandle | asyncio.Task[None] | None = None
        self._loop.add_reader(sock, self._readable)

    @classmethod
    async def open(
        cls, path: str, hello: sp.Hello, deadline: Deadline, ping: Ping | None = None
    ) -> tuple[AsyncConnection, sp.HelloReply]:
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
            connection._ping = ping
            return connection, sockets.body_of(answer, sp.HelloReply)
        except BaseException as error:
            connection.close(error if isinstance(error, KvError) else Unavailable("the caller gave up"))
            raise

    async def request(self, request: sp.Request, deadline: Deadline) -> Answer:
        """Send and wait. Raises Lost when the connection ends, Timeout, Silent."""
        request_id = next(self._ids)
        data = sockets.encode(request_id, request)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[request_id] = future
        try:
            self._send(request_id, data)
            self._listen()
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
        if self._listening is not None:
            self._listening.cancel()
        unsent = {request_id for request_id, _ in self._unsent}
        for request_id, future in self._waiting.items():
            if not future.done():
                future.set_exception(Lost(error.message, request_id not in unsent, error.fault))

    def abandon(self) -> None:
        """Close it, from whichever thread: nobody will use it again."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self.close, Unavailable("the client was dropped"))

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
                self._readable()  # why it hung up
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

    def _listen(self) -> None:
        """Once for all who wait."""
        if len(self._waiting) == 1:
            self._heard_s = self._loop.time()
        if self._listening is None and self._ping is not None:
            self._listening = self._loop.call_later(SILENCE_S, self._look, self._ping)

    def _look(self, ping: Ping) -> None:
        self._listening = None
        if not self._waiting:
            return
        due_s = self._heard_s + SILENCE_S
        if self._loop.time() < due_s:
            self._listening = self._loop.call_at(due_s, self._look, ping)
        else:
            self._listening = self._loop.create_task(self._ask(ping))

    async def _ask(self, ping: Ping) -> None:
        try:
            lives = await _lives(ping)
        finally:  # a cancelled one is begun anew by the next request
            self._listening = None
        if lives:
            self._heard_s = self._loop.time()
            self._listen()
            return
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(silent(self._path))

    def _deliver(self, answer: Answer) -> None:
        self._heard_s = self._loop.time()
        future = self._waiting.get(answer.request_id)
        if future is None or future.done():
            sockets.close_all(answer.fds)
        else:
            future.set_result(answer)


async def _lives(ping: Ping) -> bool:
    try:
        await ping(PING_TIMEOUT_S)
    except (Timeout, Unavailable):
        return False
    except (KvError, OSError) as error:  # an answer, or our own trouble (no free fd): no sign of silence
        log.debug("%s", error)
    return True


def _drop(future: asyncio.Future[Answer]) -> None:
    """Nobody waits any more: an answer that is there already takes its fds with it, a later one finds the future
    cancelled.
    """
    if not future.cancel() and not future.cancelled() and future.exception() is None:
        sockets.close_all(future.result().fds)


def turned_away(path: str, error: Overloaded) -> KvError:
    """What a caller gets of a worker that has no place for one more connection: no reason to wait for it, as another
    one may have, nor a sign of silence. Want of descriptors here stays what it is.
    """
    return error if isinstance(error, OutOfDescriptors) else Lost(error.message, False, path)


def connect_now(sock: socket.socket, path: str) -> bool:
    """False when the backlog is full and it must be tried again."""
    try:
        sock.connect(path)
    except BlockingIOError:
        return False
    except OSError as error:
        raise unreachable(path, error) from None
    return True


def silent(path: str) -> Silent:
    return Silent(f"the worker on {path} is silent; was it stopped?", fault=path)


def timed_out(path: str, deadline: Deadline) -> Timeout:
    return Timeout(f"the worker on {path} did not answer within {deadline.timeout_s:g} s", fault=path)


def no_hello(path: str, step: Deadline) -> Timeout:
    """Time enough for a ping was time enough for a hello."""
    return silent(path) if step.timeout_s >= PING_TIMEOUT_S else timed_out(path, step)


def given(timeout_s: float | None, default_s: float) -> float:
    return default_s if timeout_s is None else timeout_s
