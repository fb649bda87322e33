"""How the processes are: memory, file descriptors, threads that sleep where no signal reaches them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.repeating import Repeating

EVERY_S: Final = 0.5
_WARM_S: Final = 5.0
"""Of a process's life: growth counts from then on."""


class Size(NamedTuple):
    rss_kib: int
    fds: int
    threads: int


class Life(NamedTuple):
    """One process from its first to its last look."""

    name: str
    pid: int
    seconds: float
    warm: Size
    """When it had run for some seconds."""
    last: Size


class Health(Repeating):
    """Looks at all processes all the time, in a thread. `find` gives name → pids (the first is the main one)."""

    def __init__(self, find: Callable[[], Mapping[str, list[int]]]) -> None:
        super().__init__(lambda: self._look(time.monotonic()), EVERY_S, "chaos-health")
        self._find = find
        self._seen: dict[tuple[str, int], tuple[float, float, Size, Size]] = {}
        self._stuck_since: dict[str, float] = {}
        self.longest_stuck_s: dict[str, float] = {}
        """"name/thread" → longest time in D, of those that were there in two looks."""

    @property
    def lives(self) -> list[Life]:
        return [
            Life(name, pid, last_s - first_s, warm, last)
            for (name, pid), (first_s, last_s, warm, last) in sorted(self._seen.items())
        ]

    def _look(self, now_s: float) -> None:
        stuck = set()
        for name, pids in self._find().items():
            for number, pid in enumerate(pids):
                with contextlib.suppress(OSError, IndexError):
                    self._note(name if number == 0 else f"{name}/{number}", pid, now_s)
                stuck |= {f"{name}/{task}" for task in uninterruptible(pid)}
        self._stuck_since = {task: self._stuck_since.get(task, now_s) for task in stuck}
        for task, since_s in self._stuck_since.items():
            if now_s > since_s:
                self.longest_stuck_s[task] = max(self.longest_stuck_s.get(task, 0.0), now_s - since_s)

    def _note(self, name: str, pid: int, now_s: float) -> None:
        size = size_of(pid)
        if not size.rss_kib:  # it is about to be, or has ended
            return
        first_s, _, warm, _ = self._seen.get((name, pid), (now_s, now_s, size, size))
        warm = size if now_s - first_s < _WARM_S else warm
        self._seen[name, pid] = (first_s, now_s, warm, size)


def size_of(pid: int) -> Size:
    """Raises OSError when it is gone."""
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(("VmRSS", "Th"))
    )
    return Size(
        int(status.get("VmRSS", "0").split()[0]), len(list(Path(f"/proc/{pid}/fd").iterdir())), int(status["Threads"])
    )


def uninterruptible(pid: int) -> list[str]:
    """Its threads in state D now."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                if (task / "stat").read_text().rpartition(")")[2].split()[0] == "D":
                    found.append(task.name)
    return found
