"""What the keeper and its file system process say to each other, beside the FUSE messages.

One SOCK_SEQPACKET pair; every message is a head (kind, inode) with fds by SCM_RIGHTS and, for some kinds, text behind
it. The FUSE messages have a pair of their own. Order matters in one place: an `OFFER` is sent before the reply it
belongs to, so the keeper reads this channel before it patches a reply.

A file system process finds its ends in the environment, see `Inheritance`.
"""

from __future__ import annotations

import array
import enum
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

ENVIRONMENT: Final = "KVSTORE_KEEPER"
PASSTHROUGH_BIT: Final = 1 << 63
"""Set in the handle number of an OPEN or CREATE reply that the keeper shall turn into a passthrough one; it stays in
the number that the kernel uses.
"""
MAX_FDS: Final = 64
"""In one message; the kernel takes at most 253."""
_HEAD: Final = struct.Struct("<BQ")
_MAX_TEXT: Final = 64 * 1024
_BUFFER: Final = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)


class Kind(enum.IntEnum):
    """Who says it, what stands behind the head."""

    READY = 1
    """fs: connected to the store; can take over."""
    SERVING = 2
    """fs: serves. Text: {"line": what people are told, "facts": {…} for sd_notify}."""
    OFFER = 3
    """fs: (inode, 1 fd, read-only) the file behind the next passthrough reply for this inode."""
    KEEP = 4
    """fs: (inode, 1 fd, read-only) hold it for a successor until DROP. Replaces an earlier one."""
    DROP = 5
    """fs: (inode)."""
    STATE = 6
    """fs: (1 fd) a compacted state file, in place of the one so far."""
    BEAT = 7
    """fs: its loop runs; once a second."""
    KEPT = 20
    """keeper: (n fds) fds of `KEEP`, before TAKE. Text: [inode, …] in their order."""
    TAKE = 21
    """keeper: (1 fd) serve from now on. The fd is a memfd with a `Table` as JSON."""
    YIELD = 22
    """keeper: end without giving anything up: a successor takes over."""
    END = 23
    """keeper: the mount is gone for good: drop everything and end."""


class Inheritance(NamedTuple):
    """What a file system process gets from its keeper; ``KVSTORE_KEEPER=<fuse>,<control>,<state>,<session>,<n>``."""

    fuse_fd: int
    """Its end of the pair that carries FUSE messages."""
    control_fd: int
    state_fd: int
    """A memfd that outlives the process: what a successor needs (empty at the first start)."""
    session: int
    """64 random bits, the same for all file system processes of a keeper."""
    generation: int
    """0, 1, 2 …: one more for each file system process."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Inheritance | None:
        text = environ.get(ENVIRONMENT, "")
        return cls(*map(int, text.split(","))) if text else None

    def to_text(self) -> str:
        return ",".join(map(str, self))


class Open(NamedTuple):
    """A handle that the kernel holds."""

    handle: int
    """As the kernel knows it, `PASSTHROUGH_BIT` included."""
    inode: int
    directory: bool


class Again(NamedTuple):
    """A request that is sent a second time: the former process may have carried it out already."""

    opcode: int
    inode: int
    """Of the request's head: for names, the parent."""
    name: bytes
    new_inode: int
    """RENAME: the new parent; else 0."""
    new_name: bytes


class Table(NamedTuple):
    """What a successor is told."""

    opens: list[Open]
    again: list[Again]

    def to_json(self) -> bytes:
        again = [(a.opcode, a.inode, a.name.hex(), a.new_inode, a.new_name.hex()) for a in self.again]
        return json.dumps({"opens": self.opens, "again": again}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Table:
        raw = json.loads(data)
        again = [Again(op, i, bytes.fromhex(n), j, bytes.fromhex(m)) for op, i, n, j, m in raw["again"]]
        return cls([Open(*o) for o in raw["opens"]], again)


class Message(NamedTuple):
    kind: Kind
    inode: int
    text: bytes
    fds: list[int]
    """The receiver's to close."""

    def json(self) -> Any:
        return json.loads(self.text)


class Closed(Exception):
    """The other side is gone."""


def send(sock: socket.socket, kind: Kind, inode: int = 0, text: bytes = b"", fds: Sequence[int] = ()) -> None:
    """One message, whole. Raises Closed; BlockingIOError on a non-blocking socket that is full."""
    try:
        if fds:
            socket.send_fds(sock, [_HEAD.pack(kind, inode), text], fds)
        else:
            sock.send(_HEAD.pack(kind, inode) + text)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(sock: socket.socket) -> Message:
    """The next message. Raises Closed; BlockingIOError when there is none on a non-blocking socket; ValueError for one
    that was cut off or is of no known kind: it is dropped, the next one can be read.
    """
    try:
        data, ancillary, flags, _ = sock.recvmsg(_HEAD.size + _MAX_TEXT, _BUFFER, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError as error:
        raise Closed from error
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data:
        raise Closed
    try:
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(data) < _HEAD.size:
            raise ValueError("a message of the keeper's channel was cut off")
        number, inode = _HEAD.unpack_from(data)
        return Message(Kind(number), inode, data[_HEAD.size :], list(fds))
    except ValueError:
        for fd in fds:
            os.close(fd)
        raise
