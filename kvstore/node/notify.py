"""The listening end of `obs.notify`: what a child says of itself."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Mapping

MAX_DATAGRAM_BYTES = 4096


class NotifySocket:
    """One child's ``NOTIFY_SOCKET``, in the abstract namespace: no file to clean up after a crash."""

    def __init__(self, on_ready: Callable[[Mapping[str, str]], None]) -> None:
        self.address = f"@kvstore-{secrets.token_hex(8)}"
        self._on_ready = on_ready
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._sock.bind("\0" + self.address[1:])
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._receive)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()

    def _receive(self) -> None:
        try:
            message = self._sock.recv(MAX_DATAGRAM_BYTES)
        except BlockingIOError:
            return
        facts = parse(message)
        if facts.get("READY") == "1":
            self._on_ready({k.removeprefix("X_").lower(): v for k, v in facts.items() if k.startswith("X_")})


def parse(message: bytes) -> dict[str, str]:
    """``A=1\\nB=2`` → {"A": "1", "B": "2"}; lines that are no assignments are passed over."""
    lines = message.decode(errors="replace").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)
