"""Several children, started in order and stopped in the opposite one."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping

from kvstore.core.errors import KvError
from kvstore.node.child import Child, ChildSpec
from kvstore.node.mountcheck import WatchedMount
from kvstore.node.watch import PATIENCE, WORKER_PATIENCE, Patience, Watched, watch
from kvstore.node.workercheck import WatchedWorker

log = logging.getLogger(__name__)


class Supervisor:
    """Keeps its children running until `stop`; each restarts alone, mounts and workers also when they do not answer:
    after `patience`, or what is usual for their kind.
    """

    def __init__(self, max_pause_s: float, patience: Patience | None = None) -> None:
        self._max_pause_s, self._patience = max_pause_s, patience
        self.children: list[Child] = []
        self._watches: list[asyncio.Task[None]] = []

    def launch(self, spec: ChildSpec, *, patient: bool = True) -> Child:
        """Start it, and again whenever it ends. Without `patient` not before it was ready once."""
        child = Child(spec, self._max_pause_s, patient=patient)
        self.children.append(child)
        child.start()
        if watched := _watched(spec):
            patience = self._patience or (PATIENCE if spec.mount else WORKER_PATIENCE)
            self._watches.append(asyncio.create_task(watch(child, watched, patience), name=f"watch {spec.name}"))
        return child

    async def start(self, spec: ChildSpec, timeout_s: float) -> Mapping[str, str]:
        """Launch and wait until it serves. Raises ChildEnded or Timeout."""
        return await self.launch(spec, patient=False).wait_ready(timeout_s)

    async def start_patiently(self, spec: ChildSpec, timeout_s: float) -> None:
        """Launch; a child that is not ready in time goes on trying in the background (the master may be away)."""
        try:
            await self.launch(spec).wait_ready(timeout_s)
        except KvError as error:
            log.warning("%s; going on without waiting for it", error)

    async def until_ready(self) -> None:
        """Until each child has become ready."""
        for child in self.children:
            await child.until_ready()

    async def stop(self) -> None:
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        self._watches.clear()
        for child in reversed(self.children):
            await child.stop()
        self.children.clear()


def _watched(spec: ChildSpec) -> Watched | None:
    if spec.mount:
        return WatchedMount(spec.mount)
    return WatchedWorker(spec.name, spec.socket) if spec.socket else None


def stop_event() -> asyncio.Event:
    """Set by SIGTERM or SIGINT. Call on the loop."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event
