"""The relay: what becomes of every message, without a kernel or a process."""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.keeper import relay as relay_module
from kvstore.keeper import wire
from kvstore.keeper.backing import BackingFiles
from kvstore.keeper.channel import PASSTHROUGH_BIT, Again, Open
from kvstore.keeper.relay import Relay
from kvstore.keeper.wire import Op

FILE, DIRECTORY, BLOCK = 5, 1, 77
PASS = PASSTHROUGH_BIT | 3
INIT_IN = struct.pack("<IIIII44x", 7, 45, 1 << 17, 1 << 30, 1 << 5)


class World:
    """Both sides of a relay, and the ioctls. `offers`: what the process sends before its next passthrough reply."""

    def __init__(self) -> None:
        self.kernel: list[bytes] = []
        self.fs: list[bytes] = []
        self.notified: list[bytes] = []
        self.refuse: list[int] = []
        """errnos for the next replies."""
        self.offers: list[tuple[int, int]] = []
        """(inode, fd)"""
        self.ids: Counter[int] = Counter()
        self.open_error = 0
        self.closed: list[int] = []
        self.backing = BackingFiles(self._open_id, self._close_id, self.closed.append)
        self.relay = Relay(self, self.backing)
        self.now_s = 0.0
        self._unique = 0
        self._id = 0

    def _open_id(self, fd: int) -> int:
        if self.open_error:
            raise OSError(self.open_error, "refused")
        self._id += 1
        self.ids[self._id] += 1
        return self._id

    def _close_id(self, id: int) -> None:
        del self.ids[id]

    def to_kernel(self, message: bytes | memoryview) -> int:
        code = self.refuse.pop(0) if self.refuse else 0
        if code == 0:
            self.kernel.append(bytes(message))
        return code

    def to_fs(self, message: bytes) -> None:
        self.fs.append(message)

    def notify(self, message: bytes) -> None:
        self.notified.append(message)

    def read_offers(self) -> None:
        while self.offers:
            self.backing.offer(*self.offers.pop(0), self.now_s)

    # The two sides.

    def ask(self, opcode: int, inode: int = FILE, body: bytes = b"") -> int:
        """A request of the kernel; its unique."""
        self._unique += 2
        head = wire.IN_HEAD.pack(wire.IN_HEAD.size + len(body), opcode, self._unique, inode, 0, 0, 0, 0, 0)
        self.relay.request(head + body, self.now_s)
        return self._unique

    def answer(self, unique: int, body: bytes = b"", error: int = 0) -> None:
        self.relay.reply(memoryview(bytearray(wire.reply(unique, error, body))))

    def said(self, unique: int) -> tuple[int, bytes]:
        """(errno, body) of the one reply that the kernel got."""
        replies = [m for m in self.kernel if wire.OUT_HEAD.unpack_from(m)[2] == unique]
        assert len(replies) == 1, f"{len(replies)} replies"
        size, error, _ = wire.OUT_HEAD.unpack_from(replies[0])
        assert size == len(replies[0])
        return -error, replies[0][wire.OUT_HEAD.size :]

    # Whole calls.

    def open(self, number: int = PASS, inode: int = FILE, flags: int = os.O_RDWR, fopen: int = 2) -> tuple[int, int]:
        """(FOPEN flags, backing id) that the kernel got."""
        unique = self.ask(Op.OPEN, inode, struct.pack("<II", flags, 0))
        self.answer(unique, wire.OPEN_OUT.pack(number, fopen, 0))
        error, body = self.said(unique)
        got, fopen, backing_id = wire.OPEN_OUT.unpack(body)
        assert (error, got) == (0, number)
        return fopen, backing_id

    def release(self, number: int = PASS, inode: int = FILE) -> None:
        unique = self.ask(Op.RELEASE, inode, release_in(number))
        self.answer(unique)
        assert self.said(unique) == (0, b"")

    def init(self) -> None:
        unique = self.ask(Op.INIT, 0, INIT_IN)
        self.answer(unique, bytes(wire.init_reply(0)[16:]))


def release_in(number: int) -> bytes:
    return struct.pack("<QIIQ", number, 0, 0, 0)


def entry(inode: int) -> bytes:
    return struct.pack("<Q", inode) + bytes(wire.ENTRY_SIZE - 8)


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


class AnyOrder(RuleBasedStateMachine):
    """Opens, closes, deadlines, deaths in any order: every request gets exactly one answer, and ids match handles."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.init()
        self.asked: list[int] = [2]
        self.waiting: dict[int, int] = {}
        """At the process: unique → opcode; those that we gave up included."""
        self.open: dict[int, int] = {}
        """Handles of the kernel → inode."""
        self.next_handle = 0

    def _ask(self, opcode: int, inode: int, body: bytes) -> None:
        unique = self.world.ask(opcode, inode, body)
        self.asked.append(unique)
        if unique in self.world.relay.pending:
            self.waiting[unique] = opcode

    @rule(inode=st.integers(10, 12))
    def ask_open(self, inode: int) -> None:
        self._ask(Op.OPEN, inode, struct.pack("<II", os.O_RDWR, 0))

    @rule()
    def ask_lookup(self) -> None:
        self._ask(Op.LOOKUP, DIRECTORY, b"x\0")

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def ask_release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        self._ask(Op.RELEASE, self.open.pop(number), release_in(number))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), passthrough=st.booleans(), offered=st.booleans(), taken=st.booleans())
    def reply(self, data: st.DataObject, passthrough: bool, offered: bool, taken: bool) -> None:
        unique = data.draw(st.sampled_from(sorted(self.waiting)))
        opcode = self.waiting.pop(unique)
        if opcode != Op.OPEN:
            self.world.answer(unique)
            return
        request = self.world.relay.pending.get(unique)
        self.next_handle += 1
        number = self.next_handle | (PASSTHROUGH_BIT if passthrough else 0)
        if passthrough and offered and request:
            self.world.offers = [(request.inode, self.next_handle)]
        if request and not taken:
            self.world.refuse = [errno.ENOENT]
            self.asked.remove(unique)  # its caller is gone, there is no answer
        self.world.answer(unique, wire.OPEN_OUT.pack(number, 0, 0))
        if request and taken:
            self.open[number] = request.inode

    @rule(s=st.integers(0, 3))
    def time_passes(self, s: int) -> None:
        self.world.now_s += s
        self.world.relay.expire(self.world.now_s, 2.0)

    @rule(long=st.booleans())
    def process_dies(self, long: bool) -> None:
        self.world.relay.process_ended()
        if long:
            self.world.relay.failing = True
            self.world.relay.expire(self.world.now_s, 0.0)
        self.waiting = {u: r.opcode for u, r in self.world.relay.pending.items()}
        if not long:
            self.world.relay.resume()

    @rule()
    def process_comes(self) -> None:
        self.world.relay.resume()

    @invariant()
    def one_answer_each(self) -> None:
        answered = Counter(wire.OUT_HEAD.unpack_from(m)[2] for m in self.world.kernel)
        assert set(answered.values()) <= {1}
        assert set(answered) | set(self.world.relay.pending) >= set(self.asked)

    @invariant()
    def the_kernel_s_handles_are_known(self) -> None:
        known = {o.handle: o.inode for o in self.world.relay.table().opens}
        assert self.open.items() <= known.items()

    @invariant()
    def ids_belong_to_open_inodes(self) -> None:
        inodes = {inode for number, inode in self.open.items() if number & PASSTHROUGH_BIT}
        assert len(self.world.ids) == len(self.world.backing) <= len(inodes)


TestAnyOrder = AnyOrder.TestCase
