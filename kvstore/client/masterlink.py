"""The link to the master behind its breaker (`AsyncMasterLink`, `MasterLink`).

A master that did not answer once is not waited for again until it does: calls end at once. Who gives a call more than
`METADATA_TIMEOUT_S` has said that he waits for a master that restarts, and his call is tried until then all the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final, Protocol

from kvstore.core.errors import Timeout
from kvstore.core.limits import METADATA_TIMEOUT_S
from kvstore.pb import master_pb2 as m
from kvstore.rpc import methods
from kvstore.rpc.breaker import AsyncBreaker, ThreadBreaker
from kvstore.rpc.failover import AsyncFailover, Failover
from kvstore.rpc.methods import A, Method, Q

_NAME: Final = "the master"


class AsyncMasterCalls(Protocol):
    """What the master's calls are made over: this link, or one without a breaker (`rpc.failover.AsyncFailover`)."""

    async def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A: ...

    def stream(self, method: Method[Q, A], request: Q, timeout_s: float) -> AsyncGenerator[A, None]: ...


class MasterCalls(Protocol):
    """For threads, see `AsyncMasterCalls`."""

    def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A: ...

    def stream(self, method: Method[Q, A], request: Q, timeout_s: float) -> Generator[A, None, None]: ...


class AsyncMasterLink:
    """For asyncio. `endpoints` are those of the link."""

    def __init__(self, link: AsyncFailover, endpoints: Sequence[str]) -> None:
        self._link = link
        self._breaker = AsyncBreaker(_NAME, endpoints, partial(_ask, link), owner=self)

    @property
    def is_away(self) -> bool:
        """Whether it did not answer, and does not yet."""
        return not self._breaker.closed

    def check(self, timeout_s: float) -> None:
        """Raises NotAsked where a call with this timeout would, without making one."""
        self._breaker.check(insist=timeout_s > METADATA_TIMEOUT_S)

    async def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        with self._breaker.call(timeout_s, insist=timeout_s > METADATA_TIMEOUT_S):
            return await self._link.call(method, request, timeout_s)

    async def stream(self, method: Method[Q, A], request: Q, timeout_s: float) -> AsyncGenerator[A, None]:
        with self._breaker.call(timeout_s, insist=timeout_s > METADATA_TIMEOUT_S):
            heard = False
            try:
                async with aclosing(self._link.stream(method, request, timeout_s)) as pages:
                    async for page in pages:
                        heard = True
                        yield page
            except Timeout as error:
                raise (_only_long(error) if heard else error) from None

    async def close(self) -> None:
        """Of the probes; the link is its owner's."""
        await self._breaker.close()


class MasterLink:
    """For threads, see `AsyncMasterLink`."""

    def __init__(self, link: Failover, endpoints: Sequence[str]) -> None:
        self._link = link
        self._breaker = ThreadBreaker(_NAME, endpoints, partial(_ask_blocking, link), owner=self)

    @property
    def is_away(self) -> bool:
        return not self._breaker.closed

    def check(self, timeout_s: float) -> None:
        self._breaker.check(insist=timeout_s > METADATA_TIMEOUT_S)

    def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        with self._breaker.call(timeout_s, insist=timeout_s > METADATA_TIMEOUT_S):
            return self._link.call(method, request, timeout_s)

    def stream(self, method: Method[Q, A], request: Q, timeout_s: float) -> Generator[A, None, None]:
        with self._breaker.call(timeout_s, insist=timeout_s > METADATA_TIMEOUT_S):
            heard = False
            try:
                for page in self._link.stream(method, request, timeout_s):
                    heard = True
                    yield page
            except Timeout as error:
                raise (_only_long(error) if heard else error) from None

    def close(self) -> None:
        self._breaker.close()


async def _ask(link: AsyncFailover, timeout_s: float) -> None:
    await link.call(methods.LOOKUP, _question(), timeout_s)


def _ask_blocking(link: Failover, timeout_s: float) -> None:
    link.call(methods.LOOKUP, _question(), timeout_s)


def _only_long(error: Timeout) -> Timeout:
    """Of a stream that brought something and did not come to its end in time: nobody was silent."""
    return Timeout(error.message)


def _question() -> m.LookupRequest:
    """The root of the store: any answer will do."""
    return m.LookupRequest(paths=[""])
