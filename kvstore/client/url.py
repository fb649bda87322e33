"""``kvstore://host:port[,host:port][/root]``: several addresses of one master, and where the client's paths begin."""

from __future__ import annotations

import os
from typing import NamedTuple

from kvstore.client import arguments
from kvstore.core import paths
from kvstore.core.errors import InvalidRequest

SCHEME = "kvstore://"
DEFAULT_PORT = 7070
DEFAULT_SOCKET = "/run/kvstore/worker.sock"


class Target(NamedTuple):
    endpoints: tuple[str, ...]
    """``host:port`` each, tried in order."""
    root: str
    """Normal relative path, "" for the whole store."""

    def path(self, path: str) -> str:
        """A caller's path as the master knows it. Raises InvalidRequest, NameTooLong."""
        return paths.join(self.root, arguments.text(path, "a path"))


def parse(url: str) -> Target:
    """Raises InvalidRequest with the right form."""
    if not arguments.text(url, "a store's address").startswith(SCHEME):
        raise InvalidRequest(f"{url!r} is not a store; write kvstore://host:port[,host:port][/root]")
    hosts, _, root = url.removeprefix(SCHEME).partition("/")
    return Target(tuple(_endpoint(h.strip(), url) for h in hosts.split(",")), paths.normalize(root))


def _endpoint(text: str, url: str) -> str:
    """``host``, ``host:port`` or ``[v6]:port`` with the port filled in."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    bare_v6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or bare_v6 or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"{text!r} in {url!r} is not an address; write host:port or [v6 address]:port")
    return f"{host}:{port}"


def worker_socket(given: str | None) -> str:
    """The local worker's socket: what was given ("" = none), else the default one if it exists."""
    if given is not None:
        return given
    return DEFAULT_SOCKET if os.path.exists(DEFAULT_SOCKET) else ""
