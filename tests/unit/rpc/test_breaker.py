"""A breaker opens by silence that is proved, refuses at once while it is open, and closes by itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.core.errors import KvError, NotFound, Overloaded, Timeout, Unavailable
from kvstore.core.limits import EVIDENCE_S, METADATA_TIMEOUT_S, OVERDUE_S
from kvstore.rpc.breaker import AsyncBreaker, Breakers, Broken, NotAsked, OutOfDescriptors, Silent, ThreadBreaker
from tests.support.cluster import wait_until
from tests.support.worker_kit import until

PEER = "w:1"
REFUSED, LATE = Unavailable("refused", fault=PEER), Timeout("late", fault=PEER)


class Peer:
    """Whom the breaker's probes ask: `answer` is what they get, None for a good answer. `held`: an answer takes until
    that is set.
    """

    def __init__(self, kind: str) -> None:
        self.answer: KvError | None = LATE
        self.closed_when_asked: list[bool] = []
        self.held = threading.Event()
        self.held.set()
        self.breaker: AsyncBreaker | ThreadBreaker
        self.breaker = (
            AsyncBreaker(PEER, [PEER], self._ping) if kind == "async" else ThreadBreaker(PEER, [PEER], self.ping)
        )

    @property
    def asked(self) -> int:
        return len(self.closed_when_asked)

    def _note(self) -> None:
        self.closed_when_asked.append(self.breaker.closed)

    def ping(self, timeout_s: float) -> None:
        self._note()
        self.held.wait(10)
        if self.answer is not None:
            raise self.answer

    async def _ping(self, timeout_s: float) -> None:
        self._note()
        while not self.held.is_set():  # noqa: ASYNC110 - it is for threads, too
            await asyncio.sleep(0.01)
        if self.answer is not None:
            raise self.answer

    def call(self, error: KvError | None = None, timeout_s: float = METADATA_TIMEOUT_S, **options: Any) -> None:
        with self.breaker.call(timeout_s, **options):
            if error is not None:
                raise error

    def fail_insisting(self, error: KvError) -> None:
        with pytest.raises(type(error)):
            self.call(error, insist=True)

    def late(self, meanwhile: Callable[[], None]) -> None:
        with self.breaker.call(METADATA_TIMEOUT_S):
            meanwhile()
            raise LATE

    def late_while_another_is_answered(self, then: Callable[[], None] = lambda: None) -> None:
        with self.breaker.call(METADATA_TIMEOUT_S):
            self.call()
            then()
            raise LATE

    def fail(self, error: KvError, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        with pytest.raises(type(error)):
            self.call(error, timeout_s)


@pytest.fixture(params=["async", "sync"])
async def peer(request: pytest.FixtureRequest) -> AsyncIterator[Peer]:
    peer = Peer(request.param)
    yield peer
    peer.held.set()
    if isinstance(peer.breaker, AsyncBreaker):
        await peer.breaker.close()
    else:
        peer.breaker.close()


@pytest.mark.parametrize(
    ("error", "timeout_s"),
    [(REFUSED, 0.01), (LATE, EVIDENCE_S), (Silent("no ping came back", fault=PEER), 0.01)],
    ids=["refused", "a whole timeout", "no ping"],
)
async def test_one_proof_of_silence_opens_it(peer: Peer, error: KvError, timeout_s: float) -> None:
    peer.fail(error, timeout_s)
    assert not peer.breaker.closed
    begin = time.monotonic()
    for _ in range(100):
        with pytest.raises(NotAsked) as caught:
            peer.call()
        assert caught.value.fault == PEER
    assert (time.monotonic() - begin) / 100 < 0.01


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("a peer of it", fault="other:1"),
        Timeout("the caller's own time is over"),
        NotFound("it answered"),
        Overloaded("it answered", fault=PEER),
    ],
    ids=str,
)
async def test_only_the_fault_of_its_own_link_opens_it(peer: Peer, error: KvError) -> None:
    peer.fail(error)
    assert peer.breaker.closed
    await asyncio.sleep(0)
    assert peer.asked == 0, "nor is it suspected"


@pytest.mark.parametrize("error", [LATE, Broken("it hung up", fault=PEER)], ids=str)
async def test_what_proves_nothing_is_a_suspicion_that_a_probe_clears_up(peer: Peer, error: KvError) -> None:
    peer.held.clear()
    peer.fail(error, 0.05)
    assert peer.breaker.closed
    peer.call()  # others go on meanwhile
    await until(lambda: peer.asked == 1)
    peer.fail(LATE, 0.05)
    peer.answer = None
    peer.held.set()
    await asyncio.sleep(0.3)
    assert peer.breaker.closed
    assert peer.asked == 1, "one probe for all who suspect it"


async def test_who_answers_others_is_slow_and_not_silent(peer: Peer) -> None:
    """A call that had all the time there is, and got no answer, while others did."""
    peer.held.clear()
    with pytest.raises(Timeout):
        peer.late_while_another_is_answered()
    assert peer.breaker.closed
    await until(lambda: peer.asked == 1)  # a probe decides
    peer.answer = None
    peer.held.set()
    await asyncio.sleep(0.1)
    assert peer.breaker.closed


class Clock:
    """Stands until somebody sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("kvstore.rpc.breaker.time", SimpleNamespace(monotonic=lambda: self.now_s))

    def set(self, now_s: float) -> None:
        self.now_s = now_s


