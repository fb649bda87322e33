"""Several addresses of one server, tried in order, with retries until the caller's deadline."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing

from kvstore.core import retry
from kvstore.core.errors import KvError, Unavailable
from kvstore.rpc.link import AsyncLink, Link
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import A, Method, Q


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
        pause = retry.delay_s(self._attempt, random.getrandbits(64), self.left_s)
        if pause is None:
            raise error
        return pause


class AsyncFailover:
    """Like `AsyncLink`, over several addresses."""

    def __init__(self, endpoints: Sequence[str], caller: Caller) -> None:
        self._links = [AsyncLink(e, caller) for e in endpoints]
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
            at = self._current
            try:
                return await self._links[at].call(method, request, max(turn.left_s, 0.001))
            except KvError as error:
                if self._closed:
                    raise
                pause = turn.pause(error, method.idempotent)
                if isinstance(error, Unavailable):
                    self._current = (at + 1) % len(self._links)
            await asyncio.sleep(pause)

    async def stream(self, method: Method[Q, A], request: Q, timeout_s: float) -> AsyncGenerator[A, None]:
        """No retry, since messages may have arrived: the caller resumes, at the next address if this one failed."""
        at = self._current
        try:
            async with aclosing(self._links[at].stream(method, request, timeout_s)) as pages:
                async for page in pages:
                    yield page
        except Unavailable:
            self._current = (at + 1) % len(self._links)
            raise

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(link.close() for link in self._links))


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
            at = self._current
            try:
                return self._links[at].call(method, request, max(turn.left_s, 0.001))
            except KvError as error:
                pause = turn.pause(error, method.idempotent)
                if isinstance(error, Unavailable):
                    self._advance(at)
                if self._closed.wait(pause):
                    raise

    def stream(self, method: Method[Q, A], request: Q, timeout_s: float) -> Generator[A, None, None]:
        at = self._current
        try:
            yield from self._links[at].stream(method, request, timeout_s)
        except Unavailable:
            self._advance(at)
            raise

    def close(self) -> None:
        """Ends what is under way, too: a call that waits to try again gives up."""
        self._closed.set()
        for link in self._links:
            link.close()

    def _advance(self, at: int) -> None:
        with self._lock:
            if self._current == at:
                self._current = (at + 1) % len(self._links)
