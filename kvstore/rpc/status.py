"""KvError ⇄ gRPC status: the one table. The exact error travels in trailing metadata, the status is for others."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import grpc

from kvstore.core import errors
from kvstore.core.errors import KvError
from kvstore.core.limits import RETRY_AFTER_S
from kvstore.pb import common_pb2 as pb

CODE_KEY, REASON_KEY, FAULT_KEY = "kvstore-code", "kvstore-reason", "kvstore-fault"
RETRY_KEY = "kvstore-retry-ms"
_S = grpc.StatusCode

STATUS: dict[type[KvError], grpc.StatusCode] = {
    KvError: _S.INTERNAL,
    errors.InvalidRequest: _S.INVALID_ARGUMENT,
    errors.NameTooLong: _S.INVALID_ARGUMENT,
    errors.TooLarge: _S.OUT_OF_RANGE,
    errors.OtherPolicy: _S.FAILED_PRECONDITION,
    errors.NotFound: _S.NOT_FOUND,
    errors.AlreadyExists: _S.ALREADY_EXISTS,
    errors.NotEmpty: _S.FAILED_PRECONDITION,
    errors.NotDirectory: _S.FAILED_PRECONDITION,
    errors.IsDirectory: _S.FAILED_PRECONDITION,
    errors.ReadOnly: _S.FAILED_PRECONDITION,
    errors.Stale: _S.ABORTED,
    errors.Unavailable: _S.UNAVAILABLE,
    errors.Overloaded: _S.RESOURCE_EXHAUSTED,
    errors.NoSpace: _S.RESOURCE_EXHAUSTED,
    errors.Denied: _S.PERMISSION_DENIED,
    errors.Timeout: _S.DEADLINE_EXCEEDED,
    errors.Corrupt: _S.DATA_LOSS,
    errors.Unsupported: _S.UNIMPLEMENTED,
}
_FOREIGN: dict[grpc.StatusCode, type[KvError]] = {
    _S.INVALID_ARGUMENT: errors.InvalidRequest,
    _S.OUT_OF_RANGE: errors.InvalidRequest,
    _S.NOT_FOUND: errors.NotFound,
    _S.ALREADY_EXISTS: errors.AlreadyExists,
    _S.UNAVAILABLE: errors.Unavailable,
    _S.CANCELLED: errors.Unavailable,
    _S.ABORTED: errors.Stale,
    _S.RESOURCE_EXHAUSTED: errors.Overloaded,
    _S.PERMISSION_DENIED: errors.Denied,
    _S.UNAUTHENTICATED: errors.Denied,
    _S.DEADLINE_EXCEEDED: errors.Timeout,
    _S.DATA_LOSS: errors.Corrupt,
    _S.UNIMPLEMENTED: errors.Unsupported,
}


_TOO_LARGE: Final = re.compile("message larger than max", re.IGNORECASE)
MAX_TOLD_BYTES: Final = 2000
"""Of an error: names in it may be long."""
MAX_DETAILS: Final = 200
"""Characters of a text of the transport that we do not know: some list every address and every attempt."""
TROUBLES: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), words)
    for pattern, words in (
        ("connection refused", "connection refused; is it running?"),
        ("http1.x server", "a server of another kind answers there; is it the right port?"),
        ("name resolution|DNS resolution|C-ares|service not known|domain name", "there is no host of this name"),
        ("no route to host|network is unreachable|host is unreachable", "there is no way to this host"),
        ("deadline exceeded|timed? ?out", "no answer in time"),
        ("goaway|settings frame|socket closed|connection reset|broken pipe|stream removed|RST_STREAM|transport closed",
         "the connection broke"),
    )
)  # fmt: skip
"""Texts of grpc 1.78 and what they mean; the first that fits."""


def to_status(error: KvError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """(status, details, trailing metadata) with which a server ends a call."""
    trailing = [(CODE_KEY, str(error.code)), (REASON_KEY, error.reason)]
    if error.fault and error.fault.isascii() and error.fault.isprintable():
        trailing.append((FAULT_KEY, error.fault))
    if error.retry_after_s:
        trailing.append((RETRY_KEY, str(round(1000 * error.retry_after_s))))
    status = next(STATUS[c] for c in type(error).__mro__ if c in STATUS)  # some rooms have finer ones of their own
    return status, _short(error.message), tuple(trailing)


def from_rpc_error(error: Any, endpoint: str) -> KvError:
    """The KvError of a failed call (grpc.RpcError, sync or aio). `endpoint` is named in errors of the transport."""
    trailing = _trailing(error.trailing_metadata() or ())
    details = error.details() or ""
    if code := _number(trailing.get(CODE_KEY, "")):
        known = errors.from_wire(code, details, trailing.get(REASON_KEY, ""))
        known.fault = trailing.get(FAULT_KEY)
        known.retry_after_s = _number(trailing.get(RETRY_KEY, "")) / 1000
        return known
    return _foreign(error.code(), details, endpoint)


def _foreign(code: grpc.StatusCode, details: str, endpoint: str) -> KvError:
    """What gRPC itself says. It has one status for a server that is full and for a message that is too large."""
    text = f"{endpoint}: {plain(details) or code.name.lower()}"
    if code is _S.RESOURCE_EXHAUSTED and _TOO_LARGE.search(details):
        return errors.TooLarge(text, fault=endpoint)
    retry_after_s = RETRY_AFTER_S if code is _S.RESOURCE_EXHAUSTED else 0.0
    return _FOREIGN.get(code, KvError)(text, fault=endpoint, retry_after_s=retry_after_s)


def plain(details: str) -> str:
    """What the transport says, for people: the usual troubles in a few words, all else on one short line."""
    text = " ".join(details.split())
    known = next((words for pattern, words in TROUBLES if pattern.search(text)), None)
    return known or (text if len(text) <= MAX_DETAILS else f"{text[: MAX_DETAILS - 1]}…")


def _number(text: str) -> int:
    """0 for what is no number that a peer of ours sends."""
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _short(message: str) -> str:
    """It travels in a header, with up to 3 bytes for each of its own: gRPC takes 8 KiB of them all."""
    data = message.encode(errors="replace")
    return message if len(data) <= MAX_TOLD_BYTES else data[:MAX_TOLD_BYTES].decode(errors="ignore") + "…"


def _trailing(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {k: v for k, v in metadata if isinstance(v, str)}


def error_to_pb(error: KvError | None) -> pb.Error:
    """An error inside a batch; None is success."""
    return pb.Error() if error is None else pb.Error(code=error.code, message=error.message, reason=error.reason)


def error_from_pb(error: pb.Error) -> KvError | None:
    return None if error.code == 0 else errors.from_wire(error.code, error.message, error.reason)
