"""What the commands that talk to a store share: which store, and one client for the time of the command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from kvstore.client.sync import Client
from kvstore.config import load
from kvstore.core.errors import Timeout, Unavailable

MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master", metavar="ADDR", help="kvstore://host:port/root, or host:port; else client.master, worker.master."
    ),
]
SocketOption = Annotated[
    str | None,
    typer.Option(
        "--worker-socket", metavar="PATH", help="The local worker's socket, '' = none; else the default one if there."
    ),
]


@contextmanager
def open_store(master: str | None, config: str | None, worker_socket: str | None = None) -> Iterator[Client]:
    """A client of the store that flags and configuration name, for the time of the command."""
    loaded = load(config, {"client.master": master}).config.client
    store = Client(
        loaded.master,
        worker_socket=worker_socket,
        timeout_s=loaded.timeout_s,
        metadata_ttl_s=loaded.metadata_ttl_s,
    )
    with store as client, reaching(client.target.endpoints, "client.master"):
        yield client


@contextmanager
def reaching(endpoints: Sequence[str], key: str) -> Iterator[None]:
    """When it is the master that cannot be reached, the error says where another one would be named."""
    try:
        yield
    except (Unavailable, Timeout) as error:
        if error.fault not in endpoints:
            raise
        raise type(error)(f"{error.message} (set --master or {key})", fault=error.fault) from None
