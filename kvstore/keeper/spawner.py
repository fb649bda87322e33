"""Starts file system processes: which command, which number, and when again after one that could not serve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from kvstore.keeper.loop import Loop
from kvstore.keeper.process import FsProcess

FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 5.0
STEADY_S: Final = 10.0
"""One that lived for so long lets its successors start over with the shortest pause."""


class Spawner:
    """`argv`: the command of whoever served last. `generation`: of whoever was started last, from 0."""

    def __init__(self, argv: Sequence[str], loop: Loop) -> None:
        self.argv = list(argv)
        self.generation = -1
        self._loop = loop
        self._session = int.from_bytes(os.urandom(8), "little") or 1
        self._pause_s = FIRST_PAUSE_S
        self._due_at_s: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether the time that `later` set has come."""
        return self._due_at_s is not None and self._loop.now_s >= self._due_at_s

    def spawn(self, argv: Sequence[str], state_fd: int, limit_s: float) -> FsProcess:
        """It is killed after `limit_s` unless somebody changes that. Raises OSError when the command cannot be run."""
        self._due_at_s = None
        self.generation += 1
        process = FsProcess(argv, state_fd, self._session, self.generation, self._loop.now_s)
        process.kill_by(self._loop.now_s + limit_s)
        return process

    def later(self) -> None:
        """One could not serve: try again after a pause, a longer one each time."""
        self._due_at_s = self._loop.now_s + self._pause_s
        self._pause_s = min(MAX_PAUSE_S, self._pause_s * 2)

    def never(self) -> None:
        """Nobody is needed any more."""
        self._due_at_s = None

    def ended(self, process: FsProcess) -> None:
        """After it served."""
        if self._loop.now_s - process.spawned_s >= STEADY_S:
            self._pause_s = FIRST_PAUSE_S
