"""``kvstore worker``: the process that holds a node's blocks."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.app import ConfigOption, new_app
from kvstore.config import load, require_volumes
from kvstore.obs import logging as obs_logging
from kvstore.worker import main as worker

app = new_app()


@app.command()
def run(
    config: ConfigOption = None,
    master: Annotated[str | None, typer.Option(metavar="ADDR", help="kvstore://host:port, or host:port.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="gRPC, for clients and other workers.")
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help='Metrics and health; "" turns them off.')
    ] = None,
    advertise: Annotated[str | None, typer.Option(metavar="HOST", help="Host under which others reach it.")] = None,
    socket: Annotated[str | None, typer.Option(metavar="PATH", help="Unix socket for this node's clients.")] = None,
    node_id: Annotated[str | None, typer.Option(help="Name of this node; else the host name.")] = None,
    accept_rollback: Annotated[
        bool, typer.Option("--accept-rollback", help="Obey a master that lost state: what it does not know is removed.")
    ] = False,
) -> None:
    """Run the worker of this node: it keeps blocks on the volumes of the section worker.volumes, and hands them out."""
    flags = {
        "worker.master": master,
        "worker.listen": listen,
        "worker.http": http,
        "worker.advertise": advertise,
        "worker.socket": socket,
        "worker.node_id": node_id,
    }
    loaded = load(config, flags).config
    require_volumes(loaded)
    obs_logging.setup("worker", loaded.log.level, loaded.log.format)
    worker.run(loaded, accept_rollback=accept_rollback)
