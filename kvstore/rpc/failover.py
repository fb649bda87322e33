"""Several addresses of one server, tried in order, with retries until the caller's deadline."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing

from kvstore.core import retry
from kvstore.core.errors import KvError, Timeout, Unavailable
from kvstore.core.limits import EVIDENCE_S
from kvstore.rpc.link import AsyncLink, Link
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import A, Method, Q
from kvstore.rpc.transport import GRPC, Transport


class _Turn:
    """The pure half: which link is next, whether to try again and when."""

    def __init__(self, count: int, timeout_s: float) -> None:
        self._count, self._end, self._attempt = count, time.monotonic() + timeout_s, 0

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def pause(self, error: KvError, idempotent: bool) -> float:
        """Seconds to wait before the next attempt. Raises the error when there is none."""
        if not retry.may_retry(error, idempotent=idempotent):
            raise error
        self._attempt += 1
        if isinstance(error, Unavailable) and self._attempt < self._count:
            return 0.0
        pause = retry.delay_s(self._attempt, secrets.randbits(64), self.left_s, error.retry_after_s)
        if pause is None:
            raise error
        return pause


def _moves_on(error: KvError, endpoint: str, given_s: float) -> bool:
    """Whether calls from now on go to the next address: nobody is there, or was silent for as long as proves it
    (rule 29). This call is repeated only if `_Turn` says so.
    """
    if isinstance(error, Timeout):
        return error.fault == endpoint and given_s >= EVIDENCE_S
    return isinstance(error, Unavailable)


class AsyncFailover:
    """Like `AsyncLink`, over several addresses."""

    def __init__(self, endpoints: Sequence[str], caller: Caller, transport: Transport = GRPC) -> None:
        self._links = [AsyncLink(e, caller, transport) for e in endpoints]
        self._current = 0
        self._closed = False

    def introduce(self, caller: Caller) -> None:
        """What calls from now on say of their caller."""
        for link in self._links:
            link.introduce(caller)

    async def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        """Raises KvError; Unavailable only when all addresses failed until the deadline."""
        turn = _Turn(len(self._links), timeout_s)
        while True:
            at, given_s = self._current, max(turn.left_s, 0.001)
            try:
                return await self._links[at].call(method, request, given_s)
            except KvError as error:
                if self._closed:
                    raise
                self._move_on(error, at, given_s)
                pause = turn.pause(error, method.idempotent)
            await asyncio.sleep(pause)

    async def stream(self, method: Method[Q, A], request: Q, timeout_s: float) -> AsyncGenerator[A, None]:
        """No retry, since messages may have arrived: the caller resumes, at the next address if this one failed."""
        at, silent_s = self._current, timeout_s
        try:
            async with aclosing(self._links[at].stream(method, request, timeout_s)) as pages:
                async for page in pages:
                    silent_s = 0.0
                    yield page
        except KvError as error:
            self._move_on(error, at, silent_s)
            raise

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(link.close() for link in self._links))

    def _move_on(self, error: KvError, at: int, given_s: float) -> None:
        if self._current == at and _moves_on(error, self._links[at].endpoint, given_s):
            self._current = (at + 1) % len(self._links)


class Failover:
    """Like `Link`, over several addresses. Safe for many threads."""

    def __init__(self, endpoints: Sequence[str], caller: Caller) -> None:
        self._links = [Link(e, caller) for e in endpoints]
        self._current = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def introduce(self, caller: Caller) -> None:
        for link in self._links:
            link.introduce(caller)

    def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        turn = _Turn(len(self._links), timeout_s)
        while True:
            at, given_s = self._current, max(turn.left_s, 0.001)
            try:
                return self._links[at].call(method, request, given_s)
            except KvError as error:
                self._move_on(error, at, given_s)
                pause = turn.pause(error, method.idempotent)
                if self._closed.wait(pause):
                    raise

    def stream(self, method: Method[Q, A], request: Q, timeout_s: float) -> Generator[A, None, None]:
        at, silent_s = self._current, timeout_s
        try:
            for page in self._links[at].stream(method, request, timeout_s):
                silent_s = 0.0
                yield page
        except KvError as error:
            self._move_on(error, at, silent_s)
            raise

    def close(self) -> None:
        """Ends what is under way, too: a call that waits to try again gives up."""
        self._closed.set()
        for link in self._links:
            link.close()

    def _move_on(self, error: KvError, at: int, given_s: float) -> None:
        with self._lock:
            if self._current == at and _moves_on(error, self._links[at].endpoint, given_s):
                self._current = (at + 1) % len(self._links)
