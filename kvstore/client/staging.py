"""What passes between the SDK (or the mount) and its blocks: files being written, and wishes to read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.core.errors import InvalidRequest, KvError
from kvstore.core.limits import MAX_FDS_PER_MESSAGE, MIB
from kvstore.core.types import Address, Entry

FULL_MARGIN_BYTES: Final = 1 * MIB


class Staging:
    """A block being written.

    * `fd`: read-write, owned by this object; -1 after `close` or `release`;
    * `owner`: the `AsyncBlocks` or `Blocks` it came from, which alone can seal it;
    * `handle`: the worker's number of it (0: not at a local worker);
    * `kept_fd`: a second fd of a file without a name, so that its bytes outlive `fd`; -1 for a worker's file.
    """

    __slots__ = ("fd", "handle", "kept_fd", "owner")

    def __init__(self, owner: object, fd: int, *, handle: int = 0, kept_fd: int = -1) -> None:
        self.owner, self.fd, self.handle, self.kept_fd = owner, fd, handle, kept_fd

    def __repr__(self) -> str:
        return f"<Staging {self.handle or 'scratch'} fd={self.fd}>"

    def close(self) -> None:
        """End writing through `fd`; may be called again."""
        fd = self.release()
        if fd >= 0:
            os.close(fd)

    def release(self) -> int:
        """Give `fd` away to the caller."""
        fd, self.fd = self.fd, -1
        return fd

    def drop(self) -> None:
        """Close everything; a file without a name is gone then."""
        self.close()
        fd, self.kept_fd = self.kept_fd, -1
        if fd >= 0:
            os.close(fd)


class Wish(NamedTuple):
    """A block to read: into `view`, which has its length, or as new bytes."""

    entry: Entry
    view: memoryview | None = None


Loaded = bytes | KvError
"""The bytes (empty when they went into the view), or why not."""


def block_of(entry: Entry) -> Address:
    if entry.address is None:
        raise InvalidRequest("an empty file or a directory has no block")
    return entry.address


def in_parts(wishes: Sequence[Wish]) -> Iterator[Sequence[Wish]]:
    """As many as one message carries fds: a batch of any length must not use up the process's fds."""
    return (wishes[i : i + MAX_FDS_PER_MESSAGE] for i in range(0, len(wishes), MAX_FDS_PER_MESSAGE))


def sealable(staging: Staging, size_bytes: int) -> int:
    """The fd to send from. Raises InvalidRequest for an empty file or a staging file that is gone."""
    if size_bytes <= 0 or staging.kept_fd < 0:
        raise InvalidRequest(
            "an empty file has no block" if size_bytes <= 0 else "this staging file was sealed or aborted"
        )
    return staging.kept_fd


def room_to_ask(size_bytes: int) -> int:
    """Bytes to reserve for a file of so many whose disk turned out to be full. More than it has already, as only then
    its worker looks at the disk; and a file system needs some for itself.
    """
    return size_bytes + FULL_MARGIN_BYTES


def empty_fd() -> int:
    """What an entry without a block reads as."""
    return os.memfd_create("empty", os.MFD_CLOEXEC)
