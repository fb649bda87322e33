"""A socket pair in place of /dev/fuse: the test is the kernel. For a keeper that runs in a thread of the test."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from kvstore.keeper import wire
from kvstore.keeper.device import Unmounted
from kvstore.keeper.keeper import Keeper, Options
from kvstore.keeper.process import force_buffers
from kvstore.keeper.watchdog import Limits
from kvstore.keeper.wire import Op

TIMEOUT_S: Final = 20.0
_INIT_IN: Final = b"".join(
    [(7).to_bytes(4, "little"), (45).to_bytes(4, "little"), bytes(4), (1 << 30).to_bytes(4, "little"),
     (1 << 5).to_bytes(4, "little"), bytes(44)]
)  # fmt: skip
_connections = iter(range(1_000_000_000 + os.getpid() * 1000, 2_000_000_000))


class Reply(NamedTuple):
    error: int
    body: bytes


class FakeDevice:
    """As `device.Device`, and what it was asked for."""

    def __init__(self) -> None:
        self.connection = next(_connections)
        self.mounts = 0
        self.busy = False
        """Refuse an ordinary unmount."""
        self.mount_error = self.backing_error = 0
        """errno that the next calls give."""
        self.refused: dict[int, int] = {}
        """unique → errno for its reply."""
        self.unmounts: list[bool] = []
        """Lazy or not."""
        self.backing: dict[int, int] = {}
        """id → inode number of the file."""
        self._ours, self._kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        force_buffers(self._ours, 4 << 20)
        force_buffers(self._kernels, 4 << 20)
        self._ours.setblocking(False)
        self._kernels.settimeout(TIMEOUT_S)
        self._next_backing = 1
        self._next_unique = 2
        self._replies: dict[int, Reply] = {}

    # The keeper's side.

    def fileno(self) -> int:
        return self._ours.fileno()

    def close(self) -> None:
        self._ours.close()
        self._kernels.close()

    def mount(self, *, allow_other: bool) -> None:
        if self.mount_error:
            raise OSError(self.mount_error, os.strerror(self.mount_error))
        self.mounts += 1
        self.send(Op.INIT, 0, _INIT_IN)

    def unmount(self, *, lazy: bool) -> None:
        self.unmounts.append(lazy)
        if self.busy and not lazy:
            raise OSError(errno.EBUSY, "busy")

    def read_into(self, buffer: bytearray) -> int:
        size = self._ours.recv_into(buffer)
        if size == 0:
            raise Unmounted
        return size

    def write(self, message: bytes | memoryview) -> int:
        code = self.refused.pop(wire.OUT_HEAD.unpack_from(message)[2], 0)
        try:
            if code == 0:
                self._ours.send(message)
        except BrokenPipeError:  # as an aborted connection
            return errno.ENOENT
        return code

    def backing_open(self, fd: int) -> int:
        if self.backing_error:
            raise OSError(self.backing_error, os.strerror(self.backing_error))
        id = self._next_backing
        self._next_backing += 1
        self.backing[id] = os.fstat(fd).st_ino
        return id

    def backing_close(self, id: int) -> None:
        if self.backing.pop(id, None) is None:
            raise OSError(errno.ENOENT, "no such id")

    # The kernel's side.

    def send(self, opcode: int, inode: int, body: bytes = b"") -> int:
        """A request; its unique."""
        unique = self._next_unique
        self._next_unique += 2
        size = wire.IN_HEAD.size + len(body)
        self._kernels.send(wire.IN_HEAD.pack(size, opcode, unique, inode, 0, 0, 0, 0, 0) + body)
        return unique

    def reply(self, unique: int, timeout_s: float = TIMEOUT_S) -> Reply:
        """The reply to it. Raises TimeoutError."""
        end = time.monotonic() + timeout_s
        while unique not in self._replies:
            self._kernels.settimeout(max(0.001, end - time.monotonic()))
            message = self._kernels.recv(2 << 20)
            _, error, of = wire.OUT_HEAD.unpack_from(message)
            assert of not in self._replies, "answered twice"
            self._replies[of] = Reply(-error, message[wire.OUT_HEAD.size :])
        return self._replies[unique]

    def ask(self, opcode: int, inode: int, body: bytes = b"") -> Reply:
        return self.reply(self.send(opcode, inode, body))

    def abort(self) -> None:
        """As an unmount from outside."""
        self._kernels.close()


class Ran:
    """A keeper in a thread."""

    def __init__(self, keeper: Keeper, device: FakeDevice) -> None:
        self.keeper, self.device = keeper, device
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.exit_code = self.keeper.run()

    def join(self, timeout_s: float = TIMEOUT_S) -> int:
        self._thread.join(timeout_s)
        assert self.exit_code is not None, f"the keeper still runs after {timeout_s:g} s"
        return self.exit_code

    def status(self) -> dict[str, Any]:
        return self.keeper.status()


@contextmanager
def keeper_thread(
    command: Sequence[str],
    device: FakeDevice,
    *,
    deadline_s: float = 10.0,
    slow_deadline_s: float = 35.0,
    busy_wait_s: float = 0.5,
    notify_socket: str = "",
) -> Iterator[Ran]:
    """It is stopped whatever happens."""
    limits = Limits(deadline_s, slow_deadline_s)
    options = Options("/nowhere", command, False, limits, busy_wait_s, notify_socket)
    ran = Ran(Keeper(options, device), device)
    try:
        yield ran
    finally:
        if ran.exit_code is None:
            device.busy = False
            ran.keeper.stop()
            ran.join()
