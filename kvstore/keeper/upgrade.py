"""A live upgrade: a new process starts beside the old one, requests run dry, the old one yields, the new one serves.

The crew starts, ends and attaches processes; here stands how far an upgrade is, and who wants to know.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from kvstore.keeper import channel
from kvstore.keeper.channel import Kind
from kvstore.keeper.loop import Loop
from kvstore.keeper.process import FsProcess
from kvstore.keeper.traffic import Traffic

START_LIMIT_S: Final = 30.0
"""Until the new process serves; before it is ready the old one does."""
QUIET_LIMIT_S: Final = 2.0
"""For requests under way to be answered by the old process. What is left then, the new one gets again."""
YIELD_LIMIT_S: Final = 2.0
"""For the old process to make way, before it is killed."""

Report = Callable[[dict[str, Any]], None]
"""Told once: {"old_pid", "new_pid", "pause_s"} or {"error": one line}."""


class Upgrade:
    def __init__(self, loop: Loop, traffic: Traffic, old: FsProcess, report: Report) -> None:
        self._loop, self._traffic, self._old, self._report = loop, traffic, old, report
        self._yield_at_s: float | None = None
        """Set from when new requests wait until the old process is told to yield."""
        self._paused_at: float | None = None
        self._pause_s = 0.0

    def quieten(self) -> None:
        """The new process is ready: new requests wait in the kernel, those under way run dry."""
        self._pause_begins()
        self._yield_at_s = self._loop.now_s + QUIET_LIMIT_S
        self._traffic.hold(True)

    def step(self) -> None:
        """After each round of the loop: the old process yields as soon as no request is under way."""
        if self._yield_at_s is None or (self._traffic.relay.pending and self._loop.now_s < self._yield_at_s):
            return
        self._yield_at_s = None
        self._old.yielding = True
        self._old.kill_by(self._loop.now_s + YIELD_LIMIT_S)
        try:
            self._old.tell(Kind.YIELD)
        except (channel.Closed, BlockingIOError):
            self._old.kill()

    def old_is_gone(self) -> None:
        """It made way, or died before it was asked to."""
        self._yield_at_s = None
        self._pause_begins()

    def taken_over(self) -> None:
        if self._paused_at is not None:
            self._pause_s = time.monotonic() - self._paused_at

    def succeeded(self, new: FsProcess) -> None:
        """It serves."""
        self._report({"old_pid": self._old.pid, "new_pid": new.pid, "pause_s": round(self._pause_s, 3)})

    def failed(self, why: str) -> None:
        self._traffic.hold(False)
        self._report({"error": why})

    def _pause_begins(self) -> None:
        if self._paused_at is None:
            self._paused_at = time.monotonic()
