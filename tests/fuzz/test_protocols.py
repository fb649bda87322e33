"""What comes through sockets: what was sent arrives, anything else is refused in the one way that is expected."""

from __future__ import annotations

import contextlib
import os
import socket
import types
import typing
from typing import Any, Final

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.config import units
from kvstore.core import sockproto as sp
from kvstore.core.errors import InvalidRequest, KvError, Unsupported
from kvstore.core.types import U63_MAX, U64_MAX, Address, BlockId, Entry, Replica
from kvstore.keeper import channel, mountinfo
from kvstore.keeper.channel import Again, Kind, Open, Table
from kvstore.node.notify import parse as parse_notification
from kvstore.obs.http import BadRequest, parse_request_line
from kvstore.pb import common_pb2 as c
from kvstore.rpc import entries
from kvstore.rpc.metadata import PROTOCOL_VERSION, Caller
from tests.fuzz.hostile import NAMES, fuzz, mangled, messages

U64: Final = st.integers(0, U64_MAX)
I64: Final = st.integers(-(2**63), 2**63 - 1)
TEXT: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ADDRESSES: Final = st.builds(Address, st.builds(BlockId, U64, U64), st.integers(0, U63_MAX), U64)


# ---- columns of entries

REPLICAS: Final = st.lists(st.builds(Replica, U64, TEXT, TEXT, TEXT), max_size=3).map(tuple)
DIRECTORIES: Final = st.builds(
    Entry, U64, st.just(0o040755), st.just(0), st.just(0), st.just(0), I64, I64, st.none(), st.just(()), U64
)
FILES: Final = st.builds(
    Entry, U64, st.just(0o100644), st.just(1), st.just(1), st.just(9), I64, I64, ADDRESSES, REPLICAS, U64
)
ROWS: Final = st.lists(st.one_of(DIRECTORIES, FILES, st.builds(KvError, TEXT)), max_size=4)


@fuzz(150)
@given(ROWS)
def test_entries_survive_in_columns(rows: list[entries.Row]) -> None:
    there = entries.decode(entries.encode(rows))
    assert [type(row) for row in there] == [type(row) for row in rows]
    assert [row for row in there if isinstance(row, Entry)] == [row for row in rows if isinstance(row, Entry)]


@st.composite
def torn_columns(draw: st.DrawFn) -> c.Entries:
    """Honest columns, one of which another one has taken the place of."""
    message = entries.encode(draw(ROWS))
    other = draw(messages(c.Entries))
    field = draw(st.sampled_from(sorted(c.Entries.DESCRIPTOR.fields_by_name)))
    message.ClearField(field)  # type: ignore[arg-type]
    message.MergeFrom(c.Entries(**{field: getattr(other, field)}))
    return message


@fuzz(400)
@given(messages(c.Entries) | torn_columns())
def test_columns_that_do_not_fit_each_other_are_a_typed_error(message: c.Entries) -> None:
    with contextlib.suppress(KvError):
        assert all(isinstance(row, Entry | KvError) for row in entries.decode(message))


# ---- who calls

VALUES: Final = st.one_of(TEXT, st.sampled_from(["0", "-1", "f" * 16, "f" * 17, "f" * 5000, "0x1", "1_0", " 1", "nan"]))
METADATA: Final = st.lists(
    st.tuples(
        st.sampled_from(["kvstore-session", "kvstore-node", "kvstore-protocol", "kvstore-cluster", "kvstore-request"]),
        st.one_of(VALUES, st.binary(max_size=8)),
    ),
    max_size=4,
)


@fuzz(400)
@given(METADATA)
def test_any_metadata_is_a_caller_or_a_typed_error(metadata: list[tuple[str, str | bytes]]) -> None:
    with contextlib.suppress(InvalidRequest, Unsupported):
        caller = Caller.from_metadata(metadata)
        assert 0 <= caller.session <= U64_MAX, "it becomes the name of a file, and a key"


@fuzz(100)
@given(U64, st.sampled_from(["", "n1"]), st.sampled_from(["", "c1"]))
def test_callers_survive(session: int, node: str, cluster: str) -> None:
    caller = Caller(session, node, cluster)
    assert Caller.from_metadata(caller.to_metadata()) == caller
    assert caller.to_metadata()[0] == ("kvstore-protocol", str(PROTOCOL_VERSION))


# ---- the worker's socket

REQUESTS: Final[list[type[sp.Message]]] = list(typing.get_args(sp.Request))
REPLIES: Final[list[type[sp.Message]]] = [
    sp.HelloReply, sp.Staged, sp.Sealed, sp.Opened, sp.StatReply, sp.Probed, sp.Handles, sp.Ok,
]  # fmt: skip
_HOSTILE: Final[dict[Any, st.SearchStrategy[Any]]] = {
    int: st.one_of(U64, I64, st.sampled_from([0, 1, -1, U63_MAX, U64_MAX, -(2**63)])),
    float: st.floats(width=64),
    str: NAMES,
    bool: st.booleans(),
    type(None): st.none(),
}


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, sensible or not."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return st.lists(of_type(arguments[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(of_type, arguments))
    if origin in (types.UnionType, typing.Union):
        return st.one_of([of_type(argument) for argument in arguments])
    return _HOSTILE[hint]


def of_kind(kind: type[sp.Message]) -> st.SearchStrategy[sp.Message]:
    return st.builds(kind, *[of_type(hint) for hint in typing.get_type_hints(kind).values()])


