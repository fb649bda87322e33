"""Where clients come to the worker's Unix socket: a listening socket, and what is said to those for whom there is no
place.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import Final

from kvstore.core import sockproto as sp
from kvstore.core.errors import InvalidRequest, Overloaded
from kvstore.core.limits import MAX_SOCKET_MESSAGE_BYTES, RETRY_AFTER_S

log = logging.getLogger(__name__)

BACKLOG: Final = 256
ACCEPT_PAUSE_S: Final = 0.1
"""Where nobody can be accepted."""
_SHORT_ERRNOS: Final = (errno.EMFILE, errno.ENFILE)
_SHORT: Final = "the worker has no file descriptor for one more client; raise its limit (ulimit -n), or retry later"


class Door:
    """Listens on `path`; a socket that an earlier worker left is replaced in one step. `on_client` gets the
    non-blocking socket of each client, and owns it.

    One descriptor is kept spare: where no other is left, it serves to tell whoever comes so. Silence would look as if
    the worker was dead (`kvstore node` ends it then).
    """

    def __init__(self, path: str, mode: int, on_client: Callable[[socket.socket], None]) -> None:
        self._path, self._mode, self._on_client = path, mode, on_client
        self._sock: socket.socket | None = None
        self._inode = 0
        self._resuming: asyncio.TimerHandle | None = None
        self._spare: int | None = None
        self._is_short = False

    def open(self) -> None:
        """Raises OSError when there is no place for the socket."""
        os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
        # A short name beside it: the path itself may use all of its 107 bytes.
        temporary = os.path.join(os.path.dirname(self._path), f".{os.getpid() % 10**6}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.bind(temporary)
            os.chmod(temporary, self._mode)
            sock.listen(BACKLOG)
            os.rename(temporary, self._path)
        except BaseException:
            sock.close()
            raise
        self._sock, self._inode = sock, os.stat(self._path).st_ino
        self._keep_spare()
        asyncio.get_running_loop().add_reader(sock.fileno(), self._acceptable)

    def close(self) -> None:
        if self._sock is None:
            return
        if self._resuming is not None:
            self._resuming.cancel()
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        self._spend_spare()
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == self._inode:  # else another worker has taken the place
                os.unlink(self._path)

    def _acceptable(self) -> None:
        self._keep_spare()
        try:
            sock = self._accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _SHORT_ERRNOS and self._spare is not None:
                self._turn_away(error)
            else:
                log.error("cannot accept a client: %s", error.strerror)
                self._pause()
            return
        self._is_short = False
        self._on_client(sock)

    def _accept(self) -> socket.socket:
        """Raises OSError, BlockingIOError when nobody is there (any more)."""
        assert self._sock is not None
        sock, _ = self._sock.accept()
        sock.setblocking(False)
        return sock

    def _turn_away(self, error: OSError) -> None:
        """Spend the spare descriptor on the word that there is none. Another thread may be quicker to take it: then all
        wait a little.
        """
        if not self._is_short:
            log.error("cannot accept clients, who are told to come later: %s", error.strerror)
        self._is_short = True
        self._spend_spare()
        try:
            refuse(self._accept(), _SHORT)
        except BlockingIOError:
            pass  # it went meanwhile
        except OSError:
            self._pause()
        self._keep_spare()

    def _keep_spare(self) -> None:
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _spend_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _pause(self) -> None:
        """A listening socket stays readable: without a pause the loop would spin."""
        assert self._sock is not None
        loop, fd = asyncio.get_running_loop(), self._sock.fileno()
        loop.remove_reader(fd)
        self._resuming = loop.call_later(ACCEPT_PAUSE_S, loop.add_reader, fd, self._acceptable)


def refuse(sock: socket.socket, reason: str) -> None:
    """Answer its hello, which may not have come yet, and hang up. One that was not read would be a reset for its sender
    before he reads the answer.
    """
    request_id = 0
    with contextlib.suppress(OSError, InvalidRequest):
        request_id, _ = sp.decode_request(sock.recv(MAX_SOCKET_MESSAGE_BYTES))
    with contextlib.suppress(OSError):
        sock.send(sp.encode_error(request_id, Overloaded(reason, retry_after_s=RETRY_AFTER_S)))
    sock.close()
