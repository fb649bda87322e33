"""One file system process as its keeper sees it: started with its ends of the sockets, talked to, killed."""

from __future__ import annotations

import collections
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.keeper import channel
from kvstore.keeper.channel import Inheritance, Kind, Message

log = logging.getLogger(__name__)

SOCKET_BYTES: Final = 4 << 20
"""Of each buffer of the FUSE pair: a message of 1 MiB does not fit the kernel's default."""
_SO_SNDBUFFORCE: Final = 32
_SO_RCVBUFFORCE: Final = 33


class FsProcess:
    """States: spawned → ready → taken over → served. `fuse_ended`, `control_ended`: it has closed that socket;
    `yielding`: it was told to make way for a successor.
    """

    def __init__(self, argv: Sequence[str], state_fd: int, session: int, generation: int, now_s: float) -> None:
        """Raises OSError when the command cannot be run."""
        self.ready = self.taken_over = self.served = self.yielding = False
        self.fuse_ended = self.control_ended = False
        self.argv = list(argv)
        self.spawned_s = self.beat_s = now_s
        self.kill_at_s: float | None = None
        self.killed_s: float | None = None
        self._outbox: collections.deque[bytes] = collections.deque()
        self._broken = False
        self.fuse, fuse_end = _pair(SOCKET_BYTES)
        self.control, control_end = _pair(None)
        with fuse_end, control_end:
            fds = fuse_end.fileno(), control_end.fileno(), state_fd
            inheritance = Inheritance(*fds, session, generation)
            try:
                self._popen = subprocess.Popen(
                    self.argv,
                    env={**os.environ, channel.ENVIRONMENT: inheritance.to_text()},
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the keeper, which ends it in order
                )
            except OSError:
                self.close_sockets()
                raise
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)

    def __repr__(self) -> str:
        return f"file system process {self.pid}"

    @property
    def exit_code(self) -> int | None:
        """As a shell counts (128 + signal); None while it runs."""
        code = self._popen.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def has_room(self) -> bool:
        """Whether a request would go out at once."""
        return not self._outbox and not self._broken

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox) and not self._broken

    def send(self, message: bytes) -> None:
        """A FUSE message. Kept when there is no room, dropped when the process is gone. Raises OSError (no memory)."""
        if not self._broken and (self._outbox or not self._send_now(message)):
            self._outbox.append(message)

    def flush(self) -> None:
        """Send what was kept, as far as there is room."""
        while self._outbox and self._send_now(self._outbox[0]):
            self._outbox.popleft()

    def _send_now(self, message: bytes) -> bool:
        try:
            self.fuse.send(message)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):  # its end is noticed elsewhere; the relay has the requests
            self._broken = True
            return False
        return True

    def receive_into(self, buffer: bytearray) -> int:
        """The next FUSE message's length, 0 at the end. Raises BlockingIOError when there is none yet."""
        try:
            return self.fuse.recv_into(buffer)
        except ConnectionResetError:  # said once when it died with requests unread; its replies stand behind it
            return self.fuse.recv_into(buffer)

    def tell(self, kind: Kind, text: bytes = b"", fds: Sequence[int] = ()) -> None:
        """On the control channel. Raises `channel.Closed`; BlockingIOError when it reads nothing any more."""
        channel.send(self.control, kind, 0, text, fds)

    def messages(self) -> Iterator[Message]:
        """What it has said on the control channel so far. Their fds are the caller's to close."""
        while not self.control_ended:
            try:
                yield channel.receive(self.control)
            except BlockingIOError:
                return
            except channel.Closed:
                self.control_ended = True
            except ValueError as error:
                log.error("from %s: %s", self, error)

    def kill_by(self, at_s: float) -> None:
        """SIGKILL then, unless it has ended; an earlier time that was set stays."""
        self.kill_at_s = at_s if self.kill_at_s is None else min(self.kill_at_s, at_s)

    def kill_if_due(self, now_s: float) -> None:
        if self.kill_at_s is not None and now_s >= self.kill_at_s:
            log.error("%s did not start, or not end, in time: killed", self)
            self.kill_at_s = None
            self.kill()

    def terminate(self) -> None:
        self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._popen.kill()

    def close_sockets(self) -> None:
        self.fuse.close()
        self.control.close()


def _pair(size: int | None) -> tuple[socket.socket, socket.socket]:
    """(ours, which does not block; theirs, which does), with buffers of `size` bytes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    if size is not None:
        force_buffers(ours, size)
        force_buffers(theirs, size)
    return ours, theirs


def force_buffers(sock: socket.socket, size: int) -> None:
    """Raises PermissionError without CAP_NET_ADMIN."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, size)
    sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size)
