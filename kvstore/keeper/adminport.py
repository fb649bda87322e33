"""The keeper's end of its admin socket; `kvstore.keeper.admin` is the other one.

An abstract Unix socket of sequenced packets, named after the number of the FUSE connection, so that a mount's keeper is
found without touching the mount. One JSON object is a question, one its answer; ``{"error": …}`` says why not.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvstore.keeper.loop import BROKEN, IN, Loop

log = logging.getLogger(__name__)

MAX_BYTES: Final = 64 * 1024
MAX_CONNECTIONS: Final = 16
"""The oldest makes way for one more."""
_PEER: Final = struct.Struct("3i")
"""pid, uid, gid."""

Answer = Callable[[Mapping[str, Any]], None]
Ask = Callable[[Mapping[str, Any], Answer], None]
"""Called with a question and whom to tell the answer, now or later."""


def address(connection: int) -> str:
    return f"\0kvstore-keeper-{connection}"


class AdminPort:
    """Raises OSError when the address is taken."""

    def __init__(self, loop: Loop, connection: int, ask: Ask) -> None:
        self._loop, self._ask = loop, ask
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(address(connection))
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        loop.watch(self._listener.fileno(), IN, self._accept)

    def close(self) -> None:
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        while self._connections:
            self._close(self._connections[0])

    def _accept(self, events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid not in (0, os.geteuid()):
            sock.close()
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._close(self._connections[0])
        sock.setblocking(False)
        self._connections.append(sock)
        self._loop.watch(sock.fileno(), IN, functools.partial(self._hear, sock))

    def _hear(self, sock: socket.socket, events: int) -> None:
        try:
            data = sock.recv(MAX_BYTES)
            question = json.loads(data) if data else None
        except BlockingIOError:
            return
        except (OSError, ValueError, RecursionError):
            question = None
        if isinstance(question, dict) and not events & BROKEN:
            self._ask(question, functools.partial(self._answer, sock))
        else:  # the end, or garbage
            self._close(sock)

    def _answer(self, sock: socket.socket, answer: Mapping[str, Any]) -> None:
        if sock not in self._connections:  # whoever asked has gone
            return
        try:
            sock.send(json.dumps(answer).encode())
        except OSError:
            self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        self._connections.remove(sock)
        self._loop.forget(sock.fileno())
        sock.close()
