"""``kvstore master``: the process that holds the names."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.app import ConfigOption, new_app
from kvstore.config import load
from kvstore.master import main as master
from kvstore.obs import logging as obs_logging

app = new_app()


@app.command()
def run(
    config: ConfigOption = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where to serve gRPC; port 0 = any.")] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help='Where to serve metrics and /healthz; "" = nowhere.')
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="DIR", help="The database; made if missing.")] = None,
) -> None:
    """Run the master of a cluster until SIGTERM: names, where blocks are, which workers live.

    Everything it acknowledges is in its data directory: put that on a durable volume.
    """
    flags = {"master.listen": listen, "master.http": http, "master.data": data}
    loaded = load(config, flags).config
    obs_logging.setup("master", loaded.log.level, loaded.log.format)
    master.main(loaded)
