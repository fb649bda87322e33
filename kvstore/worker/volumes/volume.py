"""A volume: one directory of one tier, the smallest thing that fails (rule 4).

::

    lock               held under flock while a worker uses the volume
    identity           see `identity`
    blocks/<xx>/<address>    a block; xx = first two hex digits of its hash
    staging/<session>-<handle>   being written, 16 hex digits each; session 0 is the worker itself
    heat               of the blocks, see `heatfile` (the first disk volume only)
    quarantine/<address>     differs from its own hash; kept for whoever investigates, a few at most
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from kvstore.core.errors import InvalidRequest, Unavailable
from kvstore.core.types import Address
from kvstore.worker.settings import VolumeSettings, Watermarks
from kvstore.worker.volumes import identity as identities
from kvstore.worker.volumes.books import Books
from kvstore.worker.volumes.disk import FATAL_ERRNOS, SHORT_ERRNOS, Disk, FileState, disk_bytes
from kvstore.worker.volumes.identity import Identity

log = logging.getLogger(__name__)
T = TypeVar("T")
FAN_OUT = [f"{i:02x}" for i in range(256)]
MAX_QUARANTINED = 8
WORKER_SESSION = 0
"""Of the worker's own staging: never outlives its process."""
MAX_IDENTITY_BYTES = 64 << 10
_STAGED = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})")
_NOT_REPLACED = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY)
"""What rename says when one of the two is a directory and the other one is not, or is not empty."""


class Quarantine(NamedTuple):
    """What it holds, and the files that left it for newer ones; bytes as the disk counts them."""

    kept_bytes: int
    unlinked: tuple[int, ...] = ()
    """Bytes of each."""


class FoundBlock(NamedTuple):
    address: Address
    size_bytes: int
    """Of its file: as its name says, unless that was damaged."""
    extra_bytes: int
    """What its file takes beyond its length (`Block.extra_bytes`)."""


class Found(NamedTuple):
    """What a look through the directories found."""

    blocks: list[FoundBlock]
    quarantine: Quarantine


class Volume:
    """One open volume.

    books       its bytes
    failed      why it is out of service, or "" while it is in service; never comes back without a restart
    identity    as it stands on disk
    """

    def __init__(
        self, path: str, tier: str, books: Books, watermarks: Watermarks, identity: Identity, lock_fd: int, disk: Disk
    ) -> None:
        self.path, self.tier, self.books, self.watermarks, self.disk = path, tier, books, watermarks, disk
        self.identity = identity
        self.failed = ""
        self._lock_fd = lock_fd
        self._identity_fd = disk.open_read(f"{path}/identity")
        self._is_rewritten = False
        self._guard = threading.Lock()

    def __repr__(self) -> str:
        return f"<Volume {self.id:016x} {self.tier} {self.path}>"

    @property
    def id(self) -> int:
        return self.identity.volume

    @property
    def in_service(self) -> bool:
        return not self.failed

    def block_path(self, address: Address) -> str:
        name = address.file_name
        return f"{self.path}/blocks/{name[-16:-14]}/{name}"

    def staging_path(self, session: int, handle: int) -> str:
        return f"{self.path}/staging/{session:016x}-{handle:016x}"

    def quarantine_path(self, name: str) -> str:
        return f"{self.path}/quarantine/{name}"

    def write_identity(self, identity: Identity) -> None:
        """Durable when it returns. Blocks; raises OSError."""
        with self._guard:
            self._check()  # never over the identity of another volume
            self._is_rewritten = True  # it may lie there already when what follows fails
            self.disk.replace_durably(f"{self.path}/identity", identities.encode(identity))
            self._hold_identity()
            self.identity = identity

    def check(self) -> None:
        """Raises OSError (ENODEV) when the directory was removed, or another one lies in its place. Blocks."""
        with self._guard:
            self._check()

    def _hold_identity(self) -> None:
        before, self._identity_fd = self._identity_fd, self.disk.open_read(f"{self.path}/identity")
        self.disk.close(before)
        self._is_rewritten = False

    def _check(self) -> None:
        if self._is_rewritten:
            self._hold_identity()
        for name, fd in (("lock", self._lock_fd), ("identity", self._identity_fd)):
            path = f"{self.path}/{name}"
            try:
                there = self.disk.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                raise OSError(errno.ENODEV, f"{name} was removed: the volume is gone", path) from None
            if not there.is_same_file(self.disk.fstat(fd)):
                raise OSError(errno.ENODEV, f"{name} is not the file that was opened: another volume is there", path)

    def with_directories(self, write: Callable[[], T]) -> T:
        """`write()`; when one of the directories was removed under it, make them anew and try once more. Blocks."""
        try:
            return write()
        except FileNotFoundError:
            self.check()
            log.warning("%s: directories were removed while the worker runs; making them anew", self.path)
            self.make_directories()
            return write()

    def make_directories(self) -> None:
        for name in ("staging", "quarantine", *(f"blocks/{part}" for part in FAN_OUT)):
            self.disk.make_directory(f"{self.path}/{name}")

    def trial_file(self, number: int) -> int:
        """A read-only fd of an empty file without a name in this volume, by which others find out what the kernel can
        do with its files. `number` is a random one. Blocks; raises OSError.
        """
        path = self.staging_path(WORKER_SESSION, number)
        return self.with_directories(lambda: self.disk.create_unnamed(path))

    def set_aside(self, path: str, name: str) -> int:
        """Into quarantine, in place of the file that has this name there; returns the bytes of that. A directory is not
        replaced, nor does it replace a file: then it goes under another name. Blocks; raises OSError.
        """
        aside = self.quarantine_path(name)
        replaced_bytes = self._used_bytes(aside)
        try:
            self.with_directories(lambda: self.disk.rename(path, aside))
        except OSError as error:
            if error.errno not in _NOT_REPLACED:
                raise
            self.disk.rename(path, self.quarantine_path(f"{self.disk.stat(path).stamp.inode:x}"))
            return 0
        return replaced_bytes

    def scan(self) -> Found:
        """Read the directories: no file is opened, a block is what its name says, and takes what `stat` says. 100,000
        blocks are 1.1 s, or 2.5 s when nothing of the file system is in memory. Blocks; raises OSError.
        """
        blocks: list[FoundBlock] = []
        for part in FAN_OUT:
            directory = f"{self.path}/blocks/{part}"
            for name in self.disk.names(directory):
                address = _parse(name)
                if address is None or name[-16:-14] != part:
                    log.warning("%s/%s is not a block; moved to quarantine", directory, name)
                    self.set_aside(f"{directory}/{name}", name)
                elif (found := self._found(address, f"{directory}/{name}")) is not None:
                    blocks.append(found)
        return Found(blocks, self.trim_quarantine())

    def scan_staging(self) -> list[tuple[int, int]]:
        """(session, handle) of every staging file that is there. Blocks; raises OSError."""
        found = []
        for name in self.disk.names(f"{self.path}/staging"):
            path = f"{self.path}/staging/{name}"
            if match := _STAGED.fullmatch(name):
                found.append((int(match[1], 16), int(match[2], 16)))
            else:
                log.warning("%s is not a staging file; moved to quarantine", path)
                self.set_aside(path, name)
        return found

    def trim_quarantine(self) -> Quarantine:
        """Keep the newest few. Blocks; raises OSError."""
        files = []
        for path in map(self.quarantine_path, self.disk.names(f"{self.path}/quarantine")):
            with contextlib.suppress(FileNotFoundError):  # two of these may run at a time
                files.append((self.disk.stat(path), path))
        files.sort(key=lambda file: file[0].mtime_ns)
        unlinked = []
        for state, path in files[:-MAX_QUARANTINED]:
            with contextlib.suppress(
                FileNotFoundError, IsADirectoryError
            ):  # some stranger's: it has no bytes of blocks
                self.disk.unlink(path)
                unlinked.append(state.used_bytes)
        return Quarantine(sum(state.used_bytes for state, _ in files[-MAX_QUARANTINED:]), tuple(unlinked))

    def _used_bytes(self, path: str) -> int:
        """0 for a file that is not there."""
        try:
            return self.disk.stat(path).used_bytes
        except FileNotFoundError:
            return 0

    def look_up(self, address: Address) -> FoundBlock | None:
        """The block, if there is a file of this address and of its length, by asking the file system. Blocks; raises
        OSError.
        """
        found = self._found(address, self.block_path(address))
        is_whole = found is not None and 0 < found.size_bytes == address.length_bytes
        return found if is_whole else None

    def _found(self, address: Address, path: str) -> FoundBlock | None:
        """None when it went. One that cannot be asked, while nothing is wrong with the drive, has no bytes: whoever
        reads it finds out why.
        """
        try:
            state = self.disk.stat(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (*FATAL_ERRNOS, *SHORT_ERRNOS):
                raise
            return FoundBlock(address, 0, 0)
        return FoundBlock(address, state.size_bytes, extra_bytes(address, state))

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._identity_fd)
        os.close(self._lock_fd)


