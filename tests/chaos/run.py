"""One run: the store stands, the load runs, the nemesis is at work; then all heals, ends, and is judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kvstore import Client
from kvstore.client.messages import Event
from tests.chaos import record
from tests.chaos.excuses import Puts, puts_of
from tests.chaos.health import Health, Life, uninterruptible
from tests.chaos.judge import OF_FILES, Pauses, Verdict, judge, unlike_journal
from tests.chaos.limits import LONGEST_S, MAY_REMEMBER_S
from tests.chaos.live import Live, Tally
from tests.chaos.load import DIRECTORY
from tests.chaos.nemesis import Deed, Nemesis
from tests.chaos.record import Call
from tests.chaos.world import World

WARM_UP_S: Final = 5.0
"""Load without faults at first, so that there is something to lose, and a rate of hits to come back to."""
COOL_DOWN_S: Final = 5.0
_JOIN_S: Final = LONGEST_S + 30.0
"""Above the deadline of any call."""
_PAGE: Final = 4096
_BOOKS_S: Final = 30.0
"""For one question about the journal or the names."""
_QUARANTINED: Final = "moved to quarantine"


class Outcome(NamedTuple):
    seed: int
    seconds: float
    calls: list[Call]
    """In order of their ends."""
    deeds: list[Deed]
    verdict: Verdict
    failures: list[str]
    """What broke beside: a process that did not come back, a load that did not end, a thread stuck for good."""
    unasked: dict[str, int]
    """Process → how often it ended without being killed."""
    lives: list[Life]
    longest_stuck_s: dict[str, float]
    quarantined: int
    """Blocks that the workers found damaged, by their logs."""
    puts: Puts

    @property
    def is_good(self) -> bool:
        verdict = self.verdict
        bad = (verdict.wrong, verdict.hangs, verdict.lost, verdict.untyped, self.failures, self.unasked)
        return not any(bad) and self.puts.is_good


def run(root: Path, seconds: float, seed: int, say: Callable[[str], None]) -> Outcome:
    """`seconds` of faults. `root`: an empty directory for all files. Leaves no process, mount or network behind."""
    start_s = time.monotonic()
    with World(root, seed) as world:
        say(f"{time.monotonic() - start_s:7.1f} s to start {len(world.daemons)} processes; logs in {root}")
        sequence = world.start_load()
        failures: list[str] = []
        nemesis = Nemesis(world, seed, say)
        live = Live(Tally(lambda: world.records), lambda: nemesis.broken, say)
        with live, Health(lambda: _pids(world)) as health:
            time.sleep(WARM_UP_S)
            with _noting(failures):
                nemesis.run(seconds)
                world.settle()
            time.sleep(COOL_DOWN_S)
            if ended := world.stop_load(_JOIN_S):
                failures.append(f"{ended} load processes hang or died\n{world.load_log()}")
        events: list[Event] = []
        with _noting(failures):
            events, unlike = _books(world, sequence)
            failures += [f"unlike the journal: {line}" for line in unlike]
        failures += _stuck(world)
        calls = sorted((c for path in world.records for c in record.read(path)), key=lambda call: call.end_s)
        unasked = {daemon.name: daemon.unasked for daemon in world.daemons if daemon.unasked}
        quarantined = sum(worker.log.read_text(errors="replace").count(_QUARANTINED) for worker in world.workers)
        verdict = judge(calls, events, f"{DIRECTORY}/", MAY_REMEMBER_S, pauses_of(nemesis.deeds))
        return Outcome(seed, seconds, calls, nemesis.deeds, verdict, failures, unasked, health.lives,
                       health.longest_stuck_s, quarantined, puts_of(calls, nemesis.deeds))  # fmt: skip


def pauses_of(deeds: list[Deed]) -> Pauses:
    """Place → when the process that answers the kernel for it was stopped."""
    return {
        place: [(deed.start_s, deed.end_s) for deed in deeds if (deed.what, deed.target) == ("stop", f"mount-{place}")]
        for place in ("a", "b")
    }


@contextmanager
def _noting(failures: list[str]) -> Iterator[None]:
    """What fails here is told at the end, beside the rest."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is: it is part of the verdict
        failures.append(f"{type(error).__name__}: {error}")


def _pids(world: World) -> dict[str, list[int]]:
    loads = {f"load-{i}": [pid] for i, pid in enumerate(world.load_pids())}
    return {daemon.name: daemon.family() for daemon in world.daemons} | loads


def _books(world: World, after: int) -> tuple[list[Event], list[str]]:
    """The master's journal behind sequence `after`, and where its names differ from it."""
    with world.client() as client:
        sequence = client.cluster_map().sequence
        paths = sorted({event.path for event in _events(client, after) if event.kind in OF_FILES})
        rows = dict(zip(paths, client.meta.lookup(paths, timeout_s=_BOOKS_S), strict=True))
        events = _events(client, after)
    return events, unlike_journal(events, sequence, rows)


def _events(client: Client, after: int) -> list[Event]:
    found: list[Event] = []
    while page := client.meta.events(found[-1].sequence if found else after, limit=_PAGE, timeout_s=_BOOKS_S):
        found += page
    return found


def _stuck(world: World) -> list[str]:
    """Threads in D now that everything is at rest; one that waits for the disk is looked at again."""
    for _ in range(20):
        found = [f"{name}/{t}" for name, pids in _pids(world).items() for pid in pids for t in uninterruptible(pid)]
        if not found:
            return []
        time.sleep(0.1)
    return [f"stuck in state D: {', '.join(found)}"]
