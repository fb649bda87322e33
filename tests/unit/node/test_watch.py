"""When a child is ended because it does not answer, and when not."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import cast

import pytest

from kvstore.node import watch
from kvstore.node.child import Child
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


def test_it_takes_as_long_as_the_documents_say() -> None:
    """README.md and ARCHITECTURE.md: 23 s."""
    assert watch.PATIENCE.longest_s == 23
