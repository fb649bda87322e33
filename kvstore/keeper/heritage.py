"""What outlives a file system process beside the relay's table: its state file, and the fds that it wants kept."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator

from kvstore.keeper import channel
from kvstore.keeper.channel import Kind, Table
from kvstore.keeper.process import FsProcess


class Heritage:
    def __init__(self) -> None:
        self.state_fd = os.memfd_create("kvstore-state")
        self.kept: dict[int, int] = {}
        """inode → fd"""

    def close(self) -> None:
        os.close(self.state_fd)
        while self.kept:
            os.close(self.kept.popitem()[1])

    def keep(self, inode: int, fd: int) -> None:
        """Takes the fd over. Replaces an earlier one of this inode."""
        self.drop(inode)
        self.kept[inode] = fd

    def drop(self, inode: int) -> None:
        fd = self.kept.pop(inode, None)
        if fd is not None:
            os.close(fd)

    def replace_state(self, fd: int) -> None:
        """Takes the fd over."""
        os.close(self.state_fd)
        self.state_fd = fd

    def hand_over(self, process: FsProcess, table: Table) -> None:
        """All of it, and the word to serve. Raises `channel.Closed`, BlockingIOError when it does not listen."""
        for items in _batches(self.kept):
            process.tell(Kind.KEPT, json.dumps([inode for inode, _ in items]).encode(), [fd for _, fd in items])
        with open(os.memfd_create("kvstore-table"), "w+b", buffering=0) as file:
            file.write(table.to_json())
            file.seek(0)
            process.tell(Kind.TAKE, fds=[file.fileno()])


def _batches(kept: dict[int, int]) -> Iterator[list[tuple[int, int]]]:
    items = iter(kept.items())
    while batch := list(itertools.islice(items, channel.MAX_FDS)):
        yield batch
