from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import sockproto as sp
from kvstore.core.errors import InvalidRequest, Unavailable
from kvstore.core.limits import MAX_FDS_PER_MESSAGE, MAX_SOCKET_MESSAGE_BYTES
from kvstore.core.types import Address, BlockId, Replica

ADDRESS = Address(BlockId(2**64 - 1, 2**64 - 1), 2**63 - 1, 2**64 - 1)
REQUESTS = [
    sp.Hello(1, 7, "c"),
    sp.Stage(14680064),
    sp.Reserve(1, 2),
    sp.Seal(1, 2, 3, 4),
    sp.SealCopy(5),
    sp.Abort(1),
    sp.Open([sp.to_wire(ADDRESS)], [sp.to_wire_replicas([Replica(1, "ssd", "node", "host:1")])], 1.0),
    sp.Touch([sp.to_wire(ADDRESS)]),
    sp.Stat(),
    sp.Probe(),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_survive(request_: sp.Request) -> None:
    assert sp.decode_request(sp.encode_request(9, request_)) == (9, request_)


def test_fields_may_be_appended() -> None:
    newer = msgspec.msgpack.encode([1, ["stage", 5, "a field of tomorrow"]])
    assert sp.decode_request(newer) == (1, sp.Stage(5))
    assert sp.decode_request(msgspec.msgpack.encode([1, ["seal", 5, 6]])) == (1, sp.Seal(5, 6))


def test_replies_and_errors() -> None:
    request_id, body = sp.decode_reply(sp.encode_reply(4, sp.Staged(1, 2)))
    assert request_id == 4
    assert isinstance(body, msgspec.Raw)
    assert sp.decode_body(body, sp.Staged) == sp.Staged(1, 2)
    _, error = sp.decode_reply(sp.encode_error(5, Unavailable("peer is down", fault="node-2")))
    assert isinstance(error, Unavailable)
    assert (str(error), error.fault) == ("peer is down", "node-2")


def test_addresses_survive() -> None:
    assert sp.from_wire_address(sp.to_wire(ADDRESS)) == ADDRESS
    replicas = (Replica(1, "ssd", "n", "e"),)
    assert sp.from_wire_replicas(sp.to_wire_replicas(replicas)) == replicas


def test_the_largest_open_fits_one_message() -> None:
    replicas = [Replica(2**64 - 1, "ssd", "n" * 64, "h" * 64 + ":65535")] * 3
    request = sp.Open(
        [sp.to_wire(ADDRESS)] * MAX_FDS_PER_MESSAGE, [sp.to_wire_replicas(replicas)] * MAX_FDS_PER_MESSAGE, 1.0
    )
    assert len(sp.encode_request(1, request)) <= MAX_SOCKET_MESSAGE_BYTES


@given(st.binary(max_size=200))
def test_any_bytes_give_a_typed_error(data: bytes) -> None:
    for decode in (sp.decode_request, sp.decode_reply):
        with contextlib.suppress(InvalidRequest):
            decode(data)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        sp.decode_request(b"\x91" * 100_000)
