"""What a simulation found wrong."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant does not hold. `words`: names, versions, blocks whose story tells more."""

    def __init__(self, text: str, words: list[str] | None = None) -> None:
        super().__init__(text)
        self.words = words or []
