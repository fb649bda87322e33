"""One question at a time, whoever asks: the first caller asks, the others wait for its outcome, each at most its own
time (`AsyncFlight`, `Flight`).

A lock would do for callers of a server that answers. While it hangs, callers behind a lock wait for each other's
timeouts: eight of 2 s each took 16 s.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent import futures
from typing import Generic, NamedTuple, TypeVar

from kvstore.client.deadline import Deadline
from kvstore.core.errors import KvError, Timeout
from kvstore.core.retry import MAX_DELAY_S

T = TypeVar("T")
NO_TIME_S = MAX_DELAY_S
"""Who has less left than the longest pause between retries does not begin anew."""


class _Outcome(NamedTuple, Generic[T]):
    """How a flight ended: with a value, or with an error; `own` when only its caller's time (or patience) was up, which
    says nothing to one who has more. No error and `own`: it was cancelled.
    """

    value: T | None = None
    error: KvError | None = None
    own: bool = False

    def is_for(self, deadline: Deadline) -> bool:
        """Whether one who waited takes it; else it asks itself."""
        return not self.own or (self.error is not None and not deadline.has_more_than(NO_TIME_S))


def _failed(error: BaseException, deadline: Deadline) -> _Outcome[T]:
    known = error if isinstance(error, KvError) else None
    return _Outcome(None, known, known is None or not deadline.has_more_than(NO_TIME_S))


def _result(outcome: _Outcome[T]) -> T:
    if outcome.error is not None:
        raise outcome.error.with_traceback(None)
    return outcome.value  # type: ignore[return-value] # T may itself include None


class AsyncFlight(Generic[T]):
    """For the tasks of one loop."""

    def __init__(self) -> None:
        self._under_way: asyncio.Future[_Outcome[T]] | None = None

    async def run(self, ask: Callable[[Deadline], Awaitable[T]], timeout_s: float) -> T:
        """What `ask` brings, be it asked here or by another caller. Raises its error; Timeout after `timeout_s`."""
        deadline = Deadline(timeout_s)
        while (shared := self._under_way) is not None:
            outcome = await self._wait(shared, deadline)
            if outcome.is_for(deadline):
                return _result(outcome)
        return await self._lead(ask, deadline)

    async def _lead(self, ask: Callable[[Deadline], Awaitable[T]], deadline: Deadline) -> T:
        mine = self._under_way = asyncio.get_running_loop().create_future()
        outcome: _Outcome[T] = _Outcome(own=True)
        try:
            outcome = _Outcome(await ask(deadline))
        except BaseException as error:
            outcome = _failed(error, deadline)
            raise
        finally:
            self._under_way = None
            mine.set_result(outcome)
        return _result(outcome)

    async def _wait(self, shared: asyncio.Future[_Outcome[T]], deadline: Deadline) -> _Outcome[T]:
        await asyncio.wait([shared], timeout=deadline.left_s)
        return shared.result() if shared.done() else _Outcome(error=_not_in_time(deadline))


class Flight(Generic[T]):
    """For threads, see `AsyncFlight`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: futures.Future[_Outcome[T]] | None = None

    def run(self, ask: Callable[[Deadline], T], timeout_s: float) -> T:
        deadline = Deadline(timeout_s)
        while True:
            with self._lock:
                shared = self._under_way
                if shared is None:
                    mine = self._under_way = futures.Future()
                    break
            outcome = self._wait(shared, deadline)
            if outcome.is_for(deadline):
                return _result(outcome)
        return self._lead(mine, ask, deadline)

    def _lead(self, mine: futures.Future[_Outcome[T]], ask: Callable[[Deadline], T], deadline: Deadline) -> T:
        outcome: _Outcome[T] = _Outcome(own=True)
        try:
            outcome = _Outcome(ask(deadline))
        except BaseException as error:
            outcome = _failed(error, deadline)
            raise
        finally:
            with self._lock:
                self._under_way = None
            mine.set_result(outcome)
        return _result(outcome)

    def _wait(self, shared: futures.Future[_Outcome[T]], deadline: Deadline) -> _Outcome[T]:
        try:
            return shared.result(deadline.left_s)
        except TimeoutError:  # raised by the wait: an outcome is never an exception of the future
            return _Outcome(error=_not_in_time(deadline))


def _not_in_time(deadline: Deadline) -> Timeout:
    return Timeout(f"no answer within {deadline.timeout_s:g} s (another caller asks, too); is the server well?")
