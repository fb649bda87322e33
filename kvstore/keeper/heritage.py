"""What outlives a file system process beside the relay's table: its state file, and the fds that it wants kept."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator

from kvstore.keeper import channel
from kvstore.keeper.channel import Kind, Message, Table
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

    def hear(self, message: Message) -> bool:
        """KEEP, DROP or STATE of the process that serves. Whether its fd was taken over."""
        if message.kind == Kind.DROP:
            self._drop(message.inode)
        if len(message.fds) != 1:
            return False
        if message.kind == Kind.KEEP:
            self._drop(message.inode)
            self.kept[message.inode] = message.fds[0]
        elif message.kind == Kind.STATE:
            os.close(self.state_fd)
            self.state_fd = message.fds[0]
        else:
            return False
        return True

    def _drop(self, inode: int) -> None:
        fd = self.kept.pop(inode, None)
        if fd is not None:
            os.close(fd)

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
