"""``kvstore master``: the process that holds the names."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.app import ConfigOption, new_app
from kvstore.config import load
from kvstore.config.units import parse_duration_s
from kvstore.core.errors import InvalidRequest
from kvstore.master import main as master
from kvstore.master.recovery.rebuild import WAIT_S, Kind, Wanted
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
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="First take names that the database lacks back from the workers.")
    ] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Forget what workers have that the database lacks: it is removed.")
    ] = False,
    rebuild_workers: Annotated[
        int, typer.Option(min=0, metavar="N", help="Wait for N workers; else until no new one comes.")
    ] = 0,
    rebuild_wait: Annotated[
        str, typer.Option(metavar="TIME", help="How long no new worker must come before the rebuild goes on.")
    ] = f"{WAIT_S:g}s",
) -> None:
    """Run the master of a cluster until SIGTERM: names, where blocks are, which workers live.

    Everything it acknowledges is in its data directory: put that on a durable volume. When that was lost, start it on
    an empty one with --rebuild; when it was replaced by an older copy, on that. Clients are refused until it is done.
    """
    wanted = _wanted(rebuild, discard, rebuild_workers, rebuild_wait)
    flags = {"master.listen": listen, "master.http": http, "master.data": data}
    loaded = load(config, flags).config
    obs_logging.setup("master", loaded.log.level, loaded.log.format)
    master.main(loaded, wanted)


def _wanted(rebuild: bool, discard: bool, workers: int, wait: str) -> Wanted | None:
    """Raises InvalidRequest."""
    if rebuild and discard:
        raise InvalidRequest("--rebuild takes names back, --discard forgets them: choose one")
    if not (rebuild or discard):
        return None
    return Wanted(Kind.REBUILD if rebuild else Kind.DISCARD, workers, parse_duration_s(wait))
