"""Messages on the worker's Unix socket (SOCK_SEQPACKET): one msgpack array a message.

A request is ``[request id, [verb, …]]``, its answer ``[request id, code, body]`` with code 0 or a `KvError` code; fds
ride beside an answer in the order its body names them. Fields are appended with defaults, never reordered.
The first request of a connection is `Hello`; requests of one connection are answered in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from kvstore.core.errors import InvalidRequest, KvError, from_wire
from kvstore.core.types import Address, BlockId, Replica

PROTOCOL_VERSION = 1
WireAddress = tuple[int, int, int, int]
"""boot, counter, length, hash."""
WireReplica = tuple[int, str, str, str]
"""volume, tier, node, endpoint."""


class Message(msgspec.Struct, array_like=True):
    pass


M = TypeVar("M", bound=Message)


class Hello(Message, tag="hello"):
    version: int
    session: int
    """64 random bits of the SDK client or mount; the owner of what it stages (rule 11)."""
    cluster: str = ""
    """Cluster id the client talks to, or "" if it does not know yet. Another cluster's → Denied."""


class HelloReply(Message):
    version: int
    cluster: str
    node: str
    endpoint: str
    max_block_bytes: int


class Stage(Message, tag="stage"):
    """A new staging file with a reservation; answered with `Staged` and one read-write fd."""

    size_bytes: int


class Staged(Message):
    staging: int
    """Handle for reserve, seal and abort; valid for the session, not only for the connection."""
    volume: int


class Reserve(Message, tag="reserve"):
    """Make the reservation `size_bytes` in all; what is written counts in any case. NoSpace when there is no room."""

    staging: int
    size_bytes: int
    evict: bool = True
    """Whether to make room for it. Else it is NoSpace at once where that much is not free."""


class Seal(Message, tag="seal"):
    """Make the staging file a block (rule 5); the caller has closed its fds. Answered with `Sealed`.

    `hash` with `size_bytes` and `mtime_ns` of the moment it was taken lets the worker skip hashing if both still hold.
    An empty file cannot be sealed (a file without bytes has no block): InvalidRequest. Asked for again, be it by
    another process of the same session, it is answered as before while the block is here.
    """

    staging: int
    size_bytes: int
    hash: int | None = None
    mtime_ns: int | None = None


class SealCopy(Message, tag="seal_copy"):
    """Like `Seal` for a file that goes on being written: seals a copy (reflink where possible), staging stays."""

    staging: int


class Sealed(Message):
    address: WireAddress
    volume: int


class Abort(Message, tag="abort"):
    """Throw the staging file away; also the block that it became, unless that was published: then NotFound."""

    staging: int


class GiveUp(Message, tag="give_up"):
    """Blocks of this session that it will not publish; they go, unless the master says that somebody has (rule 11)."""

    addresses: list[WireAddress]


class Open(Message, tag="open"):
    """Blocks by address; `replicas[i]` says where else block i lies (may be empty). At most MAX_FDS_PER_MESSAGE.

    Answered with `Opened`; a block that is not here is fetched from a replica, once for all who wait.
    """

    addresses: list[WireAddress]
    replicas: list[list[WireReplica]]
    timeout_s: float


class Opened(Message):
    """Per block 0 (its fd is the next one beside the message) or an error code, with the messages of the errors."""

    codes: list[int]
    errors: list[str]
    faults: list[str] = []
    local: list[bool] = []
    """Whether the block was here already (for hit counters)."""
    reasons: list[str] = []
    """Like the errors: one for each."""


class Touch(Message, tag="touch"):
    """Opened again without asking (a cached fd), in this order: keeps heat true."""

    addresses: list[WireAddress]


class Stat(Message, tag="stat"):
    pass


class StatReply(Message):
    node: str
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    blocks: int


class Probe(Message, tag="probe"):
    """A file of each volume in service, to find out what the kernel can do with them. Answered with `Probed`."""


class Probed(Message):
    """Per volume its id, its tier, and beside the message a read-only fd of an empty file without a name in it."""

    volumes: list[int]
    tiers: list[str]


class Unfinished(Message, tag="unfinished"):
    """What this session has in staging. Answered with `Handles`."""


class Handles(Message):
    staging: list[int]


class Ok(Message):
    pass


class Failed(Message):
    message: str
    reason: str = ""
    fault: str = ""
    retry_after_s: float = 0.0


Request = Hello | Stage | Reserve | Seal | SealCopy | Abort | Open | Touch | Stat | Probe | Unfinished | GiveUp
_requests = msgspec.msgpack.Decoder(tuple[int, Request])
_heads = msgspec.msgpack.Decoder(tuple[int, int, msgspec.Raw])
_encoder = msgspec.msgpack.Encoder()


def encode_request(request_id: int, request: Request) -> bytes:
    return _encoder.encode((request_id, request))


def decode_request(data: bytes) -> tuple[int, Request]:
    """Raises InvalidRequest for anything that is not a request."""
    try:
        return _requests.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"not a message of the worker's socket: {error}") from None


def encode_reply(request_id: int, body: Message) -> bytes:
    return _encoder.encode((request_id, 0, body))


def encode_error(request_id: int, error: KvError) -> bytes:
    failed = Failed(error.message, error.reason, error.fault or "", error.retry_after_s)
    return _encoder.encode((request_id, error.code, failed))


def decode_reply(data: bytes) -> tuple[int, KvError | msgspec.Raw]:
    """(request id, the error or the body still to be decoded by its type, see `decode_body`)."""
    try:
        request_id, code, raw = _heads.decode(data)
        if code == 0:
            return request_id, raw
        failed = msgspec.msgpack.decode(raw, type=Failed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"not an answer of the worker's socket: {error}") from None
    known = from_wire(code, failed.message, failed.reason)
    known.fault, known.retry_after_s = failed.fault or None, failed.retry_after_s
    return request_id, known


def decode_body(raw: msgspec.Raw, kind: type[M]) -> M:
    """Raises InvalidRequest when the body is not of that kind."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"not a {kind.__name__} of the worker's socket: {error}") from None


def to_wire(address: Address) -> WireAddress:
    return (address.block.boot, address.block.counter, address.length_bytes, address.hash)


def from_wire_address(wire: WireAddress) -> Address:
    boot, counter, length, digest = wire
    return Address(BlockId(boot, counter), length, digest)


def to_wire_replicas(replicas: Iterable[Replica]) -> list[WireReplica]:
    return [(r.volume, r.tier, r.node, r.endpoint) for r in replicas]


def from_wire_replicas(wire: Iterable[WireReplica]) -> tuple[Replica, ...]:
    return tuple(Replica(*w) for w in wire)
