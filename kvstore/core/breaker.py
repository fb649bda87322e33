"""A circuit breaker of one link (rule 29): after a failure nobody waits for the dead one again, one at a time tries
it anew.

Pure: times come in as monotonic seconds.
"""

from __future__ import annotations

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 8.0


class Breaker:
    """Closed: calls pass. Open: they do not, until a pause is over; then one call is let through as a trial."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._until_s = 0.0
        """While open: when the next trial may start."""

    @property
    def is_closed(self) -> bool:
        return self._pause_s == 0.0

    def allows(self, now_s: float) -> bool:
        """Whether a call may be made now. A True while open is the trial: nobody else gets one until its pause is
        over.
        """
        if self.is_closed:
            return True
        if now_s < self._until_s:
            return False
        self._until_s = now_s + self._pause_s
        return True

    def succeeded(self) -> None:
        self._pause_s = 0.0

    def failed(self, now_s: float) -> None:
        """The link, not the request, was at fault. Pauses double up to MAX_PAUSE_S."""
        self._pause_s = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        self._until_s = now_s + self._pause_s
