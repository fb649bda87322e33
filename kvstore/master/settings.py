"""What a master is told to be like."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.core.limits import MAX_BLOCK_BYTES
from kvstore.master.storage.records import JournalLimits


class Settings(NamedTuple):
    tick_s: float = 1.0
    dead_ticks: int = 5
    forget_after_s: float = 86_400.0
    journal: JournalLimits = JournalLimits(1_000_000, 1 << 30)
    max_block_bytes: int = MAX_BLOCK_BYTES
