"""The handles that the kernel holds."""

from __future__ import annotations

from typing import Final

from kvstore.keeper import wire
from kvstore.keeper.backing import BackingFiles
from kvstore.keeper.channel import Open
from kvstore.keeper.wire import Op


class _File:
    __slots__ = ("backed", "inode")

    def __init__(self, inode: int, *, backed: bool) -> None:
        self.inode = inode
        self.backed = backed
        """It holds a reference on its inode's backing id."""


class Handles:
    """Files and directories, each with numbers of their own."""

    def __init__(self, backing: BackingFiles) -> None:
        self._backing: Final = backing
        self._files: dict[int, _File] = {}
        self._directories: dict[int, int] = {}
        """handle → inode"""

    def __len__(self) -> int:
        return len(self._files) + len(self._directories)

    def add_file(self, number: int, inode: int, *, backed: bool) -> None:
        self._files[number] = _File(inode, backed=backed)

    def add_directory(self, number: int, inode: int) -> None:
        self._directories[number] = inode

    def drop_backing(self, release: bytes) -> None:
        """A RELEASE has come: the kernel reads and writes no more through its handle."""
        file = self._files.get(wire.released_handle(release))
        if file is not None and file.backed:
            file.backed = False
            self._backing.release(file.inode)

    def forget(self, release: bytes) -> None:
        """A RELEASE or RELEASEDIR was answered."""
        number = wire.released_handle(release)
        if wire.IN_START.unpack_from(release)[1] == Op.RELEASE:
            self._files.pop(number, None)
        else:
            self._directories.pop(number, None)

    def all(self) -> list[Open]:
        files = [Open(number, file.inode, False) for number, file in self._files.items()]
        return files + [Open(number, inode, True) for number, inode in self._directories.items()]
