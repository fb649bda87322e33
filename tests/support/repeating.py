"""Something that is done again and again in a thread beside a test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

_JOIN_TIMEOUT_S: Final = 30.0


class Repeating:
    """Calls `step` every so often while it is entered."""

    def __init__(self, step: Callable[[], None], every_s: float, name: str) -> None:
        self._step, self._every_s = step, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._step()
