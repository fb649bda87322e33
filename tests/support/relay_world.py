"""Both sides of a relay, for tests that play kernel and file system process."""

from __future__ import annotations

import os
import struct
from collections import Counter
from typing import Final

from kvstore.keeper import wire
from kvstore.keeper.backing import BackingFiles
from kvstore.keeper.channel import PASSTHROUGH_BIT
from kvstore.keeper.relay import Relay
from kvstore.keeper.wire import Op

FILE: Final = 5
DIRECTORY: Final = 1
BLOCK: Final = 77
"""Inode numbers."""
PASS: Final = PASSTHROUGH_BIT | 3
"""A handle number."""
INIT_IN: Final = struct.pack("<IIIII44x", 7, 45, 1 << 17, 1 << 30, 1 << 5)


class World:
    """Both sides of a relay, and the ioctls. `offers`: what the process sends before its next passthrough reply."""

    def __init__(self) -> None:
        self.kernel: list[bytes] = []
        self.fs: list[bytes] = []
        self.notified: list[bytes] = []
        self.refuse: list[int] = []
        """errnos for the next replies."""
        self.offers: list[tuple[int, int]] = []
        """(inode, fd)"""
        self.ids: Counter[int] = Counter()
        self.open_error = 0
        self.closed: list[int] = []
        self.backing = BackingFiles(self._open_id, self._close_id, self.closed.append)
        self.relay = Relay(self, self.backing)
        self.now_s = 0.0
        self._unique = 0
        self._id = 0

    def _open_id(self, fd: int) -> int:
        if self.open_error:
            raise OSError(self.open_error, "refused")
        self._id += 1
        self.ids[self._id] += 1
        return self._id

    def _close_id(self, id: int) -> None:
        del self.ids[id]

    def to_kernel(self, message: bytes | memoryview) -> int:
        code = self.refuse.pop(0) if self.refuse else 0
        if code == 0:
            self.kernel.append(bytes(message))
        return code

    def to_fs(self, message: bytes) -> None:
        self.fs.append(message)

    def notify(self, message: bytes) -> None:
        self.notified.append(message)

    def read_offers(self) -> None:
        while self.offers:
            self.backing.offer(*self.offers.pop(0), self.now_s)

    # The two sides.

    def ask(self, opcode: int, inode: int = FILE, body: bytes = b"") -> int:
        """A request of the kernel; its unique."""
        self._unique += 2
        head = wire.IN_HEAD.pack(wire.IN_HEAD.size + len(body), opcode, self._unique, inode, 0, 0, 0, 0, 0)
        self.relay.request(head + body, self.now_s)
        return self._unique

    def answer(self, unique: int, body: bytes = b"", error: int = 0) -> None:
        self.relay.reply(memoryview(bytearray(wire.reply(unique, error, body))))

    def said(self, unique: int) -> tuple[int, bytes]:
        """(errno, body) of the one reply that the kernel got."""
        replies = [m for m in self.kernel if wire.OUT_HEAD.unpack_from(m)[2] == unique]
        assert len(replies) == 1, f"{len(replies)} replies"
        size, error, _ = wire.OUT_HEAD.unpack_from(replies[0])
        assert size == len(replies[0])
        return -error, replies[0][wire.OUT_HEAD.size :]

    # Whole calls.

    def open(self, number: int = PASS, inode: int = FILE, flags: int = os.O_RDWR, fopen: int = 2) -> tuple[int, int]:
        """(FOPEN flags, backing id) that the kernel got."""
        unique = self.ask(Op.OPEN, inode, struct.pack("<II", flags, 0))
        self.answer(unique, wire.OPEN_OUT.pack(number, fopen, 0))
        error, body = self.said(unique)
        got, fopen, backing_id = wire.OPEN_OUT.unpack(body)
        assert (error, got) == (0, number)
        return fopen, backing_id

    def release(self, number: int = PASS, inode: int = FILE) -> None:
        unique = self.ask(Op.RELEASE, inode, release_in(number))
        self.answer(unique)
        assert self.said(unique) == (0, b"")

    def init(self) -> None:
        unique = self.ask(Op.INIT, 0, INIT_IN)
        self.answer(unique, bytes(wire.init_reply(0)[16:]))


def release_in(number: int) -> bytes:
    return struct.pack("<QIIQ", number, 0, 0, 0)


def entry(inode: int) -> bytes:
    return struct.pack("<Q", inode) + bytes(wire.ENTRY_SIZE - 8)
