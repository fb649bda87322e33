"""The kernel's structs, byte for byte."""

from __future__ import annotations

import errno
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keeper import wire
from kvstore.keeper.wire import Op

name_bytes = st.binary(min_size=1, max_size=255).filter(lambda b: b"\0" not in b)


def request(opcode: int, body: bytes, inode: int = 7, unique: int = 10) -> bytes:
    return wire.IN_HEAD.pack(wire.IN_HEAD.size + len(body), opcode, unique, inode, 1, 2, 3, 0, 0) + body


def init_request(flags: int = 1 << 30, flags2: int = 1 << 5) -> bytes:
    return request(Op.INIT, struct.pack("<IIIII44x", 7, 45, 1 << 17, flags, flags2))


def test_heads() -> None:
    assert wire.IN_HEAD.size == 40
    assert wire.OUT_HEAD.size == 16
    assert wire.OPEN_OUT.size == 16
    assert (wire.OPENED_AT, wire.OPENED_SIZE) == (16, 32)
    assert (wire.CREATED_AT, wire.CREATED_SIZE) == (144, 160)
    assert wire.reply(5, errno.EIO) == struct.pack("<IiQ", 16, -5, 5)
    assert wire.reply(5, 0, b"ab") == struct.pack("<IiQ", 18, 0, 5) + b"ab"


def test_init_is_patched_byte_for_byte() -> None:
    before = bytes(wire.init_reply(10))
    message = bytearray(before)
    wire.patch_init(init_request(), memoryview(message))
    expected = bytearray(before)
    expected[28:32] = struct.pack("<I", 1 << 30 | 1 << 28 | 1 << 18)
    expected[48:52] = struct.pack("<I", 1 << 5)
    expected[52:56] = struct.pack("<I", 1)
    assert message == expected
    assert len(message) == 80


def test_what_libfuse_negotiated_stays() -> None:
    message = wire.init_reply(10)
    message[28:32] = struct.pack("<I", 0x4040B039 & ~(1 << 30))
    wire.patch_init(init_request(), memoryview(message))
    assert struct.unpack_from("<I", message, 28)[0] == 0x4040B039 | 1 << 28 | 1 << 18


@pytest.mark.parametrize(
    "old", [init_request(flags2=0), init_request(flags=0), init_request()[: wire.BODY_AT + 16], b""]
)
def test_an_old_kernel_gets_what_the_file_system_said(old: bytes) -> None:
    message = wire.init_reply(10)
    wire.patch_init(old, memoryview(message))
    assert message == wire.init_reply(10)
    assert not wire.offers_passthrough(old)


def test_a_short_init_reply_is_left_alone() -> None:
    short = bytearray(wire.reply(10, 0, bytes(24)))
    wire.patch_init(init_request(), memoryview(short))
    assert short == wire.reply(10, 0, bytes(24))


def test_last_answers() -> None:
    assert wire.last_answer(4, Op.FLUSH) == wire.reply(4, errno.EIO)
    assert wire.last_answer(4, Op.GETXATTR) == wire.reply(4, errno.EIO)
    assert wire.last_answer(4, Op.RELEASE) == wire.reply(4, 0)
    assert wire.last_answer(4, Op.RELEASEDIR) == wire.reply(4, 0)


@given(handle=st.integers(0, 2**64 - 1), inode=st.integers(1, 2**64 - 1), directory=st.booleans())
def test_a_release_of_ours_reads_like_the_kernel_s(handle: int, inode: int, directory: bool) -> None:
    message = wire.release(9, inode, handle, directory=directory)
    size, opcode, unique, of = wire.IN_START.unpack_from(message)
    assert (size, unique, of) == (len(message), 9, inode)
    assert opcode == (Op.RELEASEDIR if directory else Op.RELEASE)
    assert wire.released_handle(message) == handle
    assert len(message) == wire.IN_HEAD.size + 24


def test_with_unique() -> None:
    assert wire.with_unique(request(Op.LOOKUP, b"x\0", unique=10), 99) == request(Op.LOOKUP, b"x\0", unique=99)


def test_flags() -> None:
    opened = request(Op.OPEN, struct.pack("<II", os.O_RDWR | os.O_TRUNC, 0))
    assert wire.open_flags(opened) == os.O_RDWR | os.O_TRUNC
    assert wire.only_reads(os.O_RDONLY | os.O_NONBLOCK)
    for changing in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
        assert not wire.only_reads(changing)
    for flags, appends in ((os.O_WRONLY, False), (os.O_WRONLY | os.O_APPEND, True)):
        body = struct.pack("<QQIIQII", 1, 0, 3, 0, 0, flags, 0) + b"abc"
        assert wire.appends(request(Op.WRITE, body)) == appends


def test_xattr_name() -> None:
    assert wire.xattr_name(request(Op.GETXATTR, struct.pack("<II", 0, 0) + b"user.a\0")) == b"user.a"


@given(name=name_bytes, new=name_bytes, parent=st.integers(1, 2**64 - 1))
def test_names(name: bytes, new: bytes, parent: int) -> None:
    one = {
        Op.CREATE: struct.pack("<IIII", 1, 2, 3, 4),
        Op.MKNOD: struct.pack("<IIII", 1, 2, 3, 4),
        Op.MKDIR: struct.pack("<II", 1, 2),
        Op.LINK: struct.pack("<Q", parent),
        Op.UNLINK: b"",
        Op.RMDIR: b"",
    }
    for opcode, fixed in one.items():
        assert wire.names(opcode, request(opcode, fixed + name + b"\0")) == (name, 0, b"")
    both = name + b"\0" + new + b"\0"
    assert wire.names(Op.SYMLINK, request(Op.SYMLINK, both)) == (name, 0, new)
    assert wire.names(Op.RENAME, request(Op.RENAME, struct.pack("<Q", parent) + both)) == (name, parent, new)
    rename2 = request(Op.RENAME2, struct.pack("<QII", parent, 1, 0) + both)
    assert wire.names(Op.RENAME2, rename2) == (name, parent, new)
    assert set(one) | {Op.SYMLINK, Op.RENAME, Op.RENAME2} == wire.CHANGES_NAMES
