"""The relay: what becomes of every message, without a kernel or a process."""

from __future__ import annotations

import errno
import logging
import os
import struct

import pytest

from kvstore.keeper import wire
from kvstore.keeper.channel import Open
from kvstore.keeper.wire import Op
from tests.support.relay_world import BLOCK, DIRECTORY, FILE, PASS, World, entry, release_in


@pytest.fixture
def world() -> World:
    return World()


# Requests and replies.


def test_a_request_goes_there_and_back_unchanged(world: World) -> None:
    unique = world.ask(Op.LOOKUP, 1, b"name\0")
    assert world.fs == [wire.IN_HEAD.pack(45, Op.LOOKUP, unique, 1, 0, 0, 0, 0, 0) + b"name\0"]
    assert list(world.relay.pending) == [unique]
    world.answer(unique, b"entry")
    assert world.kernel == [wire.reply(unique, 0, b"entry")]
    assert not world.relay.pending


def test_errors_pass(world: World) -> None:
    for opcode, body in ((Op.OPEN, bytes(8)), (Op.CREATE, bytes(16) + b"x\0"), (Op.OPENDIR, bytes(8)), (Op.INIT, b"")):
        unique = world.ask(opcode, body=body)
        world.answer(unique, error=errno.EACCES)
        assert world.said(unique) == (errno.EACCES, b"")
    assert len(world.relay.handles) == 0


def test_what_nobody_waits_for_is_dropped(world: World) -> None:
    for opcode in (Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT, Op.NOTIFY_REPLY):
        world.ask(opcode, body=bytes(16))
    assert world.fs == world.kernel == []
    assert not world.relay.pending
    assert world.relay.counts.requests == 0


def test_capabilities_are_answered_here(world: World) -> None:
    ours = world.ask(Op.GETXATTR, body=bytes(8) + b"security.capability\0")
    assert world.said(ours) == (errno.ENODATA, b"")
    assert world.fs == []
    for name in (b"security.capability2", b"user.x"):
        world.ask(Op.GETXATTR, body=bytes(8) + name + b"\0")
    assert len(world.fs) == 2


def test_notifications_go_aside(world: World) -> None:
    message = wire.OUT_HEAD.pack(16, 3, 0)
    world.relay.reply(memoryview(bytearray(message)))
    assert (world.notified, world.kernel) == ([message], [])


def test_init_is_patched_and_replayed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.init()
    patched = world.kernel[0]
    assert struct.unpack_from("<I", patched, 48)[0] & wire.PASSTHROUGH2
    request = world.fs.pop()
    world.relay.process_ended()
    world.relay.resume()
    (again,) = world.fs
    unique = wire.IN_START.unpack_from(again)[2]
    assert again == wire.with_unique(request, unique)
    assert unique >= 1 << 63
    world.answer(unique, bytes(wire.init_reply(0)[16:]))
    assert world.kernel == [patched]
    assert not caplog.records
    assert world.relay.counts.late == 0


def test_another_init_reply_is_logged_not_believed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.init()
    world.relay.process_ended()
    world.relay.resume()
    with caplog.at_level(logging.WARNING):
        world.answer(wire.IN_START.unpack_from(world.fs[-1])[2], bytes(wire.init_reply(0, max_write=4096)[16:]))
    assert "other FUSE settings" in caplog.text
    assert len(world.kernel) == 1


# Passthrough.


@pytest.mark.parametrize(
    ("flags", "noflush"),
    [(os.O_RDONLY, True), (os.O_RDWR, False), (os.O_WRONLY, False), (os.O_RDONLY | os.O_TRUNC, False)],
)
def test_open_by_passthrough(world: World, flags: int, noflush: bool) -> None:
    world.offers = [(FILE, 9)]
    expected = wire.FOPEN_PASSTHROUGH | (wire.FOPEN_NOFLUSH if noflush else 0)
    assert world.open(flags=flags) == (expected, 1)
    assert world.closed == [9]
    assert world.relay.table().opens == [Open(PASS, FILE, False)]


def test_other_opens_keep_their_flags(world: World) -> None:
    assert world.open(4, flags=os.O_RDONLY, fopen=wire.FOPEN_DIRECT_IO) == (
        wire.FOPEN_DIRECT_IO | wire.FOPEN_NOFLUSH,
        0,
    )
    assert world.open(5, flags=os.O_WRONLY, fopen=2) == (2, 0)
    assert world.relay.table().opens == [Open(4, FILE, False), Open(5, FILE, False)]


def test_create_by_passthrough(world: World) -> None:
    """The inode is in the reply; the close is always told, since it publishes."""
    world.offers = [(BLOCK, 9)]
    unique = world.ask(Op.CREATE, DIRECTORY, struct.pack("<4I", os.O_RDONLY | os.O_CREAT, 0o600, 0, 0) + b"f\0")
    world.answer(unique, entry(BLOCK) + wire.OPEN_OUT.pack(PASS, 2, 0))
    assert world.said(unique) == (0, entry(BLOCK) + wire.OPEN_OUT.pack(PASS, wire.FOPEN_PASSTHROUGH, 1))
    assert world.relay.table().opens == [Open(PASS, BLOCK, False)]


def test_one_id_for_all_handles_of_an_inode(world: World) -> None:
    for number in (PASS, PASS + 1):
        world.offers = [(FILE, 9 + number)]
        assert world.open(number)[1] == 1
    world.release(PASS)
    assert world.ids == {1: 1}
    world.release(PASS + 1)
    assert world.ids == {}
    assert len(world.relay.handles) == 0


def test_the_id_goes_with_the_request_the_handle_with_the_answer(world: World) -> None:
    world.offers = [(FILE, 9)]
    world.open()
    unique = world.ask(Op.RELEASE, FILE, release_in(PASS))
    assert world.ids == {}
    assert world.relay.table().opens == [Open(PASS, FILE, False)]
    world.answer(unique)
    assert world.relay.table().opens == []


@pytest.mark.parametrize("code", [errno.ELOOP, 0])
def test_without_a_backing_file_it_is_direct_io(world: World, code: int) -> None:
    if code:
        world.open_error, world.offers = code, [(FILE, 9)]
    assert world.open(flags=os.O_RDWR) == (wire.FOPEN_DIRECT_IO, 0)
    assert world.relay.table().opens == [Open(PASS, FILE, False)]
    world.release()
    assert world.closed == ([9] if code else [])


def test_a_live_id_needs_no_offer(world: World) -> None:
    world.offers = [(FILE, 9)]
    world.open(PASS)
    world.open_error = errno.ELOOP
    assert world.open(PASS + 1) == (wire.FOPEN_PASSTHROUGH, 1)


def test_directories_have_numbers_of_their_own(world: World) -> None:
    world.open(4)
    unique = world.ask(Op.OPENDIR, DIRECTORY, bytes(8))
    world.answer(unique, wire.OPEN_OUT.pack(4, 0, 0))
    assert world.said(unique) == (0, wire.OPEN_OUT.pack(4, 0, 0))
    assert world.relay.table().opens == [Open(4, FILE, False), Open(4, DIRECTORY, True)]
    world.answer(world.ask(Op.RELEASEDIR, DIRECTORY, release_in(4)))
    assert world.relay.table().opens == [Open(4, FILE, False)]
