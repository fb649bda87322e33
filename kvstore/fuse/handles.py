"""Open handles: small integers the kernel gets, and what stands behind them.

Numbers are below 2**32, never 0, and not used again soon. The bits above say what kind of handle it is: of a directory
(`DIRECTORY_BIT`), served by passthrough (`keeper.channel.PASSTHROUGH_BIT`).
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from kvstore.core.errors import Overloaded, Stale

MAX_HANDLE: Final = 2**32 - 1
DIRECTORY_BIT: Final = 1 << 32
MAX_OPEN: Final = 65_536
"""Handles open at a time."""

H = TypeVar("H")


class HandleTable(Generic[H]):
    """Handles by number. Plain data, so that it can be written down."""

    def __init__(self) -> None:
        self._next = 1
        self._open: dict[int, H] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, handle: H) -> int:
        """Its number. Raises Overloaded beyond `MAX_OPEN`."""
        if len(self._open) >= MAX_OPEN:
            raise Overloaded(f"{MAX_OPEN} files are open on this mount; close some")
        while self._next in self._open:
            self._advance()
        number = self._next
        self._advance()
        self._open[number] = handle
        return number

    def get(self, number: int) -> H:
        """Raises Stale for a number that is not open."""
        try:
            return self._open[number]
        except KeyError:
            raise Stale(f"handle {number} is not open") from None

    def pop(self, number: int) -> H:
        handle = self.get(number)
        del self._open[number]
        return handle

    def restore(self, number: int, handle: H) -> None:
        """One that a former process opened. New ones begin behind it."""
        self._open[number] = handle
        self._next = max(self._next, number % MAX_HANDLE + 1)

    def all(self) -> list[H]:
        return list(self._open.values())

    def _advance(self) -> None:
        self._next = self._next % MAX_HANDLE + 1