@fuzz(300)
@given(U64, st.one_of([of_kind(kind) for kind in REQUESTS]))
def test_requests_survive(request_id: int, request: sp.Request) -> None:
    again = sp.decode_request(sp.encode_request(request_id, request))
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode((request_id, request)), "NaN is not equal to itself"


@fuzz(300)
@given(st.one_of([of_kind(kind) for kind in REPLIES]), st.sampled_from(REPLIES))
def test_replies_survive_and_are_no_others(reply: sp.Message, other: type[sp.Message]) -> None:
    _, raw = sp.decode_reply(sp.encode_reply(1, reply))
    assert isinstance(raw, msgspec.Raw)
    assert sp.decode_body(raw, type(reply)) == reply
    with contextlib.suppress(InvalidRequest):
        assert isinstance(sp.decode_body(raw, other), other)


HONEST: Final = st.one_of([of_kind(kind) for kind in REQUESTS]).map(lambda r: msgspec.msgpack.encode((1, r)))
VALUE: Final = st.recursive(
    st.one_of(st.none(), st.booleans(), U64, I64, st.floats(), st.text(max_size=8), st.binary(max_size=8)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@fuzz(800)
@given(mangled(HONEST) | VALUE.map(msgspec.msgpack.encode) | st.binary(max_size=64))
@example(b"\x92\x01" + b"\x91" * 60_000)
@example(b"\xdd\xff\xff\xff\xff")
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        sp.decode_request(data)
    with contextlib.suppress(InvalidRequest):
        _, raw = sp.decode_reply(data)
        if isinstance(raw, msgspec.Raw):
            sp.decode_body(raw, sp.Opened)


# ---- the keeper's channel

TABLES: Final = st.builds(
    Table,
    st.lists(st.builds(Open, U64, U64, st.booleans()), max_size=3),
    st.lists(st.builds(Again, U64, U64, st.binary(max_size=8), U64, st.binary(max_size=8)), max_size=3),
)


@fuzz(100)
@given(TABLES)
def test_tables_survive(table: Table) -> None:
    assert Table.from_json(table.to_json()) == table


@fuzz(200)
@given(st.sampled_from(Kind), U64, st.binary(max_size=64), st.integers(0, 3))
def test_messages_of_the_channel_survive(kind: Kind, inode: int, text: bytes, fds: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        channel.send(ours, kind, inode, text, [ours.fileno()] * fds)
        message = channel.receive(theirs)
        for fd in message.fds:
            os.close(fd)
        assert (message.kind, message.inode, message.text, len(message.fds)) == (kind, inode, text, fds)


@fuzz(200)
@given(st.binary(min_size=1, max_size=24), st.integers(0, 80))
def test_any_bytes_on_the_channel_are_a_message_or_dropped_with_their_fds(data: bytes, fds: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(ours, [data], [ours.fileno()] * fds)
        try:
            message = channel.receive(theirs)
        except ValueError:
            pass
        else:
            for fd in message.fds:
                os.close(fd)
        assert len(os.listdir("/proc/self/fd")) == before


# ---- lines of text


@fuzz(300)
@given(st.binary(max_size=40) | mangled(st.just(b"GET /metrics?x=1 HTTP/1.1")))
def test_any_request_line_is_a_path_or_a_bad_request(line: bytes) -> None:
    with contextlib.suppress(BadRequest):
        method, path = parse_request_line(line)
        assert (method in ("GET", "HEAD"), path[:1], "?" in path) == (True, "/", False)


@fuzz(200)
@given(mangled(st.just(b"READY=1\nX_ENDPOINT=127.0.0.1:1\n")) | st.binary(max_size=60))
def test_any_notification_is_a_set_of_facts(message: bytes) -> None:
    assert all(isinstance(value, str) for value in parse_notification(message).values())


LINE: Final = rb"36 35 0:52 / /mnt\040x rw,nosuid shared:1 - fuse.kvstore kvstore rw,user_id=0" + b"\n"


@fuzz(200)
@given(st.sampled_from([b"/a b", b"/\xff\xfe", b"/a\\040", b"/\n"]))
def test_paths_of_mounts_come_back_as_they_are(path: bytes) -> None:
    shown = path.replace(b"\\", b"\\134").replace(b" ", b"\\040").replace(b"\n", b"\\012")
    [mount] = mountinfo.parse(LINE.replace(rb"/mnt\040x", shown))
    assert os.fsencode(mount.path) == path


PARSERS: Final = [
    units.parse_size, units.parse_duration_s, units.parse_address, units.parse_host, units.parse_url, units.parse_mode,
]  # fmt: skip
SETTINGS: Final = st.one_of(
    st.text(max_size=20),
    st.sampled_from([
        "9" * 5000, "9" * 5000 + "GiB", "1e999s", "-1s", "٣s", "1" + "0" * 17 + "PiB", "[::1]:" + "9" * 5000, "h:65536",
        "kvstore://h:1,[::]:2/" + "x" * 5000, "kvstore://" + "h:1," * 1000, "0o777", "7" * 400, "h:٣", "[" * 5000,
    ]),
    mangled(st.sampled_from([b"1.5GiB", b"250ms", b"h:1", b"kvstore://h:1/r", b"0666"])).map(os.fsdecode),
)  # fmt: skip


@fuzz(500)
@given(SETTINGS)
def test_any_text_is_a_setting_or_refused_in_one_line(text: str) -> None:
    for parse in PARSERS:
        refusal = ""
        try:
            parse(text)
        except InvalidRequest as error:
            refusal = error.message
        assert "\n" not in refusal
