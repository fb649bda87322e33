"""A thread for what may block: notifications (a directory's lock), unmounting, searches in /proc."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

MAX_WAITING: Final = 10_000
"""Notifications behind one that blocks; the kernel's own timeouts make up for those that are dropped."""


class SideThread:
    """Jobs run one after another. The thread dies with the process."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], object]) -> bool:
        """False: too many wait, this one is dropped."""
        if self._jobs.qsize() >= MAX_WAITING:
            return False
        self._jobs.put(job)
        return True

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:
                log.exception("a job of the side thread failed")
