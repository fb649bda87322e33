"""When to try again: exponential back-off with full jitter, bounded by the caller's deadline."""

from __future__ import annotations

from kvstore.core.errors import KvError, Overloaded, Unavailable
from kvstore.core.limits import MAX_RETRY_AFTER_S

FIRST_DELAY_S = 0.02
MAX_DELAY_S = 0.5


def delay_s(attempt: int, random_u64: int, left_s: float, retry_after_s: float = 0.0) -> float | None:
    """Seconds to wait before retry number `attempt` (from 1); None when `left_s` does not allow it.

    `retry_after_s`: what the one who refused has asked for. It is waited for, and up to as long again: all who were
    refused together should not come back together.
    """
    jitter = (random_u64 % 1024) / 1024
    ceiling = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(attempt, 10))
    delay = max(ceiling * (0.5 + jitter / 2), min(retry_after_s, MAX_RETRY_AFTER_S) * (1 + jitter))
    return delay if delay < left_s else None


def may_retry(error: KvError, *, idempotent: bool) -> bool:
    """Overloaded was refused before anything happened; Unavailable may have happened (rule 21)."""
    return isinstance(error, Overloaded) or (idempotent and isinstance(error, Unavailable))
