"""When a mount is ended because it does not answer, and when not."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from kvstore.fuse import mountpoint
from kvstore.node import watch
from kvstore.node.child import Child
from kvstore.node.watch import Patience


class FakeChild:
    """Ready at once; a kill starts another one with the next pid."""

    def __init__(self) -> None:
        self.pid, self.is_ready, self.done = 1, True, list[str]()

    async def until_ready(self) -> None:
        return

    def kill(self) -> None:
        self.done.append(f"kill {self.pid}")
        self.pid += 1


async def watched(
    answers: str, monkeypatch: pytest.MonkeyPatch, on_ask: Callable[[FakeChild], None] = lambda child: None
) -> list[str]:
    """What was done to a mount that gave these answers, one letter each: ``.`` = well, ``x`` = none."""
    child, given, over = FakeChild(), iter(answers), asyncio.Event()

    async def ask(directory: str, deadline_s: float) -> str:
        answer = next(given, "")
        if not answer:
            over.set()
            await asyncio.sleep(60)
        on_ask(child)
        return "no answer" if answer == "x" else ""

    monkeypatch.setattr(watch, "ask", ask)
    monkeypatch.setattr(watch, "abort", lambda directory: child.done.append(f"abort {directory}"))
    task = asyncio.create_task(watch.watch(cast("Child", child), "/m", Patience(0.0, 1.0, 2)))
    await asyncio.wait_for(over.wait(), 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return child.done


@pytest.mark.allow_errors("does not answer")
@pytest.mark.parametrize(
    ("answers", "ended"),
    [("....", 0), (".x.x.x", 0), (".xx", 1), ("xxx.", 1), ("xxxx", 2)],
    ids=["well", "never twice in a row", "twice", "a new one begins anew", "twice again"],
)
async def test_two_failures_in_a_row_end_it(answers: str, ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborted first: its process may hang in its own mount."""
    done = await watched(answers, monkeypatch)
    assert done == [step for i in range(ended) for step in ("abort /m", f"kill {i + 1}")]


async def test_failures_of_a_process_that_died_meanwhile_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = itertools.count(2)

    def restart(child: FakeChild) -> None:
        child.pid = next(pids)

    assert await watched("xxxx", monkeypatch, restart) == []


@pytest.fixture
def stat_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of ``stat``."""

    def put(script: str) -> None:
        (tmp_path / "stat").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "stat").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return put


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("exit 0", ""),
        ("echo 'stat: cannot read file system information: Input/output error' >&2; exit 1", ""),
        ('test "$LC_ALL" = C && echo "stat: $3: Transport endpoint is not connected" >&2; exit 1', "not connected"),
        ("exec sleep 60", "no answer within 0.3 s"),
    ],
    ids=["well", "an error is an answer", "nobody serves it", "hangs"],
)
async def test_what_an_answer_says(stat_says: Callable[[str], None], script: str, complaint: str) -> None:
    stat_says(script)
    started = time.monotonic()
    said = await watch.ask("/m", 0.3 if "sleep" in script else 10.0)
    assert (complaint in said) if complaint else said == ""
    assert time.monotonic() - started < 5


async def test_where_nobody_can_ask_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await watch.ask("/m", 1.0) == ""


def test_only_the_connection_of_our_own_mount_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "mountinfo"
    info.write_text("1 1 0:41 / /m rw - fuse.kvstore kvstore rw\n2 1 0:42 / /other rw - fuse.sshfs other rw\n")
    monkeypatch.setattr(mountpoint, "MOUNTINFO", str(info))
    monkeypatch.setattr(watch, "CONNECTIONS", tmp_path)
    for minor in ("41", "42"):
        (tmp_path / minor).mkdir()
        (tmp_path / minor / "abort").touch()
    for directory in ("/m", "/other", "/none"):
        watch.abort(directory)
    assert [(tmp_path / minor / "abort").read_text() for minor in ("41", "42")] == ["1", ""]
