"""Readiness by sd_notify(3): one datagram to ``$NOTIFY_SOCKET``, nothing when it is not set.

systemd listens there for a service of ``Type=notify``; `kvstore node` and `kvstore up` listen for their children in
the same way, and learn from ``X_…`` variables what a child found out for itself (a port that the kernel chose).
"""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)


def ready(**facts: str) -> None:
    """Say that this process serves. ``ready(endpoint="127.0.0.1:7070")`` adds ``X_ENDPOINT=127.0.0.1:7070``."""
    send("\n".join(["READY=1", *(f"X_{name.upper()}={value}" for name, value in facts.items())]))


def is_supervised() -> bool:
    """Whether somebody started us who stops us, and starts us again when we end."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def stopping() -> None:
    send("STOPPING=1")


def send(message: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # abstract: not a file
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(1.0)
            sock.sendto(message.encode(), address)
    except OSError as error:  # whoever started us is gone: no reason to stop serving
        log.warning("cannot tell NOTIFY_SOCKET %r: %s", address, error)
