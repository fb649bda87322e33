"""All notes, to a master that has lost names and asks for them (rule 22)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kvstore.core.errors import KvError, Overloaded
from kvstore.core.types import Address
from kvstore.pb import master_pb2 as m
from kvstore.rpc.entries import address_to_pb
from kvstore.rpc.methods import RECOVER
from kvstore.worker.background import Background
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.store import Store
from kvstore.worker.reports import note as notes
from kvstore.worker.reports.note import Note
from kvstore.worker.reports.report import MasterLink
from kvstore.worker.volumes.disk import Disk, disk_error

log = logging.getLogger(__name__)

PAGE_BLOCKS: Final = 256
"""With the longest paths that ext4 holds about 1 MB; the master's loop is busy with it for some 30 ms."""
PAGE_TIMEOUT_S: Final = 30.0
"""Several workers send at once, and whoever gives up begins anew: it is worth a wait."""


class Recovery:
    """Sends everything once it is asked to. What fails begins anew with the next command: the master repeats it."""

    def __init__(self, node: str, store: Store, disk: Disk, link: MasterLink, background: Background) -> None:
        self._node, self._store, self._disk, self._link, self._background = node, store, disk, link, background
        self._is_sending = False

    def start(self) -> None:
        """Unless it runs already. Before all blocks are known a page without any says that they are coming: the master
        gives up on who sends nothing."""
        if not self._is_sending:
            self._is_sending = True
            self._background.start(self._send())

    async def _send(self) -> None:
        try:
            if not self._store.scanned.is_set():
                await self._link.call(RECOVER, self._request([]), PAGE_TIMEOUT_S)
                return
            blocks = [block for block in self._store.all() if not block.leaving]
            log.info("the master asks for names: sending what is noted beside %d blocks", len(blocks))
            is_wanted = True
            for start in range(0, len(blocks), PAGE_BLOCKS):
                is_wanted = is_wanted and await self._send_page(blocks[start : start + PAGE_BLOCKS])
            if is_wanted:
                await self._link.call(RECOVER, self._request([], is_last=True), PAGE_TIMEOUT_S)
        except KvError as error:
            log.warning("the names did not all reach the master: %s; it will ask again", error.message)
        finally:
            self._is_sending = False

    async def _send_page(self, page: Sequence[Block]) -> bool:
        """Whether the master wants more."""
        found = await self._notes(page)
        rows = [
            _row(block, note)
            for block, note in zip(page, found, strict=True)
            if self._store.get(block.id) is block and not block.leaving and not _is_waste(block, note)
        ]
        return (await self._link.call(RECOVER, self._request(rows), PAGE_TIMEOUT_S)).wanted

    async def _notes(self, page: Sequence[Block]) -> list[Note | None]:
        """In the order of the blocks. Raises Overloaded when there is no free fd, which says nothing of the notes."""
        found: dict[Block, Note | None] = {}
        left = list(page)
        while left:
            paths = [block.path for block in left]
            files = [(path, block.address) for path, block in zip(paths, left, strict=True)]
            found.update(zip(left, await self._store.runtime.in_thread(self._read, files), strict=True))
            # A file that was moved to another volume meanwhile has its note there.
            left = [b for b, path in zip(left, paths, strict=True) if found[b] is None and b.path != path]
        return [found[block] for block in page]

    def _request(self, rows: Sequence[m.NotedBlock], *, is_last: bool = False) -> m.RecoverRequest:
        return m.RecoverRequest(node=self._node, boot=self._store.fences.boot, blocks=rows, last=is_last)

    def _read(self, files: Sequence[tuple[str, Address]]) -> list[Note | None]:
        """In a thread."""
        return [self._note(path, address) for path, address in files]

    def _note(self, path: str, address: Address) -> Note | None:
        """None when there is none, or no way to read it: its block is told of without a name."""
        try:
            return notes.decode(self._disk.attribute(path, notes.ATTRIBUTE), address)
        except OSError as error:
            if isinstance(known := disk_error(error, f"reading the name beside {path}"), Overloaded):
                raise known from None
            if not isinstance(error, FileNotFoundError):
                log.warning("%s: the rebuild will not know what it is", known.message)
            return None


def _is_waste(block: Block, note: Note | None) -> bool:
    """Nobody has published it, as far as anybody knows, nor will: it goes when the master is whole again."""
    return note is None and block.given_up and not block.owned


def _row(block: Block, note: Note | None) -> m.NotedBlock:
    row = m.NotedBlock(address=address_to_pb(block.address), volume=block.volume.id)
    if note is not None:
        row.name.CopyFrom(
            m.BlockName(
                path=note.path, mode=note.mode, uid=note.uid, gid=note.gid, mtime_ns=note.mtime_ns,
                ctime_ns=note.ctime_ns,
            )
        )  # fmt: skip
        row.noted.CopyFrom(m.Seen(incarnation=note.incarnation, sequence=note.sequence))
    return row
