"""How much memory this process may have: a tier in memory has to fit into it, or the kernel ends the worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvstore.config.units import format_size
from kvstore.core.errors import InvalidRequest
from kvstore.keeper import mountinfo

IN_MEMORY: Final = ("tmpfs", "ramfs")
SHARE: Final = 0.9
"""Of the limit for all volumes of the tier mem: the rest is for the worker itself and its scratch share."""


def check(mem_bytes: int, root: Path = Path("/")) -> None:
    """Raises InvalidRequest when volumes of the tier mem of `mem_bytes` in all do not fit. Blocks."""
    limit = limit_bytes(root)
    if limit is not None and mem_bytes > SHARE * limit:
        raise InvalidRequest(
            f"worker.volumes: the tier mem has {format_size(mem_bytes)}, and this process may have "
            f"{format_size(limit)} of memory: lower its capacity to {format_size(int(SHARE * limit))}, or raise the "
            "limit"
        )


def doubt(tier: str, path: str) -> str:
    """What is odd about a volume of this tier in this directory, "" when nothing is: most often a file system that was
    to be mounted there is not. Blocks; raises OSError.
    """
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kind = next((mount.fs_type for mount in mountinfo.of_process() if mount.device == number), "")
    if tier == "mem" and kind not in (*IN_MEMORY, ""):
        return f"tier mem, but it lies on {kind}: as slow as that disk. Is a tmpfs to be mounted there?"
    if tier != "mem" and kind in IN_MEMORY:
        return f"tier {tier}, but it lies on {kind}: it takes memory, and a reboot empties it"
    return ""


def limit_bytes(root: Path = Path("/")) -> int | None:
    """The lowest limit of its control groups (version 2, or 1) and the machine's memory; None: nothing is known."""
    limits = [_machine(root), *_groups(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _machine(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path) -> list[int | None]:
    limits: list[int | None] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in group.split("/") if part]
        limits += [_number(top.joinpath(*parts[:depth]) / name) for depth in range(len(parts) + 1)]
    return limits


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
