"""A TCP proxy that can be cut, as by a partition: connections stay and new ones are made, but nothing comes through."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Final, Self

_PIECE_BYTES: Final = 1 << 16


class Proxy:
    """Forwards `endpoint` to `target`, from its start to the end of the block. `after_bytes`: cut itself once it has
    passed on so many of the target's bytes.
    """

    def __init__(self, target: str, after_bytes: int | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._left = (host, int(port)), after_bytes
        self._open = threading.Event()
        self._open.set()
        self._closing = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for sock in (self._listener, *self._sockets):
            sock.close()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        """What was sent meanwhile arrives."""
        self._left = None
        self._open.set()

    def _accept(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            for source, sink, counts in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._pass_on, args=(source, sink, counts))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                self._open.wait()
                sink.sendall(data)
                if counts:
                    self._count(len(data))
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _count(self, size_bytes: int) -> None:
        if self._left is not None:
            self._left -= size_bytes
            if self._left <= 0:
                self.cut()
