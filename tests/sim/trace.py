"""What happened, in order: the story of a seed, and the hash by which two runs are the same."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Final

KEPT_LINES: Final = 50_000


class Trace:
    """`calls` numbers the calls of a run. With `show` each line is printed as it comes."""

    def __init__(self, now_s: Callable[[], float], show: bool = False) -> None:
        self._now_s, self._show = now_s, show
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.calls = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, text: str) -> None:
        line = f"{self._now_s():.6f} {text}"
        self._hash.update(line.encode())
        self.lines.append(line)
        if self._show:
            print(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def story(self, words: list[str], last: int = 60) -> list[str]:
        """The last lines that hold one of the words."""
        return [line for line in self.lines if any(word in line for word in words)][-last:]
