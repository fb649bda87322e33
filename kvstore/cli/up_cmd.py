"""``kvstore up``: a whole store on one box."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvstore.cli.app import new_app
from kvstore.cli.output import JsonOption, console, print_json
from kvstore.config import parse_size
from kvstore.node import up
from kvstore.node.box import Options
from kvstore.node.child import ChildEnded
from kvstore.obs import logging as obs_logging

app = new_app()


@app.command()
def run(
    mount: Annotated[
        list[str] | None,  # a Path would be stat'ed: a dead or hung mount may be there
        typer.Option(help="Show the store as a directory here (made if missing); a second one belongs to node 2."),
    ] = None,
    data: Annotated[Path, typer.Option(help="Where master and workers keep everything.")] = Path("kvstore-data"),
    capacity: Annotated[str, typer.Option(help="Of each worker, with a unit.")] = "10GiB",
    workers: Annotated[int, typer.Option(min=1, max=64, help="How many nodes to run.")] = 1,
    port: Annotated[int, typer.Option(min=0, max=60000, help="The master's; 0 = any free ports.")] = 7070,
    free_floor: Annotated[str, typer.Option(help="What the disk's other users keep free.")] = "1GiB",
    as_json: JsonOption = False,
) -> int:
    """Run master, worker(s) and a mount on this box until Ctrl-C."""
    parse_size(capacity)
    parse_size(free_floor)
    obs_logging.setup("up")
    options = Options(
        data.absolute(),
        capacity,
        workers,
        tuple(Path(path).absolute() for path in mount or ()),
        port,
        free_floor=free_floor,
    )
    try:
        asyncio.run(up.run(options, announce_json if as_json else announce))
    except ChildEnded as error:
        print(f"kvstore: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


def announce_json(store: up.Store) -> None:
    print_json(
        {
            "url": store.url,
            "mounts": [str(path) for path in store.mounts],
            "worker_sockets": list(store.worker_sockets),
            "lmcache": lmcache(store),
        }
    )
    _flush()


def announce(store: up.Store) -> None:
    """What a person needs to use it."""
    rows = [("URL", store.url), ("socket", store.worker_sockets[0])]
    rows += [("mount", str(path)) for path in store.mounts]
    rows += [("LMCache", line) for line in lmcache(store)]
    lines = [Text("kvstore is up; Ctrl-C stops it", style="bold green")]
    lines += [Text.assemble((f"  {name:<8} ", "bold"), value) for name, value in rows]
    for line in lines:
        console().print(line, soft_wrap=True)
    _flush()


def lmcache(store: up.Store) -> list[str]:
    """The line to put into LMCache's environment, for each mount."""
    return [f"LMCACHE_REMOTE_URL=fs://localhost:0{path}/lmcache PYTHONHASHSEED=0" for path in store.mounts]


def _flush() -> None:
    sys.stdout.flush()
