"""A line every ten seconds while a run goes on: what is broken now, and what the load has met so far."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tests.chaos.judge import STEPS
from tests.chaos.record import MISS, OK, Call
from tests.support.repeating import Repeating

EVERY_S: Final = 10.0


class Tally:
    """Counts the calls in files that grow. `paths` lists them."""

    def __init__(self, paths: Callable[[], Sequence[Path]]) -> None:
        self._paths = paths
        self._read_bytes = Counter[Path]()
        self.calls = Counter[str]()
        """By how they ended: OK, MISS, "error". A put by a mount counts once."""

    def update(self) -> None:
        """Count what has come since the last time. A line that is not whole yet is left for the next."""
        for path in self._paths():
            with path.open("rb") as file:
                file.seek(self._read_bytes[path])
                data, _, _ = file.read().rpartition(b"\n")
            self._read_bytes[path] += len(data) + 1 if data else 0
            for line in data.splitlines():
                self._count(Call(*json.loads(line)))

    def _count(self, call: Call) -> None:
        if call.verb not in STEPS:
            self.calls[call.outcome if call.outcome in (OK, MISS) else "error"] += 1


class Live(Repeating):
    """Says how it goes, in a thread, while it is entered. `broken`: what is broken now."""

    def __init__(
        self, tally: Tally, broken: Callable[[], Sequence[str]], say: Callable[[str], None], every_s: float = EVERY_S
    ) -> None:
        super().__init__(self._tell, every_s, "chaos-live")
        self._tally, self._broken, self._say = tally, broken, say
        self._start_s = time.monotonic()

    def _tell(self) -> None:
        self._tally.update()
        self._say(f"{time.monotonic() - self._start_s:7.1f} s  {self._line()}")

    def _line(self) -> str:
        calls, broken = self._tally.calls, ", ".join(self._broken()) or "nothing"
        return (
            f"-- {calls.total()} calls, {calls[OK]} ok, {calls[MISS]} misses, {calls['error']} errors; "
            f"broken now: {broken}"
        )
