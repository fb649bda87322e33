"""``kvstore mount DIR``: the store as a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.app import ConfigOption, new_app
from kvstore.cli.store import reaching
from kvstore.client import url
from kvstore.config import load
from kvstore.core.errors import Unsupported
from kvstore.obs import logging as obs_logging

app = new_app()


@app.command()
def run(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Where to mount; made if missing. Else mount.dir of the configuration."),
    ] = None,
    config: ConfigOption = None,
    master: Annotated[
        str | None,
        typer.Option(metavar="ADDR", help="kvstore://host:port, or host:port; else mount.master, worker.master."),
    ] = None,
    worker_socket: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The local worker's socket; without one bytes go over the network."),
    ] = None,
    path: Annotated[
        str | None, typer.Option(metavar="/DIR", help="Directory of the store to show; made if missing.")
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve metrics and health there; off by default.")
    ] = None,
    direct_io: Annotated[
        bool | None,
        typer.Option("--direct-io/--no-direct-io", help="Read past the kernel's cache; no shared maps then."),
    ] = None,
    allow_other: Annotated[
        bool | None, typer.Option("--allow-other/--no-allow-other", help="Let other users in.")
    ] = None,
) -> None:
    """Show the store as a directory until it is unmounted (umount DIR) or told to stop (SIGTERM, Ctrl-C)."""
    flags = {
        "mount.dir": str(directory) if directory is not None else None,
        "mount.master": master,
        "mount.worker_socket": worker_socket,
        "mount.path": path,
        "mount.http": http,
        "mount.direct_io": direct_io,
        "mount.allow_other": allow_other,
    }
    loaded = load(config, flags).config
    obs_logging.setup("mount", loaded.log.level, loaded.log.format)
    try:
        from kvstore.fuse import main as mount
    except ImportError as error:
        raise Unsupported(f"mounting needs pyfuse3: pip install 'kvstore[fuse]' ({error})") from None
    with reaching(url.parse(loaded.mount.master).endpoints, "mount.master"):
        mount.main(loaded, announce)


def announce(line: str) -> None:
    typer.echo(line)
