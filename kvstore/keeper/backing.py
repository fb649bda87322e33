"""Backing ids: which inode the kernel reads and writes through which file.

An inode has at most one id at a time, counted by its passthrough handles: the kernel refuses a second one (EIO). The
file system process offers an fd before each passthrough reply; it is used when there is no id, else closed.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

MAX_OFFERS: Final = 256
"""Inodes with an offer that no reply has asked for yet; beyond it the oldest is closed."""
OFFER_TTL_S: Final = 10.0
"""An offer's reply follows at once; what is older belongs to a handler that failed."""


class _Backing:
    __slots__ = ("count", "id")

    def __init__(self, id: int) -> None:
        self.id = id
        self.count = 1


class _Offer:
    __slots__ = ("at_s", "fd", "replies")

    def __init__(self, fd: int, replies: int, at_s: float) -> None:
        self.fd = fd
        self.replies = replies
        """How many that offered it are still to come."""
        self.at_s = at_s


class BackingFiles:
    """`open_id` and `close_id` are the ioctls BACKING_OPEN (fd → id above 0) and BACKING_CLOSE; both raise OSError."""

    def __init__(
        self,
        open_id: Callable[[int], int],
        close_id: Callable[[int], None],
        close_fd: Callable[[int], None] = os.close,
    ) -> None:
        self._open_id, self._close_id, self._close_fd = open_id, close_id, close_fd
        self._ids: dict[int, _Backing] = {}
        self._offers: dict[int, _Offer] = {}
        self._logged: set[int] = set()

    def __len__(self) -> int:
        """Live ids."""
        return len(self._ids)

    @property
    def offers(self) -> int:
        return len(self._offers)

    def offer(self, inode: int, fd: int, now_s: float) -> None:
        """Take an fd over for the next passthrough reply of this inode."""
        former = self._offers.pop(inode, None)
        if former is not None:
            self._close_fd(former.fd)
        self._offers[inode] = _Offer(fd, former.replies + 1 if former else 1, now_s)
        if len(self._offers) > MAX_OFFERS:
            self._close_fd(self._offers.pop(next(iter(self._offers))).fd)

    def acquire(self, inode: int) -> int:
        """The id for one more passthrough handle. 0: none can be had, so the handle needs direct I/O."""
        backing = self._ids.get(inode)
        if backing is not None:
            backing.count += 1
            self.withdraw(inode)
            return backing.id
        offer = self._offers.get(inode)
        id = self._register(inode, offer.fd) if offer else 0
        if id:
            self._ids[inode] = _Backing(id)
        self.withdraw(inode)
        return id

    def release(self, inode: int) -> None:
        """One passthrough handle less."""
        backing = self._ids[inode]
        backing.count -= 1
        if backing.count:
            return
        del self._ids[inode]
        try:
            self._close_id(backing.id)
        except OSError as error:
            log.error("backing id %d of inode %d cannot be given back: %s", backing.id, inode, error)

    def withdraw(self, inode: int) -> None:
        """The reply that an offer came with is here. Replies overtake each other, so the fd stays for those to come."""
        offer = self._offers.get(inode)
        if offer is None:
            return
        offer.replies -= 1
        if offer.replies == 0:
            del self._offers[inode]
            self._close_fd(offer.fd)

    def sweep(self, now_s: float) -> None:
        """Close offers whose reply never came."""
        for inode in [i for i, offer in self._offers.items() if now_s - offer.at_s > OFFER_TTL_S]:
            self._close_fd(self._offers.pop(inode).fd)

    def clear_offers(self) -> None:
        """Whoever made them is gone. Ids stay: the kernel's handles live on."""
        while self._offers:
            self._close_fd(self._offers.popitem()[1].fd)

    def _register(self, inode: int, fd: int) -> int:
        try:
            return self._open_id(fd)
        except OSError as error:
            code = error.errno or 0
            if code not in self._logged:
                self._logged.add(code)
                name = errno.errorcode.get(code, str(code))
                log.warning("no passthrough for inode %d (%s): served by direct I/O, slower; said once", inode, name)
            return 0
