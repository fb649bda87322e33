"""Values that no honest peer sends, and messages made of them from their descriptors.

Examples are the same at each run; ``KVSTORE_FUZZ=<examples>`` looks for new ones, as many for each test.
"""

from __future__ import annotations

import os
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)

_WANTED: Final = int(os.environ.get("KVSTORE_FUZZ", "0"))
_ALL: Final = (Phase.explicit, Phase.generate, Phase.shrink)


def fuzz(examples: int) -> settings:
    """Decorates a fuzz test: so many examples in CI."""
    return settings(
        max_examples=_WANTED or examples, derandomize=not _WANTED, database=None, deadline=None, phases=_ALL,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )  # fmt: skip


U32: Final = st.sampled_from([0, 1, 2, 0o644, 0o777, 4096, 4097, 2**31, 2**32 - 1])
U64: Final = st.sampled_from([0, 1, 2, 3, 7, 14, 255, 4097, 2**20 + 2, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
"""Small ones are known to the server under test: inodes, volumes, boots, counters, the numbers of reports."""
I64: Final = st.sampled_from([0, 1, -1, 10**18, 2**63 - 1, -(2**63)])
DOUBLES: Final = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan")])
NAMES: Final = st.sampled_from([
    "a", "b", "d", "a/b", "d/e", "", "/", "//a//", ".", "..", "a/../b", "a/.", "\0", "a\0b", " ", "\n", "é", "\ufffd",
    "x" * 255, "x" * 256, "é" * 128, "d/" * 255 + "e", "d/" * 300, "x/" * 3000, "n1", "n2", "ssd", "mem", "h1:1", "%s",
])  # fmt: skip
BLOCK_IDS: Final = st.builds(
    lambda boot, counter: boot.to_bytes(8, "big") + counter.to_bytes(8, "big"),
    st.sampled_from([0, 7, 14, 2**64 - 1]), st.sampled_from([0, 1, 2, 3, 2**64 - 1]),
)  # fmt: skip
BYTES: Final = st.one_of(
    BLOCK_IDS, st.lists(BLOCK_IDS, max_size=4).map(b"".join), st.binary(max_size=40), st.just(b"\xff" * 16)
)

MAX_DEPTH: Final = 3
_F: Final = FieldDescriptor
_OF_TYPE: Final[dict[int, st.SearchStrategy[Any]]] = {
    _F.TYPE_UINT32: U32,
    _F.TYPE_UINT64: U64,
    _F.TYPE_FIXED64: U64,
    _F.TYPE_INT64: I64,
    _F.TYPE_DOUBLE: DOUBLES,
    _F.TYPE_BOOL: st.booleans(),
    _F.TYPE_STRING: NAMES,
    _F.TYPE_BYTES: BYTES,
    _F.TYPE_ENUM: st.sampled_from([0, 1, 2, 3, 99, 2**31 - 1, -1]),
}


@st.composite
def messages(draw: st.DrawFn, kind: type[M]) -> M:
    """Any message of a kind; every field may be missing."""
    message = kind()
    _fill(draw, message, MAX_DEPTH)
    return message


def _fill(draw: st.DrawFn, message: Message, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if draw(st.booleans()):
            _set(draw, message, field, depth)


def _set(draw: st.DrawFn, message: Message, field: Any, depth: int) -> None:
    """Give a field another value, of a repeated one up to three; a message that lies deeper stays empty."""
    message.ClearField(field.name)
    if field.message_type is None:
        value = draw(st.lists(_OF_TYPE[field.type], max_size=3) if field.is_repeated else _OF_TYPE[field.type])
        type(message).MergeFrom(message, type(message)(**{field.name: value}))
        return
    for _ in range(draw(st.integers(0, 3)) if field.is_repeated else 1):
        inner = getattr(message, field.name).add() if field.is_repeated else getattr(message, field.name)
        inner.SetInParent()
        if depth:
            _fill(draw, inner, depth - 1)


def mangled(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Honest bytes, then: cut off, a byte changed, something put in, bytes behind them."""
    return st.builds(_mangle, data, st.integers(0, 4), st.integers(0, 2**16), st.binary(min_size=1, max_size=12))


def _mangle(data: bytes, way: int, at: int, noise: bytes) -> bytes:
    at %= len(data) + 1
    return (
        data[:at],
        data[:at] + bytes([noise[0]]) + data[at + 1 :],
        data[:at] + noise + data[at:],
        data + noise,
        noise + data,
    )[way]


@st.composite
def spoiled(draw: st.DrawFn, honest: st.SearchStrategy[M]) -> M:
    """An honest message with one to three of its values, however deep they lie, replaced by hostile ones."""
    message = draw(honest)
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(draw(st.integers(1, 3))):
        _spoil(draw, copy)
    return copy


def _spoil(draw: st.DrawFn, message: Message) -> None:
    if not message.DESCRIPTOR.fields:
        return
    field: Any = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    inside, deeper = _present(message, field), draw(st.integers(0, 3))
    if inside and deeper:
        _spoil(draw, inside[draw(st.integers(0, len(inside) - 1))])
        return
    _set(draw, message, field, MAX_DEPTH)


def _present(message: Message, field: Any) -> list[Message]:
    """The messages that lie in a field now."""
    if field.message_type is None:
        return []
    value = getattr(message, field.name)
    if field.is_repeated:
        return list(value)
    return [value] if message.HasField(field.name) else []
