"""Callers that share a client do not queue behind one another's timeouts, for a master or worker that hangs."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest

from kvstore import Client
from kvstore.client.aio import AsyncClient
from kvstore.client.cluster import AsyncCluster, Cluster
from kvstore.client.deadline import Deadline
from kvstore.client.flight import AsyncFlight, Flight
from kvstore.client.messages import ClusterMap
from kvstore.client.meta import AsyncMeta, Meta
from kvstore.client.threads import Threads
from kvstore.core.errors import Denied, KvError, NotFound, Timeout, Unavailable
from kvstore.rpc.metadata import Caller

COUNT = 8
MAP = ClusterMap("c", 1, (), 0, 0, "", 1 << 30)


def all_together(call: Callable[[int], object], count: int = COUNT) -> list[object]:
    """What the calls returned or raised, each from a thread of its own."""
    results: list[object] = [None] * count

    def run(index: int) -> None:
        try:
            results[index] = call(index)
        except KvError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


async def outcome(call: Awaitable[object]) -> object:
    try:
        return await call
    except KvError as error:
        return error


class Asked:
    """A question: counts who asks. Answers after `release`, with `error` if that is set."""

    def __init__(self, error: KvError | None = None) -> None:
        self.count, self.error = 0, error
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self, deadline: Deadline) -> int:
        self.count += 1
        self.begun.set()
        if not self.release.wait(deadline.left_s):
            raise Timeout("hangs")
        if self.error:
            raise self.error
        return self.count

    async def in_loop(self, deadline: Deadline) -> int:
        return await asyncio.to_thread(self, deadline)


# ---- one flight ----


@pytest.mark.parametrize("error", [None, Denied("no"), Unavailable("refused at once")])
def test_threads_share_one_answer_whatever_it_is(error: KvError | None) -> None:
    asked, flight = Asked(error), Flight[int]()

    def call(index: int) -> object:
        if index == COUNT - 1:  # lets it end when the others had their chance to wait
            asked.begun.wait(5)
            asked.release.set()
            return None
        return flight.run(asked, 5.0)

    results = all_together(call)[:-1]
    assert all(r == (error or r) for r in results)
    assert asked.count <= len(results)
    assert flight.run(lambda _: 7, 5.0) == 7, "the next one asks anew"


async def test_tasks_share_one_answer() -> None:
    asked, flight = Asked(), AsyncFlight[int]()
    tasks = [asyncio.ensure_future(flight.run(asked.in_loop, 5.0)) for _ in range(COUNT)]
    await asyncio.to_thread(asked.begun.wait, 5)
    asked.release.set()
    assert await asyncio.gather(*tasks) == [1] * COUNT
    assert asked.count == 1


async def test_tasks_share_one_error() -> None:
    asked, flight = Asked(Denied("no")), AsyncFlight[int]()
    tasks = [asyncio.ensure_future(outcome(flight.run(asked.in_loop, 5.0))) for _ in range(COUNT)]
    await asyncio.to_thread(asked.begun.wait, 5)
    asked.release.set()
    assert [type(r) for r in await asyncio.gather(*tasks)] == [Denied] * COUNT
    assert asked.count == 1


async def test_a_cancelled_caller_does_not_take_the_others_along() -> None:
    flight, begun, count = AsyncFlight[str](), asyncio.Event(), 0

    async def ask(deadline: Deadline) -> str:
        nonlocal count
        count += 1
        if count == 1:
            begun.set()
            await asyncio.sleep(deadline.left_s)
        await asyncio.sleep(0)
        return "answer"

    first = asyncio.ensure_future(flight.run(ask, 30.0))
    await begun.wait()
    others = [asyncio.ensure_future(flight.run(ask, 30.0)) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    assert await asyncio.gather(*others) == ["answer"] * 3
    assert count == 2


async def test_the_end_of_a_hasty_callers_time_is_not_the_others() -> None:
    flight, count = AsyncFlight[str](), 0

    async def ask(deadline: Deadline) -> str:
        nonlocal count
        count += 1
        if count == 1:
            await asyncio.sleep(deadline.left_s)
            raise Timeout("the hasty one's")
        return "answer"

    hasty = asyncio.ensure_future(outcome(flight.run(ask, 0.02)))
    await asyncio.sleep(0)
    assert await flight.run(ask, 30.0) == "answer"
    assert isinstance(await hasty, Timeout)


def test_a_waiter_leaves_at_its_own_time() -> None:
    asked, flight = Asked(), Flight[int]()
    first = threading.Thread(target=flight.run, args=(asked, 30.0))
    first.start()
    asked.begun.wait(5)
    with pytest.raises(Timeout, match="another caller"):
        flight.run(asked, 0.05)
    asked.release.set()
    first.join()
    assert asked.count == 1


# ---- the cluster's map ----


class HangingMeta:
    """Never answers; `count` says how often it was asked."""

    def __init__(self, answers: int = 0) -> None:
        self.count, self._answers = 0, answers

    def cluster_map(self, *, timeout_s: float) -> ClusterMap:
        self.count += 1
        if self.count <= self._answers:
            return MAP
        time.sleep(timeout_s)
        raise Timeout("hangs", fault="m:1")


class AsyncHangingMeta(HangingMeta):
    async def cluster_map(self, *, timeout_s: float) -> ClusterMap:  # type: ignore[override]
        self.count += 1
        if self.count <= self._answers:
            return MAP
        await asyncio.sleep(timeout_s)
        raise Timeout("hangs", fault="m:1")


def test_threads_that_want_the_map_ask_once() -> None:
    meta = HangingMeta()
    cluster = Cluster(cast("Meta", meta), Caller())
    assert all(isinstance(r, Timeout) for r in all_together(lambda _: cluster.map(timeout_s=0.3)))
    assert meta.count <= 2, "a thread that was late may ask on its own"


async def test_tasks_that_want_the_map_ask_once() -> None:
    meta = AsyncHangingMeta()
    cluster = AsyncCluster(cast("AsyncMeta", meta), Caller())
    results = await asyncio.gather(*(outcome(cluster.map(timeout_s=0.3)) for _ in range(COUNT)))
    assert all(isinstance(r, Timeout) for r in results)
    assert meta.count == 1


def test_the_map_from_before_is_served_to_all_after_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.cluster.MAP_TTL_S", 0.0)
    meta = HangingMeta(answers=1)
    cluster = Cluster(cast("Meta", meta), Caller())
    assert cluster.map() is MAP
    assert all_together(lambda _: cluster.map(timeout_s=0.3)) == [MAP] * COUNT
    assert [cluster.map(timeout_s=0.3) for _ in range(COUNT)] == [MAP] * COUNT
    assert meta.count == 2, "who comes next does not ask for a while"


# ---- a whole client before a master that accepts and says nothing ----


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"kvstore://127.0.0.1:{listener.getsockname()[1]}"


CALLS: list[tuple[str, tuple[Any, ...]]] = [("put", ("v", b"1")), ("get", ("v",)), ("stat", ("v",))]


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_threads_end_in_their_own_time_while_the_master_hangs(silent: str, name: str, args: tuple[Any, ...]) -> None:
    with Client(silent, worker_socket="") as client:
        begin = time.monotonic()
        results = all_together(lambda _: getattr(client, name)(*args, timeout_s=1.0))
        taken_s = time.monotonic() - begin
    assert all(isinstance(r, Timeout | Unavailable | NotFound) for r in results)
    assert taken_s < 3.0, "one after the other they would take 8 s"


@pytest.mark.parametrize(("name", "args"), CALLS)
async def test_tasks_end_in_their_own_time_while_the_master_hangs(
    silent: str, name: str, args: tuple[Any, ...]
) -> None:
    async with AsyncClient(silent, worker_socket="") as client:
        begin = time.monotonic()
        calls = (outcome(getattr(client, name)(*args, timeout_s=1.0)) for _ in range(COUNT))
        results = await asyncio.gather(*calls)
        taken_s = time.monotonic() - begin
    assert all(isinstance(r, Timeout | Unavailable | NotFound) for r in results)
    assert taken_s < 3.0


# ---- the few threads of a client ----


def test_who_waits_for_a_thread_waits_its_own_time() -> None:
    threads, release = Threads(1), threading.Event()
    busy = threading.Thread(target=threads.map, args=(lambda _: release.wait(30), range(2), Deadline(30)))
    busy.start()
    ran: list[int] = []
    try:
        with pytest.raises(Timeout, match="2 of 2"):
            threads.map(ran.append, range(2), Deadline(0.05))
    finally:
        release.set()
        busy.join()
        threads.close()
    assert ran == []
