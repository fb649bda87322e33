"""What the commands that talk to a store share: which store, and one client for the time of the command."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.client.sync import Client
from kvstore.config import load

MasterOption = Annotated[
    str | None,
    typer.Option("--master", metavar="ADDR", help="kvstore://host:port/root, or host:port; else client.master."),
]
SocketOption = Annotated[
    str | None,
    typer.Option(
        "--worker-socket", metavar="PATH", help="The local worker's socket, '' = none; else the default one if there."
    ),
]


def open_store(master: str | None, config: str | None, worker_socket: str | None = None) -> Client:
    """A client of the store that flags and configuration name; close it after use."""
    loaded = load(config, {"client.master": _url(master)}).config.client
    return Client(
        loaded.master,
        worker_socket=worker_socket,
        timeout_s=loaded.timeout_s,
        metadata_ttl_s=loaded.metadata_ttl_s,
    )


def _url(master: str | None) -> str | None:
    return f"kvstore://{master}" if master and "://" not in master else master
