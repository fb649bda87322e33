"""What happens to each FUSE message between the kernel and the file system process. Pure: no fd, socket or clock.

It notes every request until it is answered, turns OPEN and CREATE replies into passthrough ones, remembers the handles
that the kernel holds, answers what has waited too long, and sends again what a dead process left unanswered.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol

from kvstore.keeper import wire
from kvstore.keeper.backing import BackingFiles
from kvstore.keeper.channel import PASSTHROUGH_BIT, Again, Table
from kvstore.keeper.handles import Handles
from kvstore.keeper.wire import Op

log = logging.getLogger(__name__)

MAX_KEPT_BYTES: Final = 64 * 1024
"""Of a request that is no WRITE; nothing but an xattr or an ioctl is longer."""
MAX_LATE: Final = 4096
"""Requests answered by us whose own answer is still to come."""
_FIRST_OWN_UNIQUE: Final = 1 << 63
"""The kernel counts up from 2."""
_SECURITY_CAPABILITY: Final = b"security.capability"
"""Asked before every write. We have none."""


class Request(NamedTuple):
    """One that the kernel waits for."""

    opcode: int
    inode: int
    raw: bytes | None
    """The whole message. None: too long to be kept, so it cannot be sent again."""
    arrived_s: float


class Outlets(Protocol):
    """Where messages go."""

    def to_kernel(self, message: bytes | memoryview) -> int:
        """Write a reply; the errno that the kernel gave, 0 for success."""

    def to_fs(self, message: bytes) -> None:
        """Send it, or keep it until there is room. Raises OSError."""

    def notify(self, message: bytes) -> None:
        """A notification for the kernel. It may block there, so not on this thread."""

    def read_offers(self) -> None:
        """Bring in all offers that the file system process has made so far."""


class Counts:
    """Since the start, for people."""

    __slots__ = ("answered_eio", "late", "requests", "resent")

    def __init__(self) -> None:
        self.requests = self.answered_eio = self.late = self.resent = 0


class Relay:
    """`failing`: nobody serves and nobody did for too long, so requests are answered at once."""

    def __init__(self, outlets: Outlets, backing: BackingFiles) -> None:
        self._out, self._backing = outlets, backing
        self.pending: dict[int, Request] = {}
        """By unique, in order of arrival."""
        self.handles = Handles(backing)
        self.failing = False
        self.counts = Counts()
        self._late: dict[int, Request] = {}
        self._own: dict[int, str] = {}
        """Requests of ours under way to the file system process; their replies are swallowed."""
        self._own_uniques = itertools.count(_FIRST_OWN_UNIQUE, 2)
        self._init_request = b""
        self._init_reply = b""
        self._finish: Final[dict[int, Callable[[int, Request, memoryview], None]]] = {
            Op.INIT: self._initialized,
            Op.OPEN: self._opened,
            Op.CREATE: self._created,
            Op.OPENDIR: self._opened_directory,
        }

    # From the kernel.

    def request(self, raw: bytes, now_s: float) -> None:
        size, opcode, unique, inode = wire.IN_START.unpack_from(raw)
        if opcode in wire.NO_REPLY:
            return
        self.counts.requests += 1
        if opcode == Op.GETXATTR and wire.xattr_name(raw) == _SECURITY_CAPABILITY:
            self._out.to_kernel(wire.reply(unique, errno.ENODATA))
            return
        if opcode == Op.RELEASE:
            self.handles.drop_backing(raw)
        elif opcode == Op.INIT:
            self._init_request = raw
        kept = raw if size <= MAX_KEPT_BYTES or opcode == Op.WRITE else None
        request = Request(opcode, inode, kept, now_s)
        if self.failing:
            self._give_up(unique, request)
            return
        self.pending[unique] = request
        self._out.to_fs(raw)

    # From the file system process.

    def reply(self, message: memoryview) -> None:
        """One reply or notification; changed in place."""
        _, error, unique = wire.OUT_HEAD.unpack_from(message)
        if unique == 0:
            self._out.notify(bytes(message))
            return
        request = self.pending.pop(unique, None)
        if request is None:
            self._not_awaited(unique, error, message)
            return
        opcode = request.opcode
        if opcode in (Op.RELEASE, Op.RELEASEDIR):
            assert request.raw is not None
            self.handles.forget(request.raw)
        finish = self._finish.get(opcode)
        if finish is not None and error == 0:
            finish(unique, request, message)
        else:
            self._to_kernel(unique, message)

    def _to_kernel(self, unique: int, message: memoryview | bytes) -> bool:
        """Whether the kernel took it. ENOENT is in order: the one who asked was killed."""
        code = self._out.to_kernel(message)
        if code == 0:
            return True
        if code != errno.ENOENT:
            log.error("the kernel refused a reply of %d bytes: %s", len(message), errno.errorcode.get(code, code))
            self._out.to_kernel(wire.reply(unique, errno.EIO))
        return False

    def _initialized(self, unique: int, request: Request, message: memoryview) -> None:
        wire.patch_init(self._init_request, message)
        self._init_reply = bytes(message)
        self._to_kernel(unique, message)

    def _opened(self, unique: int, request: Request, message: memoryview) -> None:
        assert request.raw is not None
        flags = wire.open_flags(request.raw)
        self._add_file(unique, request.inode, message, wire.OPENED_AT, noflush=wire.only_reads(flags))

    def _created(self, unique: int, request: Request, message: memoryview) -> None:
        # Its close is always told (no NOFLUSH): it publishes the new file.
        self._add_file(unique, wire.entry_inode(message), message, wire.CREATED_AT, noflush=False)

    def _add_file(self, unique: int, inode: int, message: memoryview, at: int, *, noflush: bool) -> None:
        number, flags, backing_id = wire.OPEN_OUT.unpack_from(message, at)
        backed = False
        if number & PASSTHROUGH_BIT:
            self._out.read_offers()
            backing_id = self._backing.acquire(inode)
            backed = backing_id != 0
            # The kernel allows no other flag beside PASSTHROUGH.
            flags = wire.FOPEN_PASSTHROUGH if backed else wire.FOPEN_DIRECT_IO
        if noflush:
            flags |= wire.FOPEN_NOFLUSH
        wire.OPEN_OUT.pack_into(message, at, number, flags, backing_id)
        if self._to_kernel(unique, message):
            self.handles.add_file(number, inode, backed=backed)
            return
        if backed:
            self._backing.release(inode)
        self._close(inode, number, directory=False)

    def _opened_directory(self, unique: int, request: Request, message: memoryview) -> None:
        number = wire.OPEN_OUT.unpack_from(message, wire.OPENED_AT)[0]
        if self._to_kernel(unique, message):
            self.handles.add_directory(number, request.inode)
        else:
            self._close(request.inode, number, directory=True)

    def _close(self, inode: int, number: int, *, directory: bool) -> None:
        """Tell the file system process that nobody has the handle that it gave out."""
        unique = self._own_request("release")
        self._out.to_fs(wire.release(unique, inode, number, directory=directory))

    def _own_request(self, what: str) -> int:
        unique = next(self._own_uniques)
        self._own[unique] = what
        return unique

    def _not_awaited(self, unique: int, error: int, message: memoryview) -> None:
        own = self._own.pop(unique, None)
        if own == "init":
            self._compare_init(message)
        if own is not None:
            return
        self.counts.late += 1
        request = self._late.pop(unique, None)
        if request is not None and error == 0:
            self._undo_late(request, message)

    def _undo_late(self, request: Request, message: memoryview) -> None:
        """An open that came after we had said EIO."""
        inode = request.inode
        if request.opcode == Op.CREATE:
            inode, at = wire.entry_inode(message), wire.CREATED_AT
        elif request.opcode in (Op.OPEN, Op.OPENDIR):
            at = wire.OPENED_AT
        else:
            return
        number = wire.OPEN_OUT.unpack_from(message, at)[0]
        directory = request.opcode == Op.OPENDIR
        if number & PASSTHROUGH_BIT and not directory:
            self._out.read_offers()
            self._backing.withdraw(inode)
        self._close(inode, number, directory=directory)

    def _compare_init(self, message: memoryview) -> None:
        wire.patch_init(self._init_request, message)
        if message[wire.OUT_HEAD.size :] != self._init_reply[wire.OUT_HEAD.size :]:
            log.warning("the new file system process wants other FUSE settings; the first ones hold until the unmount")

    # Answers of our own.

    def fail(self, unique: int) -> None:
        """One message could not be relayed: whoever waits gets EIO."""
        request = self.pending.pop(unique, None)
        if request is not None:
            self._give_up(unique, request)
            self._expect_late(unique, request)
        elif 0 < unique < _FIRST_OWN_UNIQUE:
            self._out.to_kernel(wire.reply(unique, errno.EIO))

    def expire(self, now_s: float, limit_s: float) -> int:
        """Answer all requests that have waited for `limit_s`; how many there were."""
        expired = []
        for unique, request in self.pending.items():
            if now_s - request.arrived_s < limit_s:
                break
            if request.opcode != Op.INIT:  # an error there would end the mount
                expired.append(unique)
        for unique in expired:
            request = self.pending.pop(unique)
            self._give_up(unique, request)
            self._expect_late(unique, request)
        return len(expired)

    def _expect_late(self, unique: int, request: Request) -> None:
        self._late[unique] = request._replace(raw=None)
        if len(self._late) > MAX_LATE:
            del self._late[next(iter(self._late))]

    def _give_up(self, unique: int, request: Request) -> None:
        answer = wire.last_answer(unique, request.opcode)
        if request.opcode in (Op.RELEASE, Op.RELEASEDIR):
            assert request.raw is not None
            self.handles.forget(request.raw)
        else:
            self.counts.answered_eio += 1
        self._out.to_kernel(answer)

    # One process after another.

    def process_ended(self) -> None:
        """All its replies are read. What it has not answered stays pending."""
        self._late.clear()
        self._own.clear()
        self._backing.clear_offers()

    def table(self) -> Table:
        """What the next process is told."""
        return Table(self.handles.all(), list(self._again()))

    def _again(self) -> Iterator[Again]:
        for request in self.pending.values():
            if request.raw is not None and request.opcode in wire.CHANGES_NAMES:
                yield Again(request.opcode, request.inode, *wire.names(request.opcode, request.raw))

    def resume(self) -> None:
        """A process has taken over: it gets INIT, and what its predecessor left unanswered."""
        self.failing = False
        if self._init_reply:
            self._out.to_fs(wire.with_unique(self._init_request, self._own_request("init")))
        for unique, request in list(self.pending.items()):
            if not self._repeat(request):
                del self.pending[unique]
                self._give_up(unique, request)

    def _repeat(self, request: Request) -> bool:
        """False: it cannot be sent a second time."""
        if request.raw is None or (request.opcode == Op.WRITE and wire.appends(request.raw)):
            return False
        try:
            self._out.to_fs(request.raw)
        except OSError as error:
            log.error("a request (opcode %d) cannot be sent again: %s", request.opcode, error)
            return False
        self.counts.resent += 1
        return True