def open_volume(settings: VolumeSettings, volume_id: int, disk: Disk) -> Volume:
    """Open a directory as a volume; one that is empty becomes a volume with the id `volume_id`. Blocks.

    Raises Unavailable when another worker has it, InvalidRequest when it holds something else, OSError.
    """
    tier, path, capacity_bytes, floor_bytes, watermarks = settings
    disk.make_directory(path)
    lock_fd = _lock(path)
    try:
        identity = _read_identity(path, volume_id, disk)
        volume = Volume(path, tier, Books(capacity_bytes, floor_bytes), watermarks, identity, lock_fd, disk)
    except BaseException:
        os.close(lock_fd)
        raise
    with contextlib.ExitStack() as undo:
        undo.callback(volume.close)
        volume.make_directories()
        volume.books.look(disk.free_bytes(path), 0)
        undo.pop_all()
    return volume


def _lock(path: str) -> int:
    fd = os.open(f"{path}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise Unavailable(
            f"{path}: another worker uses this volume; stop it, or give this one its own directory"
        ) from None
    return fd


def _read_identity(path: str, volume_id: int, disk: Disk) -> Identity:
    try:
        fd = disk.open_read(f"{path}/identity")
    except FileNotFoundError:
        return _mint(path, volume_id, disk)
    try:
        return identities.decode(disk.read(fd, MAX_IDENTITY_BYTES, 0), f"{path}/identity")
    finally:
        disk.close(fd)


def _mint(path: str, volume_id: int, disk: Disk) -> Identity:
    """Only of an empty directory: of anything else a wrong path in the configuration would make a volume."""
    foreign = set(disk.names(path)) - {"lock", "identity.new", "lost+found"}
    if foreign:
        raise InvalidRequest(f"{path}: neither empty nor a volume (it holds {min(foreign)!r}); name another directory")
    identity = Identity(volume_id)
    disk.replace_durably(f"{path}/identity", identities.encode(identity))
    return identity


def extra_bytes(address: Address, state: FileState) -> int:
    """What the file of a block takes beyond its length (`Block.extra_bytes`)."""
    return max(0, state.used_bytes - disk_bytes(address.length_bytes))


def _parse(name: str) -> Address | None:
    """None for what names no block. None has a length of 0: an empty file is a name without a block."""
    try:
        address = Address.parse(name)
    except InvalidRequest:
        return None
    return address if address.length_bytes else None
