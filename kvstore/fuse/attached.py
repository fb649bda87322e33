"""The file system process's side of its keeper: the channel to it, and passthrough through it.

The keeper holds `/dev/fuse` and all backing ids, this process only the sockets. So its death ends nothing, and the
keeper's death ends it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Final, NamedTuple

from kvstore.fuse.backing import Backing
from kvstore.keeper import channel
from kvstore.keeper.channel import Closed, Inheritance, Kind, Table

log = logging.getLogger(__name__)

BEAT_S: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
_SEND_BUFFER_BYTES: Final = 1 << 20


class TakeOver(NamedTuple):
    """What a successor starts from; the fds are the receiver's to close."""

    table: Table
    kept: dict[int, int]
    """`Backing.keep`: id → read-only fd."""


class Keeper(Backing):
    """The channel. Sends at once: the messages are tiny, and the keeper reads them before anything else."""

    passthrough = True

    def __init__(self, inheritance: Inheritance) -> None:
        self.inheritance = inheritance
        self._sock = socket.socket(fileno=inheritance.control_fd)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        for fd in inheritance[:3]:
            os.set_inheritable(fd, False)
        self._taken: asyncio.Future[TakeOver] | None = None
        self._kept: dict[int, int] = {}
        self._on_end: Callable[[], None] = lambda: None

    # ---- passthrough ----

    def offer(self, inode: int, fd: int) -> None:
        self._send(Kind.OFFER, inode, fds=[fd])

    def keep(self, id: int, fd: int) -> None:
        self._send(Kind.KEEP, id, fds=[fd])

    def drop(self, id: int) -> None:
        self._send(Kind.DROP, id)

    # ---- hand-over ----

    async def take(self) -> TakeOver:
        """Say that this process could serve, and wait until it shall."""
        loop = asyncio.get_running_loop()
        self._taken = loop.create_future()
        self._sock.setblocking(False)
        loop.add_reader(self._sock, self._readable)
        self._send(Kind.READY)
        return await self._taken

    def serving(self, line: str, facts: dict[str, str]) -> None:
        self._send(Kind.SERVING, text=json.dumps({"line": line, "facts": facts}).encode())

    def replace_state(self, fd: int) -> None:
        self._send(Kind.STATE, fds=[fd])

    async def beat(self) -> None:
        """Shows the keeper that the loop runs, until cancelled."""
        while True:
            self._send(Kind.BEAT)
            await asyncio.sleep(BEAT_S)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Called when the mount is gone for good, or the keeper is."""
        self._on_end = callback

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()

    def _send(self, kind: Kind, inode: int = 0, text: bytes = b"", fds: list[int] | None = None) -> None:
        try:
            channel.send(self._sock, kind, inode, text, fds or ())
        except (Closed, OSError) as error:  # its end is seen by the reader; a full buffer costs a fast path, no more
            log.debug("the keeper did not get %s: %s", kind.name, error)

    def _readable(self) -> None:
        while True:
            try:
                message = channel.receive(self._sock)
            except BlockingIOError:
                return
            except Closed:
                asyncio.get_running_loop().remove_reader(self._sock)
                log.warning("the keeper is gone, and the mount with it")
                self._on_end()
                return
            self._handle(message)

    def _handle(self, message: channel.Message) -> None:
        match message.kind:
            case Kind.KEPT:
                self._kept |= dict(zip(message.json(), message.fds, strict=True))
            case Kind.TAKE if self._taken is not None and not self._taken.done():
                self._taken.set_result(TakeOver(_table(message.fds[0]), self._kept))
            case Kind.YIELD:
                # Nothing is given up: whatever stands behind open files is in the keeper's hands.
                logging.shutdown()
                os._exit(0)
            case Kind.END:
                self._on_end()
            case _:
                log.warning("unexpected %s from the keeper", message.kind.name)


def die_with(keeper: int) -> None:
    """This process must not outlive its keeper, whatever state it is in."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)


def _table(fd: int) -> Table:
    with open(fd, "rb") as file:
        file.seek(0)
        return Table.from_json(file.read())
