"""The local worker on its Unix socket, for threads: see `local.py`."""

from __future__ import annotations

import itertools
import logging
import math
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore.client import sockets
from kvstore.client.connection import (
    BACKLOG_PAUSE_S,
    DEFAULT_S,
    NAME,
    TOLD_S,
    Lost,
    OnHello,
    connect_now,
    given,
    no_hello,
    silent,
    timed_out,
    turned_away,
)
from kvstore.client.deadline import Deadline
from kvstore.client.flight import Flight
from kvstore.client.sockets import Answer, Opened, ProbedVolume, SealedBlock, StagedFile, Wanted, unreachable
from kvstore.client.weakly import weakly
from kvstore.core import sockproto as sp
from kvstore.core.errors import KvError, Overloaded, Timeout, Unavailable
from kvstore.core.limits import METADATA_TIMEOUT_S, PING_TIMEOUT_S, SILENCE_S, fetch_timeout_s, store_timeout_s
from kvstore.core.types import Address
from kvstore.rpc import fork
from kvstore.rpc.breaker import ThreadBreaker

log = logging.getLogger(__name__)

Receive = Callable[[socket.socket, Deadline], Answer]
_MAX_IDLE = 8
"""Idle connections kept; a burst of more threads opens more and closes them again."""


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
        self._pinging: Flight[None] = Flight()
        self.breaker = ThreadBreaker(NAME, [path], weakly(self.ping), math.inf, owner=self)
        fork.watch(self)

    def __repr__(self) -> str:
        return f"<LocalWorker {self.path} {len(self._idle)} idle>"

    def connect(self, timeout_s: float = DEFAULT_S) -> sp.HelloReply:
        with self.breaker.call(timeout_s):
            self._give_back(self._take(Deadline(timeout_s))[0])
        assert self.hello is not None
        return self.hello

    def stage(self, size_bytes: int, *, timeout_s: float | None = None) -> StagedFile:
        return sockets.staged(self._request(sp.Stage(size_bytes), given(timeout_s, store_timeout_s(0))))

    def reserve(self, staging: int, size_bytes: int, *, evict: bool = True, timeout_s: float | None = None) -> None:
        self._ok(sp.Reserve(staging, size_bytes, evict), given(timeout_s, store_timeout_s(0)))

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
        return sockets.sealed(self._request(request, given(timeout_s, store_timeout_s(size_bytes))))

    def seal_copy(self, staging: int, *, size_bytes: int = 0, timeout_s: float | None = None) -> SealedBlock:
        return sockets.sealed(self._request(sp.SealCopy(staging), given(timeout_s, store_timeout_s(size_bytes))))

    def abort(self, staging: int, *, timeout_s: float = DEFAULT_S) -> None:
        self._tell(sp.Abort(staging), timeout_s)

    def give_up(self, addresses: Sequence[Address], *, timeout_s: float = DEFAULT_S) -> None:
        deadline = Deadline(timeout_s)
        for request in sockets.give_up_requests(addresses):
            self._tell(request, deadline.left_s)

    def open(self, wanted: Sequence[Wanted], *, timeout_s: float | None = None) -> Opened:
        deadline = Deadline(given(timeout_s, fetch_timeout_s(sum(a.length_bytes for a, _ in wanted))))
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

    def touch(self, addresses: Sequence[Address], *, timeout_s: float = DEFAULT_S) -> None:
        deadline = Deadline(timeout_s)
        for request in sockets.touch_requests(addresses):
            self._ok(request, deadline.left_s, repeat=True)

    def stat(self, *, timeout_s: float = DEFAULT_S) -> sp.StatReply:
        return sockets.body_of(self._request(sp.Stat(), timeout_s, repeat=True), sp.StatReply)

    def probe(self, *, timeout_s: float = DEFAULT_S) -> list[ProbedVolume]:
        return sockets.probed(self._request(sp.Probe(), timeout_s, repeat=True))

    def ping(self, timeout_s: float) -> None:
        self._fresh(Deadline(timeout_s)).close()

    def close(self) -> None:
        self.breaker.close()
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for sock in idle:
            sock.close()

    def forget(self) -> None:
        """In the child of a fork: drop what is the parent's. Its lock may have been held by another thread."""
        self._lock = threading.Lock()
        self._pinging = Flight()
        self.breaker.reset()
        self._idle = []
        for sock in list(self._all):
            sock.close()

    def _tell(self, request: sp.Request, timeout_s: float) -> None:
        if self.breaker.closed:
            self._ok(request, timeout_s)
        else:
            self._ask(request, Deadline(TOLD_S))

    def _ok(self, request: sp.Request, timeout_s: float, repeat: bool = False) -> None:
        sockets.body_of(self._request(request, timeout_s, repeat), sp.Ok)

    def _request(self, request: sp.Request, timeout_s: float, repeat: bool = False) -> Answer:
        with self.breaker.call(timeout_s):
            return self._ask(request, Deadline(timeout_s), repeat)

    def _ask(self, request: sp.Request, deadline: Deadline, repeat: bool = False) -> Answer:
        request_id = next(self._ids)
        data = sockets.encode(request_id, request)
        sock, fresh = self._take(deadline)
        while True:
            try:
                answer = self._exchange(sock, request_id, data, deadline, self._receive)
            except Lost as lost:
                if fresh or (lost.sent and not repeat):
                    raise
                sock, fresh = self._connected(deadline), True
                continue
            self._give_back(sock)
            return answer

    def _exchange(
        self, sock: socket.socket, request_id: int, data: bytes, deadline: Deadline, receive: Receive
    ) -> Answer:
        """One request and its answer; the connection is closed when it cannot be used again."""
        sent = False
        try:
            sock.settimeout(deadline.left_s)
            with suppress(BrokenPipeError):  # it hung up, and may have said why
                sock.send(data)
                sent = True
            answer = receive(sock, deadline)
            if answer.request_id != request_id:
                sockets.close_all(answer.fds)
                raise Unavailable(f"the worker on {self.path} answered another request", fault=self.path)
            return answer
        except BaseException as error:  # noqa: BLE001 - raised again, as what it is for the caller
            sock.close()  # an answer that comes late, and the fds in it, go with it
            raise self._lost(error, sent, deadline) from None

    def _receive_hello(self, sock: socket.socket, deadline: Deadline) -> Answer:
        sock.settimeout(deadline.left_s)
        return sockets.receive(sock, self.path)

    def _receive(self, sock: socket.socket, deadline: Deadline) -> Answer:
        """As long as the worker lives. Raises Silent, TimeoutError."""
        while True:
            sock.settimeout(deadline.at_most(SILENCE_S))
            try:
                return sockets.receive(sock, self.path)
            except TimeoutError:
                if not deadline.has_more_than(0) or not self._lives(deadline):
                    raise

    def _lives(self, deadline: Deadline) -> bool:
        """Asked once for all threads that wait. Raises Silent; False when there was not time enough to tell."""
        try:
            self._pinging.run(lambda step: self.ping(step.left_s), deadline.at_most(PING_TIMEOUT_S))
        except (Timeout, Unavailable):
            if not deadline.has_more_than(0):
                return False
            raise silent(self.path) from None
        except (KvError, OSError) as error:  # an answer, or our own trouble (no free fd): no sign of silence
            log.debug("%s", error)
        return True

    def _lost(self, error: BaseException, sent: bool, deadline: Deadline) -> BaseException:
        if isinstance(error, TimeoutError) or (isinstance(error, Timeout) and error.fault is None):
            return timed_out(self.path, deadline)
        if isinstance(error, Unavailable):
            return Lost(error.message, sent, self.path)
        return Lost(unreachable(self.path, error).message, sent, self.path) if isinstance(error, OSError) else error

    def _take(self, deadline: Deadline) -> tuple[socket.socket, bool]:
        """A connection, and whether it is new. Last in, first out: the others grow old and are closed."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        return self._connected(deadline), True

    def _connected(self, deadline: Deadline) -> socket.socket:
        try:
            return self._fresh(deadline)
        except Overloaded as error:
            raise turned_away(self.path, error) from None

    def _fresh(self, deadline: Deadline) -> socket.socket:
        step = Deadline(deadline.at_most(METADATA_TIMEOUT_S))
        sock = sockets.new_socket()
        try:
            sock.settimeout(step.left_s)
            while not connect_now(sock, self.path):
                time.sleep(min(BACKLOG_PAUSE_S, step.left_s))
        except Timeout:
            sock.close()
            raise no_hello(self.path, step) from None
        except BaseException:
            sock.close()
            raise
        self._all.add(sock)
        hello = sp.Hello(sp.PROTOCOL_VERSION, self.session, self.cluster)
        try:
            answer = self._exchange(sock, 0, sockets.encode(0, hello), step, self._receive_hello)
        except Timeout:
            raise no_hello(self.path, step) from None
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
