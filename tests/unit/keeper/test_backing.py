"""Backing ids: one per inode, counted; offers used or closed."""

from __future__ import annotations

import errno
import logging
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.keeper import backing
from kvstore.keeper.backing import BackingFiles


class Kernel:
    """The two ioctls, and fds that are numbers."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}
        """id → fd it was opened with"""
        self.closed: Counter[int] = Counter()
        self.error = 0
        self._next = 0

    def open(self, fd: int) -> int:
        assert fd not in self.closed, "registered after its close"
        if self.error:
            raise OSError(self.error, "refused")
        self._next += 1
        self.ids[self._next] = fd
        return self._next

    def close(self, id: int) -> None:
        del self.ids[id]

    def close_fd(self, fd: int) -> None:
        self.closed[fd] += 1


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def files(kernel: Kernel) -> BackingFiles:
    return BackingFiles(kernel.open, kernel.close, kernel.close_fd)


def test_one_id_an_inode(kernel: Kernel, files: BackingFiles) -> None:
    for fd in (10, 11):
        files.offer(5, fd, 0.0)
        assert files.acquire(5) == 1
    assert kernel.ids == {1: 10}
    assert kernel.closed == {10: 1, 11: 1}
    files.release(5)
    assert len(files) == 1
    files.release(5)
    assert kernel.ids == {}
    assert len(files) == files.offers == 0


def test_without_an_offer_there_is_none(files: BackingFiles) -> None:
    assert files.acquire(5) == 0
    assert len(files) == 0


def test_an_offer_read_early_serves_the_reply_that_is_still_to_come(kernel: Kernel, files: BackingFiles) -> None:
    files.offer(5, 10, 0.0)
    files.offer(5, 11, 0.0)
    assert kernel.closed == {10: 1}
    assert files.acquire(5) == 1
    files.release(5)
    assert files.acquire(5) == 2
    assert kernel.ids == {2: 11}
    assert kernel.closed == {10: 1, 11: 1}


def test_a_refused_file_is_said_once_for_each_reason(
    kernel: Kernel, files: BackingFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for fd, code in enumerate((errno.ELOOP, errno.ELOOP, errno.EPERM), 10):
            kernel.error = code
            files.offer(5, fd, 0.0)
            assert files.acquire(5) == 0
    assert [r.getMessage().count("ELOOP") for r in caplog.records] == [1, 0]
    assert files.offers == 0
    kernel.error = 0
    files.offer(5, 9, 0.0)
    assert files.acquire(5) == 1


def test_offers_are_bounded_and_age(kernel: Kernel, files: BackingFiles) -> None:
    for inode in range(backing.MAX_OFFERS + 1):
        files.offer(inode, 1000 + inode, 0.0)
    assert files.offers == backing.MAX_OFFERS
    assert kernel.closed == {1000: 1}
    files.offer(7, 5000, 1.0)
    files.sweep(backing.OFFER_TTL_S)
    assert files.offers == backing.MAX_OFFERS
    files.sweep(backing.OFFER_TTL_S + 0.5)
    assert files.offers == 1
    files.clear_offers()
    assert len(kernel.closed) == backing.MAX_OFFERS + 2
    assert set(kernel.closed.values()) == {1}


@pytest.mark.allow_errors("cannot be given back")
def test_an_id_that_the_kernel_lost_is_logged(kernel: Kernel) -> None:
    def lost(id: int) -> None:
        raise OSError(errno.ENOENT, "unknown")

    files = BackingFiles(kernel.open, lost, kernel.close_fd)
    files.offer(5, 10, 0.0)
    files.acquire(5)
    files.release(5)
    assert len(files) == 0


INODES = st.integers(1, 3)


class Life(RuleBasedStateMachine):
    """Any order of offers, replies, releases, ends: ids match handles, each fd is closed exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = Kernel()
        self.files = BackingFiles(self.kernel.open, self.kernel.close, self.kernel.close_fd)
        self.handles: Counter[int] = Counter()
        self.offered = 0
        self.now_s = 0.0

    @rule(inode=INODES)
    def offer(self, inode: int) -> None:
        self.offered += 1
        self.files.offer(inode, self.offered, self.now_s)

    @rule(inode=INODES, refused=st.booleans())
    def reply(self, inode: int, refused: bool) -> None:
        self.kernel.error = errno.ELOOP if refused else 0
        if self.files.acquire(inode):
            self.handles[inode] += 1
        else:
            assert not self.handles[inode]

    @rule(inode=INODES)
    def release(self, inode: int) -> None:
        if self.handles[inode]:
            self.handles[inode] -= 1
            self.files.release(inode)

    @rule(inode=INODES)
    def late(self, inode: int) -> None:
        self.files.withdraw(inode)

    @rule(s=st.floats(0, 20))
    def time_passes(self, s: float) -> None:
        self.now_s += s
        self.files.sweep(self.now_s)

    @rule()
    def process_ends(self) -> None:
        self.files.clear_offers()

    @invariant()
    def ids_are_for_open_inodes(self) -> None:
        assert len(self.kernel.ids) == len(self.files) == sum(1 for n in self.handles.values() if n)

    @invariant()
    def no_fd_is_lost(self) -> None:
        assert set(self.kernel.closed.values()) <= {1}
        assert len(self.kernel.closed) + self.files.offers == self.offered


TestLife = Life.TestCase
