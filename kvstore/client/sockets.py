"""Messages with file descriptors on the worker's Unix socket: the part that is the same with and without a loop.

Whoever gets an `Answer` owns its fds. Nothing here loses one: a message that cannot be used has its fds closed.
"""

from __future__ import annotations

import array
import errno
import itertools
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvstore.core import sockproto as sp
from kvstore.core.errors import InvalidRequest, KvError, NotFound, Overloaded, Unavailable, from_wire
from kvstore.core.limits import MAX_FDS_PER_MESSAGE, MAX_SOCKET_MESSAGE_BYTES
from kvstore.core.types import Address, Replica
from kvstore.rpc.breaker import OutOfDescriptors

_NO_DESCRIPTORS = "no free file descriptors here; raise RLIMIT_NOFILE (ulimit -n)"
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS_PER_MESSAGE * array.array("i").itemsize)
MAX_REPLICAS = 8
"""Replicas named to the worker for one block: more than that only makes the message longer."""

MAX_NAMED = 1024
"""Addresses in one touch or give-up: 37 bytes each at most."""
assert MAX_NAMED * 37 < MAX_SOCKET_MESSAGE_BYTES

Wanted = tuple[Address, Sequence[Replica]]
"""A block to open, and where it lies if it is not here."""
Opened = list[int | KvError]
"""Per wanted block a read-only fd, which the caller owns, or the error in its place."""


class Answer(NamedTuple):
    request_id: int
    body: KvError | msgspec.Raw
    fds: list[int]


class StagedFile(NamedTuple):
    """A staging file of the worker: its handle, a read-write fd that the caller owns, the volume it lies in."""

    staging: int
    fd: int
    volume: int


class ProbedVolume(NamedTuple):
    """A volume of the worker, and a read-only fd, which the caller owns, of an empty file without a name in it."""

    volume: int
    tier: str
    fd: int


class SealedBlock(NamedTuple):
    """A block that nobody has published yet, and where it lies."""

    address: Address
    volume: int
    endpoint: str = ""
    """Of the worker that has it; "": the local one."""


def new_socket() -> socket.socket:
    """Raises Overloaded when this process, or the machine, has no descriptor left."""
    try:
        return _new_socket()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise OutOfDescriptors(_NO_DESCRIPTORS) from None


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def unreachable(path: str, error: OSError) -> Unavailable:
    return Unavailable(f"no worker answers on {path}: {error.strerror or error}; is it running?", fault=path)


def receive(sock: socket.socket, path: str) -> Answer:
    """One message. Raises Unavailable when the connection is over, OSError as the socket does (BlockingIOError,
    TimeoutError).
    """
    try:
        data, ancillary, flags, _ = _recvmsg(sock)
    except ConnectionResetError:  # it hung up without reading all that we sent; its last words may lie there still
        data, ancillary, flags, _ = _recvmsg(sock)
    fds = _fds(ancillary)
    try:
        if not data:
            raise Unavailable(f"the worker on {path} closed the connection", fault=path)
        if flags & socket.MSG_TRUNC:
            raise Unavailable(f"the worker on {path} sent a longer message than the protocol allows", fault=path)
        request_id, body = sp.decode_reply(data)
        if flags & socket.MSG_CTRUNC:
            raise _Truncated(request_id)
    except _Truncated as lost:
        close_all(fds)
        return Answer(lost.request_id, Overloaded(_NO_DESCRIPTORS), [])
    except InvalidRequest as error:
        close_all(fds)
        raise Unavailable(f"the worker on {path}: {error}", fault=path) from None
    except BaseException:
        close_all(fds)
        raise
    return Answer(request_id, body, fds)