async def test_what_was_heard_before_the_silence_began_saves_nobody(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.held.clear()
    clock = Clock(monkeypatch)
    with pytest.raises(Timeout):
        peer.late_while_another_is_answered(lambda: clock.set(METADATA_TIMEOUT_S))
    assert not peer.breaker.closed


async def test_a_timeout_that_comes_far_too_late_tells_of_this_process_only(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped, or had no processor: whoever was called may have answered long ago."""
    peer.held.clear()
    clock = Clock(monkeypatch)
    with pytest.raises(Timeout):
        peer.late(lambda: clock.set(METADATA_TIMEOUT_S + OVERDUE_S + 0.01))
    assert peer.breaker.closed
    await until(lambda: peer.asked == 1)  # a probe decides


async def test_a_probe_that_was_late_is_no_proof_against_who_was_answered_meanwhile(peer: Peer) -> None:
    peer.held.clear()
    peer.fail(LATE, 0.05)
    await until(lambda: peer.asked == 1)
    peer.call()
    peer.held.set()  # the probe ends without an answer
    await until(lambda: peer.asked == 2)
    assert peer.closed_when_asked == [True, True]


async def test_our_own_want_of_descriptors_is_no_answer_to_a_probe(peer: Peer) -> None:
    peer.answer = OutOfDescriptors("no free fd")
    peer.fail(REFUSED)
    await until(lambda: peer.asked >= 2)
    peer.fail_insisting(OutOfDescriptors("no free fd"))
    assert not peer.breaker.closed


async def test_a_suspicion_that_proves_true_opens_it(peer: Peer) -> None:
    peer.fail(LATE, 0.05)
    await until(lambda: not peer.breaker.closed)


@pytest.mark.parametrize(
    "answer", [None, NotFound("no such thing"), Overloaded("later"), Unavailable("rebuilding")], ids=str
)
async def test_any_answer_to_a_probe_closes_it(peer: Peer, answer: KvError | None) -> None:
    peer.fail(REFUSED)
    await until(lambda: peer.asked >= 2)
    assert not peer.breaker.closed
    peer.answer = answer
    await until(lambda: peer.breaker.closed)
    asked = peer.asked
    await asyncio.sleep(0.6)
    assert peer.asked == asked, "nobody probes what works"


async def test_it_opens_again_after_it_closed(peer: Peer) -> None:
    for _ in range(3):
        peer.answer = LATE
        peer.fail(REFUSED)
        assert not peer.breaker.closed
        peer.answer = None
        await until(lambda: peer.breaker.closed)


async def test_who_would_rather_wait_is_not_refused_and_closes_it(peer: Peer) -> None:
    peer.held.clear()
    peer.fail(REFUSED)
    peer.call(insist=True)
    assert peer.breaker.closed


async def test_a_closed_client_probes_no_more(peer: Peer) -> None:
    peer.fail(REFUSED)
    await until(lambda: peer.asked >= 1)
    if isinstance(peer.breaker, AsyncBreaker):
        await peer.breaker.close()
    else:
        peer.breaker.close()
    await asyncio.sleep(0.1)
    asked = peer.asked
    await asyncio.sleep(0.6)
    assert peer.asked == asked
    assert not [t for t in threading.enumerate() if t.name == "kvstore-probe"]


async def test_a_probe_that_cannot_begin_is_begun_by_a_later_call(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one nobody would ever close it: until then calls pass."""

    def no_thread() -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(peer.breaker, "_start", no_thread)
        peer.fail(REFUSED)
        assert not peer.breaker.closed
        peer.fail(REFUSED)  # it was asked
    peer.answer = None
    peer.held.clear()
    with pytest.raises(NotAsked):
        peer.call()
    peer.held.set()
    await until(lambda: peer.breaker.closed)


async def test_a_probe_that_somebody_cancels_is_begun_anew() -> None:
    peer = Peer("async")
    peer.held.clear()
    peer.fail(REFUSED)
    await until(lambda: peer.asked == 1)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    peer.answer = None
    peer.held.set()
    with pytest.raises(NotAsked):
        peer.call()
    await until(lambda: peer.breaker.closed)


def test_a_child_of_a_fork_begins_anew() -> None:
    """The thread that would close it is the parent's."""
    peer = Peer("sync")
    peer.held.clear()
    peer.fail(REFUSED)
    peer.breaker.reset()
    peer.call()
    peer.fail(REFUSED)
    peer.held.set()
    peer.answer = None
    wait_until(lambda: peer.breaker.closed, "a probe of its own closes it")


def test_breakers_of_workers_that_left_are_dropped() -> None:
    pings: Callable[[float], None] = lambda timeout_s: None  # noqa: E731
    breakers = Breakers(lambda endpoint: ThreadBreaker(endpoint, [endpoint], pings))
    assert breakers.closed("a:1")
    first, second = breakers.of("a:1"), breakers.of("b:1")
    assert breakers.of("a:1") is first
    assert breakers.drop({"a:1"}) == [second]
    assert breakers.drop() == [first]
    assert breakers.of("a:1") is not first
