"""The breaker of a link (rule 29): after one call without an answer nobody waits for the dead one again, until a probe
in the background gets an answer. `AsyncBreaker` for asyncio, `ThreadBreaker` for threads.

A call that had less time than `EVIDENCE_S` proves nothing by its timeout, nor one during which others were answered:
slow is not silent. Nor does the end of a connection (Broken) prove more than that the other side was started again.
Then a probe decides.

An `owner` that is dropped without `close` takes its probes with it, if `ping` does not hold it.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from kvstore.core.errors import KvError, Overloaded, Timeout, Unavailable
from kvstore.core.limits import EVIDENCE_S, OVERDUE_S, PROBE_PAUSE_S, PROBE_TIMEOUT_S

log = logging.getLogger(__name__)


class NotAsked(Unavailable):
    """It did not answer a moment ago, so nobody waited for it now. Nothing has happened."""


class Broken(Unavailable):
    """The connection ended under a call."""


class Silent(Timeout):
    """It did not even answer when it was asked whether it lives, however little time the call had."""


class OutOfDescriptors(Overloaded):
    """This process has no free one: nobody was called, and it says nothing of whoever was meant."""


def blames(error: BaseException, endpoint: str) -> bool:
    """Whether it is the fault of the one that was called. Whoever answers works, with whatever error."""
    return isinstance(error, Unavailable | Timeout) and error.fault == endpoint


class _State(enum.Enum):
    CLOSED = "calls pass"
    SUSPECTED = "calls pass, and a probe is on its way"
    OPEN = "calls fail at once, until a probe is answered"


class _Breaker:
    """What both kinds decide. `name` is for people; `endpoints` are the faults that count; a timeout of a call that had
    less than `evidence_s`, or in whose last `evidence_s` somebody was answered, is a suspicion. Nobody probes once the
    `owner`, if there is one, was dropped. Safe for many threads.
    """

    def __init__(self, name: str, endpoints: Collection[str], evidence_s: float, owner: object | None) -> None:
        self._name, self._endpoints, self._evidence_s = name, endpoints, evidence_s
        self._owner = None if owner is None else weakref.ref(owner)
        self.reset()

    def reset(self) -> None:
        """As it was made: in the child of a fork, where no probe runs."""
        self._lock = threading.Lock()
        self._state = _State.CLOSED
        self._probing = self._ended = False
        self._heard_s = -math.inf

    @property
    def closed(self) -> bool:
        return self._state is not _State.OPEN

    @contextmanager
    def call(self, timeout_s: float, *, insist: bool = False) -> Iterator[None]:
        """Around one call on the link. Raises NotAsked while it is open, unless the caller would rather wait."""
        self.check(insist=insist)
        began_s = time.monotonic()
        try:
            yield
        except KvError as error:
            self._judge(error, timeout_s, began_s)
            raise
        self._heard_s = time.monotonic()
        if self._state is not _State.CLOSED:
            self._answered()

    def check(self, *, insist: bool = False) -> None:
        """What `call` raises, without a call: for whoever has work to do first that would be in vain."""
        if not self.closed and not insist and self._is_probed():
            raise NotAsked(f"{self._name} did not answer a moment ago; waiting until it does", fault=self._fault)

    @property
    def _is_dropped(self) -> bool:
        return self._owner is not None and self._owner() is None

    @property
    def _fault(self) -> str:
        return next(iter(self._endpoints), self._name)

    def _judge(self, error: KvError, timeout_s: float, began_s: float) -> None:
        if not self._is_silence(error):
            if not isinstance(error, Timeout | OutOfDescriptors):
                self._answered()
        elif self._is_proof(error, timeout_s, began_s):
            self._fell_silent(error.message)
        else:
            self._probe_from(_State.SUSPECTED)

    def _is_proof(self, error: KvError, timeout_s: float, began_s: float) -> bool:
        if isinstance(error, Unavailable):
            return not isinstance(error, Broken)
        if _is_overdue(timeout_s, began_s):
            return False
        return isinstance(error, Silent) or self._silent_s(timeout_s, began_s) >= self._evidence_s

    def _silent_s(self, timeout_s: float, began_s: float) -> float:
        """How long it had said nothing to anybody when a call ended that began then and had so much time."""
        return timeout_s if self._heard_s < began_s else time.monotonic() - self._heard_s

    def _is_silence(self, error: KvError) -> bool:
        return any(blames(error, endpoint) for endpoint in self._endpoints)

    def _fell_silent(self, message: str) -> None:
        if self._probe_from(_State.OPEN):
            log.info("%s does not answer: %s", self._name, message)

    def _answered(self, *, probe: bool = False) -> None:
        self._heard_s = time.monotonic()
        with self._lock:
            was_open, self._state = not self.closed, _State.CLOSED
            if probe:
                self._probing = False
        if was_open:
            log.info("%s answers again", self._name)

    def _probe_from(self, state: _State) -> bool:
        """Whether that changed the state."""
        with self._lock:
            if self._ended or self._state in (state, _State.OPEN):
                return False
            self._state = state
        self._is_probed()
        return True

    def _is_probed(self) -> bool:
        """Whether a probe runs, begun now if none did: without one nobody would ever close it, so calls pass then."""
        with self._lock:
            if self._probing or self._ended:
                return True
            self._probing = True
        try:
            self._start()
        except RuntimeError as error:  # no thread, or no loop, to be had
            log.warning("asking whether %s answers: %s", self._name, error)
            self._probing = False
        return self._probing

    def _start(self) -> None:
        """Begin to probe, until it is answered."""
        raise NotImplementedError

    def _judge_probe(self, error: BaseException | None, began_s: float) -> bool:
        """Whether it was the last one, by an answer: any but silence is. Our own troubles (no free fd) are neither, and
        whoever answered another call since it began is slow.
        """
        if self._is_dropped:
            return True
        refused = isinstance(error, Unavailable) and self._is_silence(error)  # else it is the server's own word
        if refused or isinstance(error, Timeout | TimeoutError):
            if refused or (self._heard_s < began_s and not _is_overdue(PROBE_TIMEOUT_S, began_s)):
                self._fell_silent(str(error))
            return False
        if error is not None and (isinstance(error, OutOfDescriptors) or not isinstance(error, KvError)):
            log.warning("asking whether %s answers: %r", self._name, error)
            return False
        self._answered(probe=True)
        return True


def _is_overdue(timeout_s: float, began_s: float) -> bool:
    """Whether a timeout came so late that this process itself is what is slow: it says nothing of the other side."""
    return time.monotonic() - began_s > timeout_s + OVERDUE_S


def _pauses() -> Iterator[float]:
    """Seconds between probes: longer ones for who has been away for some seconds."""
    shortest_s, longest_s = PROBE_PAUSE_S
    for tries in itertools.count():
        jitter = secrets.randbits(32) / (1 << 32)  # not the same one in each child of a fork
        yield min(4, 1 + tries // 16) * (shortest_s + jitter * (longest_s - shortest_s))


class AsyncBreaker(_Breaker):
    """`ping` asks for any answer within so many seconds. Use it on one loop."""

    def __init__(
        self,
        name: str,
        endpoints: Collection[str],
        ping: Callable[[float], Awaitable[object]],
        evidence_s: float = EVIDENCE_S,
        owner: object | None = None,
    ) -> None:
        super().__init__(name, endpoints, evidence_s, owner)
        self._ping = ping
        self._task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """No probes any more."""
        self._ended = True
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """`stop`, and await the end of the one under way."""
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        try:
            for pause_s in _pauses():
                began_s = time.monotonic()
                if self._judge_probe(await self._failure(), began_s):
                    return
                await asyncio.sleep(pause_s)
        except asyncio.CancelledError:  # perhaps by somebody who cancels all tasks, and goes on
            self._probing = False
            raise

    async def _failure(self) -> Exception | None:
        try:
            async with asyncio.timeout(2 * PROBE_TIMEOUT_S):
                await self._ping(PROBE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - a probe must not end for anything but an answer
            return error
        return None


class ThreadBreaker(_Breaker):
    """For threads; a probe has one of its own while it lasts."""

    def __init__(
        self,
        name: str,
        endpoints: Collection[str],
        ping: Callable[[float], object],
        evidence_s: float = EVIDENCE_S,
        owner: object | None = None,
    ) -> None:
        self._ping = ping
        super().__init__(name, endpoints, evidence_s, owner)

    def reset(self) -> None:
        super().reset()
        self._closing = threading.Event()

    def close(self) -> None:
        """No probes any more; one that waits for an answer ends with its link."""
        self._ended = True
        self._closing.set()

    def _start(self) -> None:
        threading.Thread(target=self._probe, name="kvstore-probe", daemon=True).start()

    def _probe(self) -> None:
        closing = self._closing
        for pause_s in _pauses():
            began_s = time.monotonic()
            if closing.is_set() or self._judge_probe(self._failure(), began_s) or closing.wait(pause_s):
                return

    def _failure(self) -> Exception | None:
        try:
            self._ping(PROBE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - a probe must not end for anything but an answer
            return error
        return None


B = TypeVar("B", bound=_Breaker)


class Breakers(Generic[B]):
    """Breakers by endpoint, made at the first call. Safe for many threads."""

    def __init__(self, make: Callable[[str], B]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._breakers: dict[str, B] = {}

    def of(self, endpoint: str) -> B:
        with self._lock:
            breaker = self._breakers.get(endpoint)
            if breaker is None:
                breaker = self._breakers[endpoint] = self._make(endpoint)
            return breaker

    def closed(self, endpoint: str) -> bool:
        """For ordering candidates: those that work come first."""
        breaker = self._breakers.get(endpoint)
        return breaker is None or breaker.closed

    def drop(self, endpoints: Collection[str] | None = None) -> list[B]:
        """Those of all links but these (None: of all) leave; they are to be closed."""
        with self._lock:
            return [self._breakers.pop(e) for e in list(self._breakers) if endpoints is None or e not in endpoints]