def _recvmsg(sock: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
    # Not socket.recv_fds: it ignores its flags in 3.11, and without CLOEXEC the fds leak into every child.
    return sock.recvmsg(MAX_SOCKET_MESSAGE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)


class _Truncated(Exception):
    """The kernel dropped fds of this answer: this process has no room for more."""

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id


def _fds(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def body_of(answer: Answer, kind: type[sp.M], fd_count: int | None = 0) -> sp.M:
    """The body of a good answer. Raises the worker's error; closes all fds when it raises."""
    try:
        if isinstance(answer.body, KvError):
            raise answer.body
        body = sp.decode_body(answer.body, kind)
        if fd_count is not None and len(answer.fds) != fd_count:
            raise KvError(f"the worker's answer is malformed: {len(answer.fds)} fds for {fd_count}")
    except BaseException:
        close_all(answer.fds)
        raise
    return body


def staged(answer: Answer) -> StagedFile:
    body = body_of(answer, sp.Staged, 1)
    return StagedFile(body.staging, answer.fds[0], body.volume)


def sealed(answer: Answer) -> SealedBlock:
    body = body_of(answer, sp.Sealed)
    return SealedBlock(sp.from_wire_address(body.address), body.volume)


def probed(answer: Answer) -> list[ProbedVolume]:
    body = body_of(answer, sp.Probed, None)
    if not len(body.volumes) == len(body.tiers) == len(answer.fds):
        close_all(answer.fds)
        raise KvError("the worker's answer is malformed: volumes, tiers and fds do not fit each other")
    return [ProbedVolume(*row) for row in zip(body.volumes, body.tiers, answer.fds, strict=True)]


def opened(answer: Answer, count: int) -> Opened:
    """The fds and errors in the order of the request."""
    body = body_of(answer, sp.Opened, None)
    good = sum(1 for code in body.codes if code == 0)
    if len(body.codes) != count or len(answer.fds) != good:
        close_all(answer.fds)
        raise KvError("the worker's answer is malformed: codes and fds do not fit each other")
    fds, errors = iter(answer.fds), itertools.zip_longest(body.errors, body.faults, body.reasons, fillvalue="")
    return [next(fds) if code == 0 else _error(code, *next(errors, ("", "", ""))) for code in body.codes]


def _error(code: int, message: str, fault: str, reason: str) -> KvError:
    """Of one block. It is not a name: where a worker does not say why, nobody has it, that is all."""
    error = from_wire(code, message, reason or ("no_replica" if code == NotFound.code else ""))
    error.fault = fault or None
    return error


def open_request(wanted: Sequence[Wanted], timeout_s: float) -> sp.Open:
    """`timeout_s` is what the caller waits; the worker gets a little less, so that its own answer arrives in time."""
    return sp.Open(
        [sp.to_wire(address) for address, _ in wanted],
        [sp.to_wire_replicas(replicas[:MAX_REPLICAS]) for _, replicas in wanted],
        max(timeout_s - 0.05, timeout_s * 0.9),
    )


def touch_requests(addresses: Sequence[Address]) -> Iterator[sp.Touch]:
    """In order, in portions that fit into a message."""
    for i in range(0, len(addresses), MAX_NAMED):
        yield sp.Touch([sp.to_wire(a) for a in addresses[i : i + MAX_NAMED]])


def give_up_requests(addresses: Sequence[Address]) -> Iterator[sp.GiveUp]:
    """In portions that fit into a message."""
    for i in range(0, len(addresses), MAX_NAMED):
        yield sp.GiveUp([sp.to_wire(a) for a in addresses[i : i + MAX_NAMED]])


def encode(request_id: int, request: sp.Request) -> bytes:
    """Raises InvalidRequest when it is longer than a message may be."""
    data = sp.encode_request(request_id, request)
    if len(data) > MAX_SOCKET_MESSAGE_BYTES:
        raise InvalidRequest(f"a message of {len(data)} bytes is too long; at most {MAX_SOCKET_MESSAGE_BYTES}")
    return data


def batches(wanted: Sequence[Wanted]) -> list[Sequence[Wanted]]:
    """Wanted blocks in portions that fit into a message, each at most `MAX_FDS_PER_MESSAGE` fds."""
    parts = [wanted[i : i + MAX_FDS_PER_MESSAGE] for i in range(0, len(wanted), MAX_FDS_PER_MESSAGE)]
    return [half for part in parts for half in _halves(part)]


def _halves(part: Sequence[Wanted]) -> list[Sequence[Wanted]]:
    size = len(sp.encode_request(2**63, open_request(part, 1.0)))
    if size <= MAX_SOCKET_MESSAGE_BYTES or len(part) == 1:
        return [part]
    middle = len(part) // 2
    return [*_halves(part[:middle]), *_halves(part[middle:])]
