"""Seal and abort by staging handle, as often as they are asked for: an answer may be lost on its way, or the client's
process with it (rule 28).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Final

from kvstore.core.types import Address, BlockId
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.store import Store
from kvstore.worker.writes.seal import Claim, Sealer
from kvstore.worker.writes.sessions import Sessions
from kvstore.worker.writes.staging import Staging

MAX_REMEMBERED: Final = 1024
"""Handles of one session whose block is known, the newest ones: far more than a client has between seal and publish."""

Key = tuple[int, int]
"""Session, handle."""


class Seals:
    """What became of the handles of the sessions that live.

    ``_under_way``  seals that run;  ``_blocks``  session → handle → the block it became, the oldest first;
    ``_copies``  session → handle → the last block that is a copy of it.
    """

    def __init__(self, store: Store, staging: Staging, sealer: Sealer) -> None:
        self._store, self._staging, self._sealer = store, staging, sealer
        self._under_way: dict[Key, asyncio.Task[Block]] = {}
        self._blocks: dict[int, OrderedDict[int, BlockId]] = {}
        self._copies: dict[int, dict[int, BlockId]] = {}

    async def seal(self, session: int, handle: int, claim: Claim | None) -> Block:
        """The block that the staging file becomes, or became at an earlier call. Raises like `Sealer.seal`; NotFound
        when there is neither the file nor its block.
        """
        if (block := self._became(session, handle)) is not None:
            return block
        return await asyncio.shield(self._sealing((session, handle), claim))

    async def seal_copy(self, session: int, handle: int) -> Block:
        """A block that is a copy of the staging file as it is now. One from before that nobody published is given up:
        its client's process may have died before it knew of it. Raises like `Sealer.seal_copy`.
        """
        task = self._sealer.start_copy(self._staging.find(session, handle))
        task.add_done_callback(partial(self._copied, (session, handle)))
        return await asyncio.shield(task)

    async def abort(self, session: int, handle: int) -> None:
        """Throw the staging file away, or the block that it became unless it was published meanwhile: the master is
        told that it is dead, and its verdict decides (rule 11). Raises NotFound for what is published or unknown.
        """
        if sealing := self._under_way.get((session, handle)):
            await asyncio.wait([sealing])
        block = self._became(session, handle)
        self._supersede((session, handle), None)
        if block is None or block.owned:
            await self._staging.abort(self._staging.find(session, handle))
        else:
            self._store.give_up(block)

    def give_up(self, session: int, addresses: Iterable[Address]) -> None:
        """Its client will not publish these blocks of the session. It may have tried to, so the master is told that
        they are dead, and its verdict decides (rule 11). What is not here, or another's, is left alone.
        """
        for address in addresses:
            block = self._store.get(address.block)
            if block is None or block.address != address or block.session != session or block.leaving:
                continue
            if not block.owned:
                self._store.give_up(block)

    def forget_over(self, sessions: Sessions, now_s: float) -> None:
        """Drop what sessions that are over were told."""
        for session in [s for s in self._blocks if sessions.is_over(s, now_s)]:
            del self._blocks[session]
        for session in [s for s in self._copies if sessions.is_over(s, now_s)]:
            del self._copies[session]

    def _became(self, session: int, handle: int) -> Block | None:
        blocks = self._blocks.get(session)
        known = blocks.get(handle) if blocks else None
        block = self._store.get(known) if known else None
        return None if block is None or block.leaving or block.given_up else block

    def _sealing(self, key: Key, claim: Claim | None) -> asyncio.Task[Block]:
        if (task := self._under_way.get(key)) is None:
            task = self._under_way[key] = self._sealer.start(self._staging.find(*key), claim)
            task.add_done_callback(partial(self._ended, key))
        return task

    def _ended(self, key: Key, task: asyncio.Task[Block]) -> None:
        del self._under_way[key]
        if task.cancelled() or task.exception() is not None:
            return
        self._supersede(key, None)
        session, handle = key
        blocks = self._blocks.setdefault(session, OrderedDict())
        blocks[handle] = task.result().id
        if len(blocks) > MAX_REMEMBERED:
            blocks.popitem(last=False)

    def _copied(self, key: Key, task: asyncio.Task[Block]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._supersede(key, task.result())

    def _supersede(self, key: Key, copy: Block | None) -> None:
        """`copy` is the handle's last one now. If the one before was published after all, the verdict on it says so."""
        session, handle = key
        copies = self._copies.setdefault(session, {})
        known = copies.pop(handle, None)
        before = self._store.get(known) if known is not None else None
        if before is not None and not before.owned and not before.leaving:
            self._store.give_up(before)
        if copy is not None:
            copies[handle] = copy.id
        if not copies:
            del self._copies[session]
