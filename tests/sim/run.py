"""Run a seed, and tell what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from unittest import mock

from tests.sim.clock import virtual
from tests.sim.course import run_course
from tests.sim.disk import FIRST_FD
from tests.sim.drive import remove_tree
from tests.sim.faults import Violation
from tests.sim.loop import SimLoop, Stuck
from tests.sim.trace import Trace
from tests.sim.world import World

LOAD_S: Final = 12.0
MAX_S: Final = 400.0
"""Of virtual time: a seed that takes longer hangs."""
FDS: Final = 8192


@dataclasses.dataclass(slots=True)
class Outcome:
    """`error` is "" when all held. `digest` names the course of events."""

    seed: int
    error: str
    story: list[str]
    digest: str
    outcomes: Counter[str]
    took_s: float
    rounds: int


class _Errors(logging.Handler):
    """A log line that nobody expects of a program that works as it should."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__(logging.ERROR)
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            last = traceback.extract_tb(record.exc_info[2])[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            self._loop.troubles.append(f"{record.name}: {record.getMessage()} ({record.exc_info[1]!r} in {where})")


def run_seed(seed: int, *, load_s: float = LOAD_S, faults: Sequence[str] = (), show: bool = False) -> Outcome:
    """Never raises for what the simulation finds. `faults`: kinds of the nemesis, () for all."""
    began_s = time.perf_counter()
    loop = SimLoop(seed)
    trace = Trace(loop.time, show)
    root = Path(tempfile.mkdtemp(prefix="kvsim-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    worlds: list[World] = []
    error, words = "", list[str]()

    async def course() -> None:
        worlds.append(World(loop, root, trace))
        await run_course(worlds[0], load_s, faults)

    with _surroundings(loop, seed):
        try:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(asyncio.wait_for(course(), MAX_S))
        except Violation as violation:
            error, words = str(violation), violation.words
        except Stuck:
            error = "everything waits, and for nothing"
        except TimeoutError:
            error = f"not over after {MAX_S:.0f} s"
        finally:
            counted = worlds[0].watch.outcomes if worlds else Counter[str]()
            _bury(loop, worlds)
            remove_tree(str(root))
    error = error.replace(str(root), "")
    story = trace.story([*words, "NEMESIS", "VIOLATION"]) if words else list(trace.lines)[-60:]
    return Outcome(seed, error, story, trace.digest, counted, time.perf_counter() - began_s, loop.rounds)


def freeze() -> None:
    """Before many seeds: what is there now is never collected, and each of a seed's two collections takes 1 ms instead
    of 30."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _surroundings(loop: SimLoop, seed: int) -> Iterator[None]:
    """No collection in the middle (what it finalises would depend on it), no signals, enough fds, errors noted."""
    handler, root, level = _Errors(loop), logging.getLogger("kvstore"), logging.getLogger("kvstore").level
    sigio = signal.signal(signal.SIGIO, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(FDS, limits[0]), max(FDS, limits[1])))
    with _silence():
        gc.collect()  # what another run, or test, has left
    gc.disable()
    root.addHandler(handler)
    propagate, root.propagate = root.propagate, False
    root.setLevel(logging.ERROR)
    try:
        with virtual(loop, random.Random(seed).getrandbits(64)):
            yield
    finally:
        root.removeHandler(handler)
        root.propagate = propagate
        root.setLevel(level)
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        signal.signal(signal.SIGIO, sigio)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """For the ends of what was killed: open sockets, coroutines that never ran on."""
    with warnings.catch_warnings(), mock.patch.object(sys, "unraisablehook"):
        warnings.simplefilter("ignore")
        yield


def _bury(loop: SimLoop, worlds: list[World]) -> None:
    """Close everything; nothing of the product runs on, and what the interpreter says of it is no news."""
    with _silence():
        hosts = [host for world in worlds for host in world.hosts]
        for host in hosts:
            host.crash()
        for host in hosts:
            for process in host.buried:
                process.bury()
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.clear()
        del hosts
        worlds.clear()
        loop.close()
        gc.collect()
    asyncio.set_event_loop(None)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd >= FIRST_FD:
            with contextlib.suppress(OSError):
                os.close(fd)
