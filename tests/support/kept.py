"""Mounts that have a keeper: what it says of itself, and the death of its file system process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from kvstore.keeper import admin
from tests.support.cluster import wait_until


def status(path: Path) -> dict[str, Any]:
    """`Keeper.status` of the mount at `path`; does not touch the mount."""
    return admin.status(str(path))


def fs_pid(path: Path) -> int:
    return int(status(path)["fs_pid"])


def wait_serving(path: Path, generation: int = 0, timeout_s: float = 20.0) -> None:
    """Until a file system process of at least this generation serves."""

    def serves() -> bool:
        now = status(path)
        return bool(now["state"] == "serving" and now["generation"] >= generation)

    wait_until(serves, f"generation {generation} serves", timeout_s)


def kill_fs(path: Path, number: signal.Signals = signal.SIGKILL, *, wait: bool = True) -> None:
    """Kill the file system process, and wait until its successor serves."""
    before = status(path)
    os.kill(before["fs_pid"], number)
    if wait:
        wait_serving(path, before["generation"] + 1)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that waits for its parent."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True
