"""What the two kinds of `meta` share: running numbers, and when a call that broke is repeated (`Again`) or a listing
goes on (`Cursor`). Who is told that the master is known to be away (NotAsked) before anything was sent is not kept
waiting.
"""

from __future__ import annotations

import random
import threading

from kvstore.client import messages as msg
from kvstore.client.deadline import Deadline, seconds
from kvstore.core import retry
from kvstore.core.errors import KvError, Timeout, Unavailable
from kvstore.core.types import Entry
from kvstore.pb import master_pb2 as m
from kvstore.rpc.breaker import NotAsked


class Numbers:
    """Running numbers of a session's transactions."""

    def __init__(self) -> None:
        self._next, self._lock = 1, threading.Lock()

    def take(self, count: int) -> int:
        """The first of `count` consecutive ones."""
        with self._lock:
            first, self._next = self._next, self._next + count
            return first


class Again:
    """Repetition of a call that is not idempotent by itself: only when it is `safe`, only after Unavailable."""

    def __init__(self, safe: bool, timeout_s: float) -> None:
        self._safe, self._deadline, self._attempt = safe, Deadline(timeout_s), 0

    @property
    def left_s(self) -> float:
        return self._deadline.left_s

    @property
    def again(self) -> bool:
        return self._attempt > 0

    def pause(self, error: KvError) -> float:
        """Seconds until the next attempt. Raises the error when there is none."""
        if not self._safe or not isinstance(error, Unavailable) or self._deadline.passed:
            raise error
        if isinstance(error, NotAsked) and not self.again:
            raise error
        self._attempt += 1
        pause = retry.delay_s(self._attempt, random.getrandbits(64), self._deadline.left_s)
        if pause is None:
            raise error
        return pause


class Cursor:
    """Where a listing stands, so that a broken stream goes on behind the last name."""

    def __init__(self, base: int, path: str, after: str, limit: int, names_only: bool, timeout_s: float) -> None:
        self.done = False
        self._base, self._path, self._after, self._names_only = base, path, after, names_only
        self._left = limit if limit else None
        self.timeout_s = seconds(timeout_s)
        self._idle, self._attempt, self._moved = Deadline(timeout_s), 0, False

    def request(self) -> m.ListRequest:
        self._moved = False
        return m.ListRequest(
            base=self._base, path=self._path, after=self._after, limit=self._left or 0, names_only=self._names_only
        )

    def take(self, page: m.ListPage) -> list[tuple[str, Entry]]:
        rows = msg.page_rows(page)
        if rows:
            self._after, self._moved = rows[-1][0], True
        if self._left is not None:
            self._left -= len(rows)
        return rows

    def finish(self) -> None:
        self.done = True

    def pause(self, error: KvError) -> float:
        """Seconds until the stream is opened again. Raises the error when nothing came for the whole deadline."""
        self.done = self._left == 0
        if self._moved:  # measured from now: the time since the last page may have been the consumer's
            self._idle, self._attempt = Deadline(self.timeout_s), 0
        if not isinstance(error, Unavailable | Timeout) or self._idle.passed:
            raise error
        if isinstance(error, NotAsked) and not self._attempt:
            raise error
        self._attempt += 1
        pause = retry.delay_s(self._attempt, random.getrandbits(64), self._idle.left_s)
        if pause is None:
            raise error
        return pause
