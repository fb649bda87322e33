"""The relay under any order of opens, closes, deadlines and deaths."""

from __future__ import annotations

import errno
import os
import struct
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.keeper import wire
from kvstore.keeper.channel import PASSTHROUGH_BIT
from kvstore.keeper.wire import Op
from tests.support.relay_world import DIRECTORY, World, release_in


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
