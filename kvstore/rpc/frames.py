"""Frames of a lane, either way: a head, a name, a body. Pure.

::

    request   name = the method's path, body = its message
    reply     code 0: body = the message; else body = (message, reason, fault) of the KvError with that code
    hello     id 0, no name: body = `Hello`; the answer's body is the lane's token
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from kvstore.core.errors import InvalidRequest, KvError, from_wire
from kvstore.core.limits import MAX_MESSAGE_BYTES
from kvstore.rpc.metadata import Caller

HEAD: Final = struct.Struct("<IIHH")
"""Bytes of the body, id, code, bytes of the name."""
HELLO: Final = 0
MAX_NAME_BYTES: Final = 256


class Frame(NamedTuple):
    id: int
    code: int
    name: bytes
    body: bytes


class Hello(msgspec.Struct, array_like=True):
    """Who calls, from now on. Fields are appended with defaults."""

    version: int
    session: int
    node: str
    cluster: str


class _Failed(msgspec.Struct, array_like=True):
    message: str
    reason: str = ""
    fault: str = ""


_encoder = msgspec.msgpack.Encoder()
_hello = msgspec.msgpack.Decoder(Hello)
_failed = msgspec.msgpack.Decoder(_Failed)


def pack(id: int, code: int, name: bytes, body: bytes) -> bytes:
    return HEAD.pack(len(body), id, code, len(name)) + name + body


def pack_hello(version: int, caller: Caller) -> bytes:
    hello = Hello(version, caller.session, caller.node, caller.cluster)
    return pack(HELLO, 0, b"", _encoder.encode(hello))


def pack_error(id: int, error: KvError) -> bytes:
    return pack(id, error.code, b"", _encoder.encode(_Failed(error.message, error.reason, error.fault or "")))


def hello_of(frame: Frame) -> Hello:
    """Raises InvalidRequest for anything else."""
    try:
        if frame.id == HELLO:
            return _hello.decode(frame.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"not the hello of a lane: {error}") from None
    raise InvalidRequest("the first frame of a lane is a hello")


def error_of(frame: Frame) -> KvError:
    try:
        failed = _failed.decode(frame.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return InvalidRequest(f"not an answer of a lane: {error}")
    known = from_wire(frame.code, failed.message, failed.reason)
    known.fault = failed.fault or None
    return known


class Splitter:
    """Bytes as they come → frames."""

    def __init__(self) -> None:
        self._left = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes. Raises InvalidRequest for one longer than a message may be."""
        data, at = self._left + data if self._left else data, 0
        while len(data) - at >= HEAD.size:
            body_bytes, id, code, name_bytes = HEAD.unpack_from(data, at)
            if body_bytes > MAX_MESSAGE_BYTES or name_bytes > MAX_NAME_BYTES:
                raise InvalidRequest(f"a frame of {body_bytes} bytes is too long; at most {MAX_MESSAGE_BYTES}")
            name_at = at + HEAD.size
            body_at, end = name_at + name_bytes, name_at + name_bytes + body_bytes
            if len(data) < end:
                break
            yield Frame(id, code, data[name_at:body_at], data[body_at:end])
            at = end
        self._left = data[at:]
