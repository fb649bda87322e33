"""What may become of a message."""

from __future__ import annotations

import dataclasses
import enum


class Fate(enum.Enum):
    ARRIVES = enum.auto()
    LOST = enum.auto()
    TWICE = enum.auto()
    BROKEN = enum.auto()
    """The connection breaks: the caller hears of it, and not whether it had arrived."""


@dataclasses.dataclass(slots=True)
class Weather:
    """Chances of each message."""

    lost: float = 0.0
    twice: float = 0.0
    broken: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.0
