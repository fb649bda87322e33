"""A file that is being written through this mount: its state, and nothing that waits."""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.client.sockets import SealedBlock
from kvstore.client.staging import Staging
from kvstore.core.errors import KvError
from kvstore.core.hashing import BlockHasher
from kvstore.core.types import Entry

Key = tuple[int, str]
"""Inode of the directory at the master, name."""


class Hashed(NamedTuple):
    """The hash of a staging file at a moment: it holds while `changes` stays."""

    changes: int
    size_bytes: int
    mtime_ns: int
    hash: int


@dataclass(slots=True, eq=False)
class LocalFile:
    """One inode of this mount's own (bit 62): a version of a temporary name, or an ordinary name that is open for
    writing.

    Its bytes are in one of three places: nowhere (empty), in a block that is only read (the one it began with, or what
    was sealed last), or in a staging file (`staged`). The first change of a block makes a staging file with its bytes,
    so that a sealed file is never written. `block_fd` reads them wherever they are.
    """

    id: int
    """Never another file's; `inode` may change (`LocalFiles.rewrite`)."""
    inode: int
    """The kernel's number."""
    key: Key | None
    """Its name; None when it has none any more (unlinked, replaced): then it is never published."""
    temporary: bool
    mode: int
    """st_mode."""
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    size_bytes: int = 0
    block_fd: int = -1
    staged: Staging | None = None
    reserved_bytes: int = 0
    sealed: SealedBlock | None = None
    """A block with just these bytes; None when they changed since, or were never sealed."""
    unpublished: list[SealedBlock] = field(default_factory=list)
    """Blocks with former bytes that, as far as is known here, nobody has published, nor will."""
    hasher: BlockHasher | None = None
    """Has seen all bytes so far, while they came in order; None once they did not."""
    hashed: Hashed | None = None
    entry: Entry | None = None
    """What the master has under `key` because of this file; None for a temporary name, and where the master did not
    answer yet.
    """
    published: bool = False
    """Whether the name exists at the master (so that a later publish must not bring it back)."""
    changes: int = 0
    """Counts writes and truncations."""
    published_changes: int = 0
    """`changes` of what the master has."""
    keep_mtime: bool = False
    """`mtime_ns` was set by the user after the last write."""
    temp_key: Key | None = None
    """The temporary name it has, or had until it was renamed: an open by that name may still be on its way to this
    number.
    """
    process: int = 0
    """Id of the process (thread group) that opened it for writing last, 0 where that is not known: which version of a
    temporary name is whose.
    """
    looked_up: bool = False
    """A look-up was answered its number: an open of it need not come from its writer."""
    mapped: bool = False
    """It was opened read-write, so somebody may have mapped it: stores to a map go unseen, no earlier hash counts."""
    seen: tuple[int, int] | None = None
    """(size, mtime_ns) of the staging file when it was looked at last: by passthrough it changes behind our back."""
    failed: KvError | None = None
    """It grew beyond what it may have and was emptied: what whoever wants to hash or publish it is told."""
    fixed: bool = False
    """Somebody has it open by passthrough as a sealed block: as long as that is so nothing else can stand behind it."""
    renaming: bool = False
    """A rename of this temporary version is on its way: it is in no list of versions."""
    writers: int = 0
    handles: int = 0
    expected_opens: int = 0
    """Write-opens that were sent to look the name up again and will come back (ESTALE)."""
    expected_until_s: float = 0.0
    grace_until_s: float = 0.0
    """Until then a look-up leads here however many opens have come: writers who race take each other's expectation."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no write-open is expected any more."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whatever waits while it changes the bytes or publishes them."""

    @property
    def is_dirty(self) -> bool:
        return self.changes != self.published_changes

    @property
    def permissions(self) -> int:
        return stat.S_IMODE(self.mode)

    def is_expected(self, now_s: float) -> bool:
        """Whether a LOOKUP of its name must answer this inode, since a write-open is on its way."""
        return now_s < self.grace_until_s or (self.expected_opens > 0 and now_s < self.expected_until_s)

    def changed(self, size_bytes: int, now_ns: int) -> None:
        """Bytes changed. Whatever was known of the former ones is void."""
        self.unseal()
        self.changes += 1
        self.size_bytes = size_bytes
        self.hashed = self.failed = None
        self.mtime_ns = self.ctime_ns = now_ns
        self.keep_mtime = False

    def unseal(self) -> None:
        """What it was sealed to is not to be published (again)."""
        if self.sealed is not None and self.is_dirty:
            self.unpublished.append(self.sealed)
        self.sealed = None

    def observe(self) -> None:
        """Take over what passthrough writes did to the staging file: one fstat."""
        if self.seen is None or self.staged is None or self.staged.fd < 0:
            return
        status = os.fstat(self.staged.fd)
        if (status.st_size, status.st_mtime_ns) != self.seen:
            self.changed(status.st_size, status.st_mtime_ns)
            self.seen = (status.st_size, status.st_mtime_ns)
            self.hasher = None

    def look(self) -> None:
        """Its staging file is as it should be: only what happens from here on is a change."""
        status = os.fstat(self.fd)
        self.seen = (status.st_size, status.st_mtime_ns)

    @property
    def fd(self) -> int:
        """Where its bytes are now, writable in a staging file; -1 when there are none."""
        return self.block_fd if self.staged is None else self.staged.fd

    def set_block(self, fd: int) -> None:
        """Take over a read-only fd (-1: none) in place of the one it has, which is closed."""
        if self.block_fd >= 0:
            os.close(self.block_fd)
        self.block_fd = fd
