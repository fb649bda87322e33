"""One supervised process: started, watched, started again with a growing pause, stopped in time."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import NamedTuple

from kvstore.core.errors import Timeout, Unavailable
from kvstore.node import parent
from kvstore.node.notify import NotifySocket

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
STEADY_S = 30.0
"""A child that served this long starts over with the shortest pause."""
DENIED = 7
"""Exit code of a worker that its master refused (`kvstore.cli.main`)."""
DENIED_PAUSE_S = 5.0
"""At most: an operator is about to put the right master there, and waits for the workers."""
STOP_TIMEOUT_S = 20.0
"""From SIGTERM to SIGKILL: a mount waits up to 10 s for its users before it detaches."""


class ChildSpec(NamedTuple):
    """What to run: ``kvstore <argv>``."""

    name: str
    argv: tuple[str, ...]
    mount: str = ""
    """The directory on which it mounts the store, if it is a mount: then it is watched."""
    socket: str = ""
    """The Unix socket on which it answers, if it is a worker: likewise."""


class ChildEnded(Unavailable):
    """A child ended before it was ready; it has said why in its own lines. `exit_code` is its own."""

    def __init__(self, name: str, exit_code: int) -> None:
        super().__init__(f"{name} could not start; its own line above says why")
        self.exit_code = exit_code


class Child:
    """States: starting → ready → (died → pause → starting …) → stopped.

    `facts` is what it said when it became ready; `restarts` counts. One that is not `patient` is started again only
    after it was ready once: what cannot start at all is for a person to mend.
    """

    def __init__(self, spec: ChildSpec, max_pause_s: float, *, patient: bool) -> None:
        self.spec = spec
        self._patient = patient
        self.facts: Mapping[str, str] = {}
        self.restarts = 0
        self.exit_code: int | None = None
        self._max_pause_s = max_pause_s
        self._process: asyncio.subprocess.Process | None = None
        self._stop = asyncio.Event()
        self._ready = asyncio.Event()
        self._was_ready = False
        self._died = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise(), name=f"child {self.spec.name}")

    async def wait_ready(self, timeout_s: float) -> Mapping[str, str]:
        """Its facts once it serves.

        Raises ChildEnded when its first run ends before, Timeout when it takes too long.
        """
        ready, died = asyncio.create_task(self._ready.wait()), asyncio.create_task(self._died.wait())
        _, pending = await asyncio.wait({ready, died}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if self.is_ready:
            return self.facts
        if self._died.is_set():
            raise ChildEnded(self.spec.name, self.exit_code or 0)
        raise Timeout(f"{self.spec.name} was not ready after {timeout_s:g} s")

    async def until_ready(self) -> None:
        await self._ready.wait()

    def kill(self) -> None:
        """SIGKILL; it is started again, unless it is being stopped."""
        self._signal(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, a bounded wait, SIGKILL."""
        self._stop.set()
        if self._task is None:
            return
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)
        if not done:
            log.warning("%s did not stop in %g s: killed", self.spec.name, STOP_TIMEOUT_S)
            self.kill()
            self._task.cancel()
            await asyncio.wait({self._task})

    def _signal(self, number: signal.Signals) -> None:
        if self._process and self._process.returncode is None:
            self._process.send_signal(number)

    async def _supervise(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            lived_s = await self._run_once()
            if self._stop.is_set() or not (self._patient or self._was_ready):
                return
            pause_s = FIRST_PAUSE_S if lived_s >= STEADY_S else pause_s
            log.warning("%s ended with code %s; started again in %.1f s", self.spec.name, self.exit_code, pause_s)
            if await self._stopped_within(pause_s):
                return
            pause_s = longer(pause_s, self.exit_code, self._max_pause_s)
            self.restarts += 1

    async def _run_once(self) -> float:
        """From start to end of one process; seconds it lived."""
        loop = asyncio.get_running_loop()
        notify, started = NotifySocket(self._on_ready), loop.time()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvstore", *self.spec.argv,
                env=parent.tied({**os.environ, "NOTIFY_SOCKET": notify.address}, signal.SIGTERM),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,  # one log stream; our own stdout is for our user
                start_new_session=True,  # Ctrl-C reaches only us: we stop them in order
            )  # fmt: skip
            if self._stop.is_set():
                self._signal(signal.SIGTERM)
            self.exit_code = await self._process.wait()
        finally:
            notify.close()
            self._ready.clear()
            self._died.set()
        return loop.time() - started

    async def _stopped_within(self, pause_s: float) -> bool:
        try:
            await asyncio.wait_for(self._stop.wait(), pause_s)
        except TimeoutError:
            return False
        return True

    def _on_ready(self, facts: Mapping[str, str]) -> None:
        self.facts = facts
        self._was_ready = True
        self._ready.set()
        log.info("%s is ready (pid %s)", self.spec.name, self.pid)


def longer(pause_s: float, exit_code: int | None, max_pause_s: float) -> float:
    """The pause after this one."""
    return min(pause_s * 2, DENIED_PAUSE_S if exit_code == DENIED else max_pause_s)
