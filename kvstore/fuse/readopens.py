"""How sealed files are opened to be read, and what stands between a look-up and the open that follows it: the file may
be replaced meanwhile, and the kernel looks an outdated number up again only once (rule 23).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvstore.core.errors import MISSES, NotFound, Stale
from kvstore.core.recently import Recently
from kvstore.fuse.inodes import Cached
from kvstore.fuse.local import HAND_SHAKE_S
from kvstore.fuse.localfile import Key
from kvstore.fuse.sealed import SealedFile, SealedFiles
from kvstore.fuse.tree import Tree

log = logging.getLogger(__name__)

OUTDATED_S: Final = 0.5
"""The kernel's second try comes at once."""
PIN_TRIES: Final = 8
"""Versions that may be replaced one after the other while a look-up tries to hold one."""
PIN_S: Final = 2 * HAND_SHAKE_S


class ReadOpens:
    """Opens to read. A name is contended when such an open came too late for the number that its look-up was answered:
    its next look-up pins the block that it answers.
    """

    def __init__(self, tree: Tree, sealed: SealedFiles) -> None:
        self._tree, self._sealed = tree, sealed
        self._contended: Recently[Key] = Recently(OUTDATED_S)
        self._pinned: Recently[int] = Recently(HAND_SHAKE_S)

    async def open(self, inode: int) -> SealedFile:
        """By its number at the master. Raises Stale for an outdated one: the kernel looks the name up again, once, and
        that look-up is pinned. NotFound when no replica can be read.
        """
        pinned = self._sealed.get(inode)
        if pinned is not None and not pinned.is_behind and self._pinned.has(inode, self._tree.now_s()):
            pinned.handles += 1
            return pinned
        key = self._tree.cache.last_key(inode)
        try:
            return await self.open_found(await self._tree.by_inode(inode))
        except Stale:
            self.contend(key)
            raise

    async def open_found(self, cached: Cached) -> SealedFile:
        """What a look-up found. Raises NotFound when no replica can be read, Stale."""
        try:
            return await self._sealed.open(cached.entry)
        except MISSES as error:
            log.debug("cannot open %s: %s", cached.entry.address, error.message)
        # What was remembered may be out of date: replicas move. One fresh look, then the miss (rule 23).
        fresh = await self._tree.ask_inode(cached.entry.inode)
        try:
            return await self._sealed.open(fresh.entry)
        except MISSES as error:
            if fresh.key is not None:  # what is stored under it next replaces it, even if it is equal
                self._tree.unreadable.add(fresh.key, self._tree.now_s())
            raise NotFound(f"no replica can be read: {error.message}", reason=error.reason) from None

    def contend(self, key: Key | None) -> None:
        """An open of this name came too late; None: its name is not known."""
        if key is not None:
            self._contended.add(key, self._tree.now_s())

    def is_contended(self, key: Key) -> bool:
        return self._contended.has(key, self._tree.now_s())

    async def pin(self, key: Key, cached: Cached) -> Cached:
        """Hold the block of what a look-up is about to answer, so that the open that follows cannot be too late again:
        the kernel tries only once more.
        """
        for _ in range(PIN_TRIES):
            try:
                file = await self._sealed.open(cached.entry)
            except (*MISSES, Stale):
                self._tree.cache.forget_inode(cached.entry.inode)
                cached = await self._tree.by_name(key)
                continue
            asyncio.get_running_loop().call_later(PIN_S, self._sealed.release, file)
            self._pinned.add(file.entry.inode, self._tree.now_s())
            break
        return cached
