"""The relay when something ends: a caller, a deadline, a file system process."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from kvstore.keeper import relay as relay_module
from kvstore.keeper import wire
from kvstore.keeper.channel import Again, Open
from kvstore.keeper.wire import Op
from tests.support.relay_world import DIRECTORY, FILE, INIT_IN, PASS, World, entry, release_in


@pytest.fixture
def world() -> World:
    return World()


# Replies that the kernel does not take.


def opened_by_process(world: World, opcode: int) -> int:
    """The kernel asks, the process answers with a handle; its unique."""
    if opcode == Op.CREATE:
        unique = world.ask(opcode, DIRECTORY, bytes(16) + b"f\0")
        world.answer(unique, entry(FILE) + wire.OPEN_OUT.pack(PASS, 0, 0))
    else:
        unique = world.ask(opcode, FILE, bytes(8))
        world.answer(unique, wire.OPEN_OUT.pack(PASS, 0, 0))
    return unique


def assert_undone(world: World, opcode: int) -> None:
    """The process was told to close the handle, and its answer goes nowhere."""
    message = world.fs[-1]
    unique = wire.IN_START.unpack_from(message)[2]
    assert message == wire.release(unique, FILE, PASS, directory=opcode == Op.OPENDIR)
    before = list(world.kernel)
    world.answer(unique)
    assert world.kernel == before
    assert len(world.relay.handles) == 0
    assert world.ids == {}


@pytest.mark.parametrize("opcode", [Op.OPEN, Op.CREATE, Op.OPENDIR])
def test_an_open_that_nobody_waits_for_is_undone(world: World, opcode: int) -> None:
    world.offers = [] if opcode == Op.OPENDIR else [(FILE, 9)]
    world.refuse = [errno.ENOENT]
    opened_by_process(world, opcode)
    assert world.kernel == []
    assert_undone(world, opcode)


@pytest.mark.allow_errors("the kernel refused a reply of 32 bytes: EINVAL")
def test_a_reply_that_the_kernel_refuses_becomes_eio(world: World) -> None:
    world.offers, world.refuse = [(FILE, 9)], [errno.EINVAL]
    unique = opened_by_process(world, Op.OPEN)
    assert world.said(unique) == (errno.EIO, b"")
    assert_undone(world, Op.OPEN)


def test_other_replies_that_nobody_waits_for_are_dropped(world: World) -> None:
    world.refuse = [errno.ENOENT]
    unique = world.ask(Op.GETATTR)
    world.answer(unique, b"x")
    assert world.kernel == []
    assert len(world.fs) == 1


def test_unasked_replies_are_dropped(world: World) -> None:
    world.answer(4711, b"x")
    assert world.kernel == []
    assert world.relay.counts.late == 1


# Deadlines.


def test_what_waits_too_long_is_answered(world: World) -> None:
    world.init()
    old = {op: world.ask(op, body=bytes(40)) for op in (Op.FLUSH, Op.GETXATTR, Op.WRITE, Op.STATFS)}
    world.open(4)
    closing = world.ask(Op.RELEASE, FILE, release_in(4))
    world.now_s = 1.0
    young = world.ask(Op.GETATTR)
    assert world.relay.expire(1.0, 1.0) == len(old) + 1
    for unique in old.values():
        assert world.said(unique) == (errno.EIO, b"")
    assert world.said(closing) == (0, b"")
    assert world.relay.table().opens == []
    assert list(world.relay.pending) == [young]
    assert world.relay.counts.answered_eio == len(old)
    for unique in [*old.values(), closing]:
        world.answer(unique, b"late")
    assert world.relay.counts.late == len(old) + 1
    assert world.said(closing) == (0, b"")


def test_init_is_never_given_up(world: World) -> None:
    unique = world.ask(Op.INIT, 0, INIT_IN)
    world.ask(Op.GETATTR)
    assert world.relay.expire(100.0, 1.0) == 1
    assert list(world.relay.pending) == [unique]


@pytest.mark.parametrize("opcode", [Op.OPEN, Op.CREATE, Op.OPENDIR])
def test_a_late_open_is_undone(world: World, opcode: int) -> None:
    create = opcode == Op.CREATE
    unique = world.ask(opcode, DIRECTORY if create else FILE, bytes(16) + b"f\0" if create else bytes(8))
    world.relay.expire(5.0, 1.0)
    world.offers = [] if opcode == Op.OPENDIR else [(FILE, 9)]
    body = wire.OPEN_OUT.pack(PASS, 0, 0)
    world.answer(unique, entry(FILE) + body if create else body)
    assert_undone(world, opcode)
    assert world.said(unique) == (errno.EIO, b"")
    assert world.backing.offers == 0


def test_a_late_failure_needs_no_undoing(world: World) -> None:
    unique = world.ask(Op.OPEN, FILE, bytes(8))
    world.relay.expire(5.0, 1.0)
    sent = list(world.fs)
    world.answer(unique, error=errno.ENOENT)
    assert world.fs == sent


def test_late_ones_are_bounded(world: World) -> None:
    for _ in range(relay_module.MAX_LATE + 10):
        world.ask(Op.OPEN, FILE, bytes(8))
    world.relay.expire(5.0, 1.0)
    sent = len(world.fs)
    world.answer(2, wire.OPEN_OUT.pack(4, 0, 0))  # the oldest, forgotten
    assert len(world.fs) == sent
    world.answer(2 * relay_module.MAX_LATE, wire.OPEN_OUT.pack(4, 0, 0))
    assert len(world.fs) == sent + 1


def test_while_nobody_serves_all_is_answered_at_once(world: World) -> None:
    world.offers = [(FILE, 9)]
    world.open()
    sent = list(world.fs)
    world.relay.failing = True
    assert world.said(world.ask(Op.LOOKUP)) == (errno.EIO, b"")
    assert world.said(world.ask(Op.FLUSH)) == (errno.EIO, b"")
    assert world.said(world.ask(Op.RELEASE, FILE, release_in(PASS))) == (0, b"")
    assert world.ids == {}
    assert world.relay.table().opens == []
    assert not world.relay.pending
    assert world.fs == sent
    world.relay.resume()
    world.ask(Op.LOOKUP)
    assert len(world.fs) == len(sent) + 1


# One process after another.


def test_all_is_sent_again_in_order(world: World) -> None:
    world.init()
    bodies = {
        Op.LOOKUP: b"a\0",
        Op.CREATE: bytes(16) + b"b\0",
        Op.RENAME: struct.pack("<Q", 9) + b"c\0d\0",
        Op.SETATTR: bytes(88),
        Op.UNLINK: b"e\0",
        Op.READ: bytes(40),
    }
    for opcode, body in bodies.items():
        world.ask(opcode, DIRECTORY, body)
    answered = world.ask(Op.GETATTR)
    world.answer(answered, b"x")
    sent, world.fs = world.fs[1:-1], []
    world.relay.process_ended()
    assert world.relay.table().again == [
        Again(Op.CREATE, DIRECTORY, b"b", 0, b""),
        Again(Op.RENAME, DIRECTORY, b"c", 9, b"d"),
        Again(Op.UNLINK, DIRECTORY, b"e", 0, b""),
    ]
    world.relay.resume()
    assert world.fs[1:] == sent
    assert world.relay.counts.resent == len(sent)
    world.answer(2 + 2, b"entry")
    assert world.said(4) == (0, b"entry")


def test_what_cannot_be_repeated_gets_eio(world: World) -> None:
    def write(flags: int, size: int) -> int:
        return world.ask(Op.WRITE, FILE, struct.pack("<QQIIQII", 3, 0, size, 0, 0, flags, 0) + bytes(size))

    plain, appending, large = write(os.O_WRONLY, 8), write(os.O_WRONLY | os.O_APPEND, 8), write(os.O_WRONLY, 1 << 20)
    attribute = world.ask(Op.SETATTR, FILE, bytes(relay_module.MAX_KEPT_BYTES))
    world.fs.clear()
    world.relay.resume()
    assert list(world.relay.pending) == [plain, large]
    assert len(world.fs) == 2
    for unique in (appending, attribute):
        assert world.said(unique) == (errno.EIO, b"")


@pytest.mark.allow_errors("cannot be sent again")
def test_one_that_cannot_be_sent_again_keeps_no_other_from_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = world.ask(Op.LOOKUP, 1, b"a\0"), world.ask(Op.LOOKUP, 1, b"b\0")
    sent = []

    def no_memory_once(message: bytes) -> None:
        sent.append(message)
        if len(sent) == 1:
            raise OSError(errno.ENOBUFS, "no memory")

    monkeypatch.setattr(world, "to_fs", no_memory_once)
    world.relay.resume()
    assert world.said(first) == (errno.EIO, b"")
    assert list(world.relay.pending) == [second]
    assert len(sent) == 2


def test_handles_and_ids_outlive_a_process(world: World) -> None:
    world.init()
    world.offers = [(FILE, 9)]
    world.open()
    world.relay.process_ended()
    world.relay.resume()
    assert world.open(PASS + 1) == (wire.FOPEN_PASSTHROUGH, 1)
    world.release(PASS)
    world.release(PASS + 1)
    assert world.ids == {}


def test_a_close_under_way_is_sent_again_with_its_handle(world: World) -> None:
    world.init()
    world.open()
    closing = world.ask(Op.RELEASE, FILE, release_in(PASS))
    world.relay.process_ended()
    assert world.relay.table().opens == [Open(PASS, FILE, False)]
    world.relay.resume()
    assert wire.IN_START.unpack_from(world.fs[-1])[2] == closing
    world.answer(closing)
    assert world.relay.table().opens == []


def test_a_dead_process_leaves_no_offers_and_no_expectations(world: World) -> None:
    unique = world.ask(Op.OPEN, FILE, bytes(8))
    world.relay.expire(5.0, 1.0)
    world.backing.offer(FILE, 9, 0.0)
    world.relay.process_ended()
    assert world.closed == [9]
    sent = len(world.fs)
    world.answer(unique, wire.OPEN_OUT.pack(PASS, 0, 0))
    assert len(world.fs) == sent


def test_init_that_was_never_answered_is_sent_as_it_came(world: World) -> None:
    unique = world.ask(Op.INIT, 0, INIT_IN)
    first = list(world.fs)
    world.relay.process_ended()
    world.relay.resume()
    assert world.fs == first * 2
    world.answer(unique, bytes(wire.init_reply(0)[16:]))
    assert world.said(unique)[0] == 0


def test_fail_answers_in_any_state(world: World) -> None:
    unique = world.ask(Op.LOOKUP)
    world.relay.fail(unique)
    assert world.said(unique) == (errno.EIO, b"")
    world.relay.fail(4711)
    assert world.said(4711) == (errno.EIO, b"")
    before = list(world.kernel)
    for not_the_kernel_s in (0, 1 << 63):
        world.relay.fail(not_the_kernel_s)
    assert world.kernel == before
