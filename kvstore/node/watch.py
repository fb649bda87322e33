"""A child that does not answer is ended, so that it is started anew (rule 26)."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, NamedTuple, Protocol

from kvstore.node.child import Child

log = logging.getLogger(__name__)

OVERDUE_S: Final = 2.0
"""A question that ends so long after its deadline tells of this process only: it was stopped, or the machine was."""


class Watched(Protocol):
    """How a child is asked whether it answers."""

    @property
    def name(self) -> str:
        """For people."""

    async def ask(self, deadline_s: float) -> str:
        """What is wrong with it, said by the deadline; "" when it answers, be it with an error."""

    async def release(self) -> None:
        """Before it is killed: free whoever hangs in it."""


class Patience(NamedTuple):
    """When a child is ended. The deadline is longer than any answer of ours takes: a keeper answers EIO after 10 s."""

    interval_s: float = 5.0
    deadline_s: float = 15.0
    failures: int = 2
    """In a row, until it is ended."""
    again_s: float = 3.0
    """After a failure it is asked again at once: one that has recovered answers in milliseconds."""

    @property
    def longest_s(self) -> float:
        """From when it fell silent to its end."""
        return self.interval_s + self.deadline_s + (self.failures - 1) * self.again_s


PATIENCE: Final = Patience()
WORKER_PATIENCE: Final = Patience(deadline_s=35.0)
"""Nobody hangs in a worker: clients pass it over. One that was stopped for half a minute (a virtual machine was moved,
somebody looked with a debugger) goes on by itself within two seconds of waking, and keeps what it had in memory.
"""


async def watch(child: Child, watched: Watched, patience: Patience) -> None:
    """Until cancelled. One that is not ready is not asked: how long a start takes depends on what lies on the disks."""
    failures, pid = 0, None
    while True:
        await asyncio.sleep(0 if failures else patience.interval_s)
        await child.until_ready()
        failures, pid = failures if child.pid == pid else 0, child.pid
        complaint = await _ask(watched, patience.again_s if failures else patience.deadline_s)
        if complaint is None or child.pid != pid or not child.is_ready:
            continue  # nothing is known, or it is another one by now: the answer was not about it
        failures = failures + 1 if complaint else 0
        if complaint:
            log.warning("%s: %s (%d of %d)", watched.name, complaint, failures, patience.failures)
        if failures >= patience.failures:
            log.error("%s does not answer: ending it, to be started anew", watched.name)
            await _end(child, watched)
            failures = 0


async def _end(child: Child, watched: Watched) -> None:
    try:
        await watched.release()
    except Exception:
        log.exception("%s: whoever hangs in it may go on to hang; ending it all the same", watched.name)
    child.kill()


async def _ask(watched: Watched, deadline_s: float) -> str | None:
    """See `Watched.ask`; None when this process stood still meanwhile, so that nothing is known. A question that could
    not be asked is our own fault, and no sign of silence.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        complaint = await watched.ask(deadline_s)
    except Exception:
        log.exception("%s cannot be asked whether it answers; trying again", watched.name)
        return ""
    late_s = loop.time() - began_s - deadline_s
    if complaint and late_s > OVERDUE_S:
        log.warning(
            "%s: %s, but this process stood still for some %.0f s: asking anew", watched.name, complaint, late_s
        )
        return None
    return complaint
