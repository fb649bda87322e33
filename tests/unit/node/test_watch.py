"""When a child is ended because it does not answer, and when not."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import cast

import pytest

from kvstore.config import MountPoint
from kvstore.node import plan, supervisor, watch
from kvstore.node.child import Child, ChildSpec
from kvstore.node.watch import Patience

DEADLINES = Patience(interval_s=0.0, deadline_s=0.2, failures=2, again_s=0.1)


class FakeChild:
    """Ready at once; a kill starts another one with the next pid."""

    def __init__(self) -> None:
        self.pid, self.is_ready, self.done = 1, True, list[str]()

    async def until_ready(self) -> None:
        return

    def kill(self) -> None:
        self.done.append(f"kill {self.pid}")
        self.pid += 1


class Scripted:
    """Gives these answers, one letter each: ``.`` = well, ``x`` = none, ``z`` = none, and this process was stopped
    meanwhile. `given` = the deadlines of the questions.
    """

    name = "m"

    def __init__(self, answers: str, child: FakeChild, on_ask: Callable[[FakeChild], None]) -> None:
        self.over, self.given = asyncio.Event(), list[float]()
        self._answers, self._child, self._on_ask = iter(answers), child, on_ask

    async def ask(self, deadline_s: float) -> str:
        answer = next(self._answers, "")
        if not answer:
            self.over.set()
            await asyncio.sleep(60)
        self.given.append(deadline_s)
        self._on_ask(self._child)
        if answer == "z":
            time.sleep(deadline_s + 0.3)
        return "" if answer == "." else "no answer"

    async def release(self) -> None:
        self._child.done.append("release")


class Seen:
    """What was done to a child whose answers were these, and the deadlines it was given."""

    def __init__(self, done: list[str], given: list[float]) -> None:
        self.done, self.given = done, given


async def watched(answers: str, on_ask: Callable[[FakeChild], None] = lambda child: None) -> Seen:
    child = FakeChild()
    script = Scripted(answers, child, on_ask)
    task = asyncio.create_task(watch.watch(cast("Child", child), script, DEADLINES))
    await asyncio.wait_for(script.over.wait(), 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return Seen(child.done, script.given)


@pytest.mark.allow_errors("does not answer")
@pytest.mark.parametrize(
    ("answers", "ended"),
    [("....", 0), (".x.x.x", 0), (".xx", 1), ("xxx.", 1), ("xxxx", 2)],
    ids=["well", "never twice in a row", "twice", "a new one begins anew", "twice again"],
)
async def test_two_failures_in_a_row_end_it(answers: str, ended: int) -> None:
    """Whoever hangs in it is freed first: its process may hang in its own mount."""
    seen = await watched(answers)
    assert seen.done == [step for i in range(ended) for step in ("release", f"kill {i + 1}")]


async def test_failures_of_a_process_that_died_meanwhile_do_not_count() -> None:
    pids = itertools.count(2)

    def restart(child: FakeChild) -> None:
        child.pid = next(pids)

    assert (await watched("xxxx", restart)).done == []


async def test_what_came_back_late_because_we_were_stopped_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "OVERDUE_S", 0.1)
    assert (await watched("zzz.")).done == []
    assert (await watched("xzz.")).done == [], "nor is it a second failure"


@pytest.mark.allow_errors("does not answer")
async def test_a_late_question_saves_nobody_who_is_silent_to_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "OVERDUE_S", 0.1)
    seen = await watched("zxx")
    assert seen.done == ["release", "kill 1"]
    first, again = DEADLINES.deadline_s, DEADLINES.again_s
    assert seen.given == [first, first, again]


class Broken(Scripted):
    """Its first question fails here, and so does the release of whoever hangs in it."""

    async def ask(self, deadline_s: float) -> str:
        if not self.given:
            self.given.append(deadline_s)
            raise RuntimeError("cannot ask")
        return await super().ask(deadline_s)

    async def release(self) -> None:
        await super().release()
        raise RuntimeError("cannot release")


@pytest.mark.allow_errors("does not answer", "cannot be asked", "may go on to hang")
async def test_a_watch_outlives_what_fails_in_it() -> None:
    child = FakeChild()
    script = Broken("xxxx", child, lambda child: None)
    task = asyncio.create_task(watch.watch(cast("Child", child), script, DEADLINES))
    await asyncio.wait_for(script.over.wait(), 10)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert child.done == ["release", "kill 1", "release", "kill 2"]


def test_it_takes_as_long_as_the_documents_say() -> None:
    """README.md and ARCHITECTURE.md: 18 to 23 s for a mount, 38 to 43 s for a worker."""
    assert (shortest_s(watch.PATIENCE), watch.PATIENCE.longest_s) == (18, 23)
    assert (shortest_s(watch.WORKER_PATIENCE), watch.WORKER_PATIENCE.longest_s) == (38, 43)


def shortest_s(patience: Patience) -> float:
    """From when it fell silent, at the moment of a question, to its end."""
    return patience.deadline_s + (patience.failures - 1) * patience.again_s


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(plan.worker(None, "w.sock"), watch.WORKER_PATIENCE), (plan.mount(MountPoint(dir="m"), "", ""), watch.PATIENCE)],
    ids=["worker", "mount"],
)
async def test_each_kind_has_its_own_patience(
    monkeypatch: pytest.MonkeyPatch, spec: ChildSpec, expected: Patience
) -> None:
    given = list[Patience]()

    async def note(child: Child, watched: watch.Watched, patience: Patience) -> None:
        given.append(patience)

    monkeypatch.setattr(supervisor, "watch", note)
    monkeypatch.setattr(Child, "start", lambda child: None)
    for chosen in (None, DEADLINES):
        supervisor.Supervisor(1.0, chosen).launch(spec)
    await asyncio.sleep(0)
    assert given == [expected, DEADLINES]
