"""The keeper's poll loop: callbacks for fds, calls from other threads, and a clock that a sleep of the machine does not
move.
"""

from __future__ import annotations

import collections
import os
import select
import time
from collections.abc import Callable
from typing import Final

TICK_S: Final = 0.25
IN: Final = select.POLLIN
OUT: Final = select.POLLOUT
BROKEN: Final = select.POLLERR | select.POLLNVAL
HANG_UP: Final = select.POLLHUP

OnEvents = Callable[[int], None]


class Loop:
    """`now_s` counts ticks, and one that comes late counts one: after a pause of the machine nothing has aged."""

    def __init__(self, on_tick: Callable[[], None]) -> None:
        self.now_s = 0.0
        self._on_tick = on_tick
        self._next_tick_s = time.monotonic() + TICK_S
        self._poll = select.poll()
        self._watched: dict[int, OnEvents] = {}
        self._new: set[int] = set()
        """Watched since this round's events were fetched: an event for the number is that of a closed predecessor."""
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._wake_fd, IN, self._run_calls)

    def close(self) -> None:
        os.close(self._wake_fd)

    def watch(self, fd: int, events: int, callback: OnEvents) -> None:
        """Errors and hang-ups are told whatever `events` says."""
        self._watched[fd] = callback
        self._new.add(fd)
        self._poll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self._poll.modify(fd, events)

    def forget(self, fd: int) -> bool:
        """Before it is closed. False: it was not watched."""
        if self._watched.pop(fd, None) is None:
            return False
        self._poll.unregister(fd)
        return True

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run it on the loop's thread, not within another callback. From any thread."""
        self._calls.append(call)
        os.eventfd_write(self._wake_fd, 1)

    def run_once(self) -> None:
        """Wait for events, a tick at most, and handle them."""
        left_s = self._next_tick_s - time.monotonic()
        self._new.clear()
        for fd, events in self._poll.poll(max(0.0, left_s * 1000)):
            callback = self._watched.get(fd)
            if callback is not None and fd not in self._new:  # else an earlier callback has closed it
                callback(events)
        now_s = time.monotonic()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self.now_s += TICK_S
            self._on_tick()

    def _run_calls(self, events: int) -> None:
        os.eventfd_read(self._wake_fd)
        while self._calls:
            self._calls.popleft()()
