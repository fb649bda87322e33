"""Nobody waits for ever: what has waited too long is answered with EIO, and who gives no sign of life is killed.

Time is that of the loop, so a machine that slept kills nobody.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from kvstore.keeper.loop import Loop
from kvstore.keeper.process import FsProcess
from kvstore.keeper.traffic import Traffic

log = logging.getLogger(__name__)

SILENT_S: Final = 3.0
"""Without a beat for so long it hangs, and its requests get the short deadline."""
KILL_LIMIT_S: Final = 2.0
"""From SIGKILL to its end; a system call that hangs (a failing disk) may hold it."""


class Limits(NamedTuple):
    deadline_s: float
    """EIO after so long while nobody serves, or whoever should hangs; it is killed then."""
    slow_deadline_s: float
    """EIO after so long from one that is alive: above the deadline that it has itself."""


class Watchdog:
    def __init__(self, loop: Loop, traffic: Traffic, limits: Limits) -> None:
        self._loop, self._traffic, self._limits = loop, traffic, limits

    def check_process(self, process: FsProcess) -> bool:
        """False: it hangs, and not even a kill has ended it. Its work is for others."""
        now_s = self._loop.now_s
        silent_s = now_s - process.beat_s
        self._expire(self._limits.deadline_s if silent_s >= SILENT_S else self._limits.slow_deadline_s)
        if process.killed_s is not None:
            return now_s - process.killed_s < KILL_LIMIT_S
        if silent_s >= max(self._limits.deadline_s, SILENT_S):
            log.error("%s has given no sign of life for %g s: killed", process, silent_s)
            process.killed_s = now_s
            process.kill()
        return True

    def check_outage(self, since_s: float) -> None:
        """Nobody has served since then."""
        self._expire(self._limits.deadline_s)
        if self._loop.now_s - since_s >= self._limits.deadline_s and not self._traffic.relay.failing:
            log.error("nobody serves for %g s: calls get EIO at once until somebody does", self._limits.deadline_s)
            self._traffic.fail()

    def _expire(self, limit_s: float) -> None:
        if late := self._traffic.relay.expire(self._loop.now_s, limit_s):
            log.error("%d calls had no answer for %g s: answered with EIO", late, limit_s)
