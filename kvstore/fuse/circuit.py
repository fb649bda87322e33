"""The mount's link to the master: one call each, with one deadline, behind a circuit (rule 25).

After one call that got no answer the circuit is open: calls fail at once, and a ping in the background closes it again.
So a master that is away costs one deadline, not one for each operation: LMCache's look-up of a prompt is dozens of
serial stats.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from kvstore.client.messages import (
    Publication,
    PublishMode,
    PublishName,
    RemoveKind,
    RemoveName,
    RenameName,
    Statfs,
    whole,
)
from kvstore.client.meta import AsyncMeta
from kvstore.client.policies import Holding
from kvstore.core.errors import KvError, Timeout, Unavailable
from kvstore.core.limits import MOUNT_METADATA_TIMEOUT_S
from kvstore.core.types import Entry

log = logging.getLogger(__name__)
T = TypeVar("T")

PING_PAUSE_S: Final = 0.15
PING_TIMEOUT_S: Final = 1.0


class Master:
    """What the mount asks the master. Bases are inode numbers of the master; the empty name is the base itself."""

    def __init__(self, meta: AsyncMeta, timeout_s: float = MOUNT_METADATA_TIMEOUT_S) -> None:
        self._meta, self._timeout_s = meta, timeout_s
        self._ping: asyncio.Task[None] | None = None

    @property
    def is_away(self) -> bool:
        """Whether the circuit is open."""
        return self._ping is not None

    async def lookup(self, base: int, name: str = "") -> Entry:
        """Raises NotFound, Stale (the base is gone) …"""
        return whole(one(await self._ask(lambda t: self._meta.lookup([name], base=base, timeout_s=t))))

    async def publish(self, base: int, name: PublishName, mode: PublishMode) -> tuple[Entry, bool]:
        """The entry as it is now, and whether this call made it."""
        publication = Publication([name], mode)
        result = one(await self._ask(lambda t: self._meta.publish([publication], base=base, timeout_s=t)))
        if isinstance(result, KvError):
            raise result
        return one(result.entries), one(result.created)

    async def mkdir(self, base: int, name: str, mode: int, uid: int, gid: int) -> Entry:
        rows = await self._ask(lambda t: self._meta.mkdir([name], base=base, mode=mode, uid=uid, gid=gid, timeout_s=t))
        return whole(one(rows))

    async def make_directories(self, path: str) -> Entry:
        """The directory at a path from the root of the store, made with its parents if it is not there."""
        if not path:
            return await self.lookup(0)
        return whole(one(await self._ask(lambda t: self._meta.mkdir([path], parents=True, timeout_s=t))))

    async def remove(self, base: int, name: str, kind: RemoveKind, inode: int) -> None:
        names = [RemoveName(name, kind, inode)]
        error = one(await self._ask(lambda t: self._meta.remove(names, base=base, timeout_s=t)))
        if error is not None:
            raise error

    async def rename(self, name: RenameName) -> None:
        error = one(await self._ask(lambda t: self._meta.rename([name], timeout_s=t)))
        if error is not None:
            raise error

    async def set_attr(
        self,
        base: int,
        name: str = "",
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        mtime_ns: int | None = None,
    ) -> Entry:
        return await self._ask(
            lambda t: self._meta.set_attr(name, base=base, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns, timeout_s=t)
        )

    async def list(self, base: int, after: str, limit: int) -> list[tuple[str, Entry]]:
        """The next names of a directory in order."""

        async def page(timeout_s: float) -> list[tuple[str, Entry]]:
            return [row async for row in self._meta.list(base=base, after=after, limit=limit, timeout_s=timeout_s)]

        return await self._ask(page)

    async def statfs(self, base: int) -> Statfs:
        return await self._ask(lambda t: self._meta.statfs(base=base, timeout_s=t))

    async def policies(self, inode: int) -> Holding:
        """Quota, TTL and pin that hold for an entry."""
        return await self._ask(lambda t: self._meta.policies.of("", base=inode, timeout_s=t))

    async def close(self) -> None:
        if self._ping is not None:
            self._ping.cancel()
            await asyncio.gather(self._ping, return_exceptions=True)

    async def _ask(self, question: Callable[[float], Awaitable[T]]) -> T:
        if self.is_away:
            raise Unavailable("the master does not answer; waiting for it to come back")
        try:
            async with asyncio.timeout(self._timeout_s + PING_PAUSE_S):
                return await question(self._timeout_s)
        except (Timeout, Unavailable, TimeoutError) as error:
            self._open(error)
            if isinstance(error, KvError):
                raise
            raise Timeout(f"the master did not answer within {self._timeout_s:g} s") from None

    def _open(self, error: Exception) -> None:
        if self._ping is None:
            log.warning("the master does not answer: %s", error)
            self._ping = asyncio.create_task(self._wait_for_master())

    async def _wait_for_master(self) -> None:
        while True:
            await asyncio.sleep(PING_PAUSE_S)
            if await self._answers():
                break
        log.warning("the master answers again")
        self._ping = None

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                await self._meta.lookup([""], timeout_s=PING_TIMEOUT_S)
        except (Timeout, Unavailable, TimeoutError):
            return False
        except KvError:
            return True
        return True


def one(items: Sequence[T]) -> T:
    """The single answer to a single question."""
    (item,) = items
    return item
