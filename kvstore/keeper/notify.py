"""Readiness by sd_notify(3), as in `kvstore.obs.notify`, for a process that imports nothing of kvstore."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)


class Notifier:
    """`address` is that of ``NOTIFY_SOCKET``; nothing is sent when it is empty."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address

    @property
    def is_supervised(self) -> bool:
        """Whether somebody started us who stops us, and starts us again when we end."""
        return bool(self._address)

    def ready(self, facts: Mapping[str, str]) -> None:
        self._send("\n".join(["READY=1", *(f"X_{name.upper()}={value}" for name, value in facts.items())]))

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(1.0)
                sock.sendto(message.encode(), self._address)
        except OSError as error:  # whoever started us is gone: no reason to stop
            log.warning("cannot tell NOTIFY_SOCKET %r: %s", self._address, error)
