"""CPU time of other processes, to the nanosecond: ``/proc/PID/stat`` counts in steps of 10 ms, and phases are short."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

CLIENT = "client"
"""Role of the process that measures."""
Pids = Mapping[str, Sequence[int]]
"""Role (keeper, file system, worker, master) → its processes."""


def cpu_s(pid: int) -> float:
    """Seconds that the threads of a process have run; those that ended do not count."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split(" ")[0]) for task in tasks) / 1e9


def read(pids: Pids) -> dict[str, float]:
    """Seconds so far by role, this process among them."""
    return {CLIENT: time.process_time(), **{role: sum(map(cpu_s, each)) for role, each in pids.items()}}


def since(before: Mapping[str, float], pids: Pids) -> dict[str, float]:
    return {role: max(0.0, now - before[role]) for role, now in read(pids).items()}


def children(pid: int) -> list[int]:
    """Processes that a process started and that live."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
