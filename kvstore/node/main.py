"""`kvstore node`: one worker and its mounts, each restarted alone."""

from __future__ import annotations

import asyncio
import logging

from kvstore.config import Config
from kvstore.node import plan
from kvstore.node.supervisor import Supervisor, stop_event
from kvstore.obs import notify

log = logging.getLogger(__name__)

START_TIMEOUT_S = 15.0


async def run(config: Config, config_file: str | None) -> None:
    """Until SIGTERM or SIGINT. Says READY to ``NOTIFY_SOCKET`` when worker and mounts all serve."""
    stop = stop_event()
    supervisor = Supervisor(config.node.backoff_max_s)
    starting = asyncio.create_task(_start(supervisor, config, config_file))
    await stop.wait()
    log.info("stopping")
    notify.stopping()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await supervisor.stop()


async def _start(supervisor: Supervisor, config: Config, config_file: str | None) -> None:
    await supervisor.start_patiently(plan.worker(config_file, config.worker.socket), START_TIMEOUT_S)
    for spec in plan.mounts(config, config_file):
        supervisor.launch(spec)
    await supervisor.until_ready()
    notify.ready()
    log.info("node %s is ready: worker and %d mount(s)", config.worker.effective_node_id, len(config.node.mounts))
