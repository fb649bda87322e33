"""Children that work at the same time until they are told to stop, and never outlive their test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, ParamSpec, Self, TypeVar

from tests.support.child import TIMEOUT_S, Child

P = ParamSpec("P")
T = TypeVar("T")

SHIFT_S: Final = 180.0
"""A child that nobody stops (the test run was killed) stops by itself."""


class Member(Child[T]):
    """A child that may be killed after it was joined, too."""

    _ended = False

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            super()._end()


class Crew:
    """Children of one test. `stop` is a file that they look for, see `shift`; all that still run at the end of the
    block are killed.

        with Crew(tmp_path) as crew:
            reader = crew.start(read_until, crew.stop)
            …
            crew.call_off()
            assert reader.join() == …
    """

    def __init__(self, directory: Path) -> None:
        self.stop = directory / "stop"
        self._members: list[Member[object]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._members:
            member.kill()

    def start(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Member[T]:
        member = Member(function, *args, **kwargs)
        self._members.append(member)  # type: ignore[arg-type]  # it is only ever killed from there
        return member

    def call_off(self) -> None:
        """Tell all to stop, after what they are at."""
        self.stop.touch()

    def together(self, members: list[Member[T]], timeout_s: float = TIMEOUT_S) -> list[T]:
        """What they return, when all have returned within the time."""
        end_s = time.monotonic() + timeout_s
        return [member.join(max(0.0, end_s - time.monotonic())) for member in members]


def shift(stop: Path) -> Iterator[int]:
    """0, 1, 2 …: one for each turn of a child's work, until it is called off; at least one."""
    end_s, turn = time.monotonic() + SHIFT_S, 0
    while True:
        last = stop.exists() or time.monotonic() > end_s
        yield turn
        turn += 1
        if last:
            return
