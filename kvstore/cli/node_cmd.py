"""``kvstore node``: the daemon of a GPU node."""

from __future__ import annotations

import asyncio

from kvstore.cli.app import ConfigOption, new_app
from kvstore.config import load, require_volumes
from kvstore.node import main as node
from kvstore.obs import logging as obs_logging

app = new_app()


@app.command()
def run(config: ConfigOption = None) -> None:
    """Run this node's worker and mounts, and restart what dies.

    What they are is in the sections worker, worker.volumes and node.mounts of the configuration. SIGTERM stops the
    mounts, then the worker.
    """
    loaded = load(config).config
    require_volumes(loaded)
    obs_logging.setup("node", loaded.log.level, loaded.log.format)
    asyncio.run(node.run(loaded, config))
