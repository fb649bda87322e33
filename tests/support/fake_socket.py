"""The other end of a worker's Unix socket, played by the test: it answers what and when the test says."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from kvstore.core import sockproto as sp
from kvstore.core.errors import KvError

HELLO = sp.HelloReply(sp.PROTOCOL_VERSION, "cluster", "node", "127.0.0.1:1", 1 << 30)
_MAX_BYTES = 1 << 17


class Asked(NamedTuple):
    """A request that came, and the connection to answer on."""

    connection: socket.socket
    id: int
    request: sp.Request

    def answer(self, body: sp.Message, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self.connection, [sp.encode_reply(self.id, body)], list(fds))

    def fail(self, error: KvError) -> None:
        self.connection.send(sp.encode_error(self.id, error))


class FakeSocket:
    """Listens at `path`; `seen` lists the requests that came.

    `script` is called with each one behind the hello, in its connection's thread. It may answer, keep the `Asked` for
    later, or close the connection.
    """

    def __init__(self, path: Path, script: Callable[[Asked], None], hello: sp.HelloReply | KvError = HELLO) -> None:
        self.path, self.seen = str(path), list[sp.Request]()
        self._script, self._hello = script, hello
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As if the worker was killed."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for connection in self._connections:
            hang_up(connection)
        for thread in self._threads[1:]:
            thread.join()
        for connection in self._connections:
            connection.close()
        os.unlink(self.path)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        while True:
            try:
                data = connection.recv(_MAX_BYTES)
            except OSError:
                return
            if not data:
                return
            asked = Asked(connection, *sp.decode_request(data))
            self.seen.append(asked.request)
            if not isinstance(asked.request, sp.Hello):
                self._script(asked)
            elif isinstance(self._hello, KvError):
                asked.fail(self._hello)
            else:
                asked.answer(self._hello)


def hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it was over already


def open_fds() -> set[str]:
    """What this process has open now: descriptions by what they point to, so that a leak is named."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} → {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue  # the one that listed the directory
    return found
