"""Moves FUSE messages: device ⇄ relay ⇄ the file system process that serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from kvstore.keeper.backing import BackingFiles
from kvstore.keeper.device import MAX_MESSAGE_BYTES, Unmounted
from kvstore.keeper.loop import BROKEN, HANG_UP, IN, OUT, Loop
from kvstore.keeper.process import FsProcess
from kvstore.keeper.relay import Relay
from kvstore.keeper.side import SideThread
from kvstore.keeper.wire import IN_START, OUT_HEAD

log = logging.getLogger(__name__)

BATCH: Final = 16
"""Messages of one source before the others get their turn."""


class Connection(Protocol):
    """`device.Device`, as far as messages go."""

    def fileno(self) -> int: ...
    def read_into(self, buffer: bytearray) -> int: ...
    def write(self, message: bytes | memoryview) -> int: ...
    def backing_open(self, fd: int) -> int: ...
    def backing_close(self, id: int) -> None: ...


class Traffic:
    """`on_unmounted`, `on_hang_up(process)` are told once each; `read_control(process)` brings in its offers."""

    def __init__(
        self,
        loop: Loop,
        device: Connection,
        on_unmounted: Callable[[], None],
        on_hang_up: Callable[[FsProcess], None],
        read_control: Callable[[FsProcess], None],
    ) -> None:
        self._loop, self._device = loop, device
        self._on_unmounted, self._on_hang_up, self._read_control = on_unmounted, on_hang_up, read_control
        self.backing = BackingFiles(device.backing_open, device.backing_close)
        self.relay = Relay(self, self.backing)
        self.dropped_notifications = 0
        self._side = SideThread("notifications")
        self._process: FsProcess | None = None
        self._watching = self._reading = self._held = False
        self._buffer = bytearray(MAX_MESSAGE_BYTES)
        self._view = memoryview(self._buffer)

    # What is read at the moment.

    def start(self) -> None:
        """The device is mounted."""
        self._watching = True
        self._loop.watch(self._device.fileno(), 0, self._on_device)
        self._update()

    def stop(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.forget(self._device.fileno())

    def hold(self, held: bool) -> None:
        """Leave new requests in the kernel; those under way go on."""
        self._held = held
        self._update()

    def attach(self, process: FsProcess) -> None:
        """It has taken over: give it what waits, and read on."""
        self._process, self._held = process, False
        self._loop.watch(process.fuse.fileno(), IN, self._on_fs)
        self.relay.resume()
        self._update()

    def detach(self) -> None:
        """The process is gone: take in what it still said. Its unanswered requests wait for a successor."""
        process = self._process
        assert process is not None
        self._loop.forget(process.fuse.fileno())
        while self._receive(process):
            pass
        self._read_control(process)
        self._process = None
        self.relay.process_ended()
        self._update()

    def fail(self) -> None:
        """Nobody serves: answer what waits, and what will come, at once."""
        self.relay.failing = True
        self.relay.expire(self._loop.now_s, 0.0)
        self._update()

    def _update(self) -> None:
        process = self._process
        if process is not None and not process.fuse_ended:
            self._loop.change(process.fuse.fileno(), IN | OUT if process.has_unsent else IN)
        can_pass_on = process is not None and process.has_room and not self._held
        self._reading = can_pass_on or self.relay.failing
        if self._watching:
            self._loop.change(self._device.fileno(), IN if self._reading else 0)

    # Messages.

    def _on_device(self, events: int) -> None:
        if events & (BROKEN | HANG_UP):
            self._unmounted()
            return
        buffer, view, read_into = self._buffer, self._view, self._device.read_into
        for _ in range(BATCH):
            if not self._reading:
                return
            try:
                size = read_into(buffer)
            except BlockingIOError:
                return
            except Unmounted:
                self._unmounted()
                return
            self._request(bytes(view[:size]))

    def _request(self, raw: bytes) -> None:
        try:
            self.relay.request(raw, self._loop.now_s)
        except Exception:
            _, opcode, unique, _ = IN_START.unpack_from(raw)
            log.exception("request %d (opcode %d) could not be relayed: answered with EIO", unique, opcode)
            self.relay.fail(unique)

    def _unmounted(self) -> None:
        self.stop()
        self._on_unmounted()

    def _on_fs(self, events: int) -> None:
        process = self._process
        assert process is not None
        if events & OUT:
            process.flush()
            self._update()
        for _ in range(BATCH):
            if not self._receive(process) or not self.relay.pending:
                return

    def _receive(self, process: FsProcess) -> bool:
        """One message; False when there is none."""
        if process.fuse_ended:
            return False
        try:
            size = process.receive_into(self._buffer)
        except BlockingIOError:
            return False
        if size == 0:
            process.fuse_ended = True
            self._loop.forget(process.fuse.fileno())
            self._on_hang_up(process)
            return False
        message = self._view[:size]
        unique = OUT_HEAD.unpack_from(message)[2]
        try:
            self.relay.reply(message)
        except Exception:
            log.exception("reply to request %d could not be relayed: answered with EIO", unique)
            self.relay.fail(unique)
        return True

    # The relay's outlets.

    def to_kernel(self, message: bytes | memoryview) -> int:
        return self._device.write(message)

    def to_fs(self, message: bytes) -> None:
        process = self._process
        assert process is not None
        process.send(message)
        if not process.has_room:
            self._update()

    def notify(self, message: bytes) -> None:
        if not self._side.submit(lambda: self._device.write(message)):
            self.dropped_notifications += 1

    def read_offers(self) -> None:
        if self._process is not None:
            self._read_control(self._process)
