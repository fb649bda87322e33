"""The mount's link to the master: one call each, with one deadline, behind a circuit (rule 25).

After one call that got no answer the circuit is open: calls fail at once, those under way are given up after a moment,
and a ping in the background closes it again. So a master that is away costs one deadline, not one for each operation:
LMCache's look-up of a prompt is dozens of serial stats. A reader gets his miss then. A publish is asked once more when
the ping says that the master was only slow, waiting for its disk perhaps: it is the same answer again (rule 10).

Who answered others while a call waited is slow, not away: that call fails alone, and a ping decides.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from kvstore.client.messages import (
    Publication,
    PublishMode,
    PublishName,
    PublishResult,
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
LIFE_SIGN_S: Final = 0.3
"""Of the deadline of a publish: to learn whether a master that has not answered until then lives. A RENAME holds the
kernel's lock of its directory, so all of it together must not take longer than one call. What is under way when the
circuit opens may go on for as long.
"""
MOST: Final = 0.9
"""The part of a call's wait in which nobody was answered, for it to prove that the master is away."""


class Master:
    """What the mount asks the master. Bases are inode numbers of the master; the empty name is the base itself."""

    def __init__(self, meta: AsyncMeta, timeout_s: float = MOUNT_METADATA_TIMEOUT_S) -> None:
        self._meta, self._timeout_s = meta, timeout_s
        self._ping: asyncio.Task[None] | None = None
        self._away = False
        self._heard_s = -math.inf
        """When it last answered anybody, in the loop's time."""
        self._waits: set[asyncio.Timeout] = set()

    @property
    def is_away(self) -> bool:
        """Whether the circuit is open."""
        return self._away

    async def lookup(self, base: int, name: str = "") -> Entry:
        """Raises NotFound, Stale (the base is gone) …"""
        return whole(one(await self._ask(lambda t: self._meta.lookup([name], base=base, timeout_s=t))))

    async def publish(self, base: int, name: PublishName, mode: PublishMode) -> tuple[Entry, bool]:
        """The entry as it is now, and whether this call made it."""
        publication = Publication([name], mode)

        def publish(timeout_s: float) -> Awaitable[Sequence[PublishResult | KvError]]:
            return self._meta.publish([publication], base=base, timeout_s=timeout_s)

        try:
            result = one(await self._ask(publish, max(self._timeout_s - LIFE_SIGN_S, 0.5 * self._timeout_s)))
        except Timeout:
            if not await self._lives():
                raise
            result = one(await self._ask(publish))
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

    async def _ask(self, question: Callable[[float], Awaitable[T]], timeout_s: float | None = None) -> T:
        timeout_s = timeout_s or self._timeout_s
        if self.is_away:
            raise Unavailable("the master does not answer; waiting for it to come back")
        began_s = _now_s()
        try:
            async with asyncio.timeout(timeout_s + PING_PAUSE_S) as wait:
                with self._under_way(wait):
                    answer = await question(timeout_s)
        except (Timeout, Unavailable, TimeoutError) as error:
            self._unanswered(error, began_s)
            if isinstance(error, KvError):
                raise
            raise Timeout(f"the master did not answer within {timeout_s:g} s") from None
        except KvError:
            self._heard_s = _now_s()
            raise
        self._heard_s = _now_s()
        return answer

    @contextmanager
    def _under_way(self, wait: asyncio.Timeout) -> Iterator[None]:
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)

    async def _lives(self) -> bool:
        """Whether it answers a ping, soon after it did not answer a call."""
        if self._ping is not None:
            await asyncio.wait({self._ping}, timeout=LIFE_SIGN_S)
        return self._ping is None

    def _unanswered(self, error: Exception, began_s: float) -> None:
        now_s = _now_s()
        if isinstance(error, Unavailable) or now_s - max(began_s, self._heard_s) >= MOST * (now_s - began_s):
            self._open(error)
        if self._ping is None:
            self._ping = asyncio.create_task(self._wait_for_master())

    def _open(self, error: Exception) -> None:
        if self._away:
            return
        self._away = True
        log.warning("the master does not answer: %s", str(error) or type(error).__name__)
        end_s = _now_s() + LIFE_SIGN_S
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(min(wait.when() or end_s, end_s))

    async def _wait_for_master(self) -> None:
        while (error := await self._silence()) is not None:
            self._open(error)
            await asyncio.sleep(PING_PAUSE_S)
        self._heard_s = _now_s()
        if self._away:
            log.warning("the master answers again")
        self._away, self._ping = False, None

    async def _silence(self) -> Exception | None:
        """Asks it something. What that ended with, if it was no answer."""
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                await self._meta.lookup([""], timeout_s=PING_TIMEOUT_S)
        except (Timeout, Unavailable, TimeoutError) as error:
            return error
        except KvError:
            pass
        return None


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def one(items: Sequence[T]) -> T:
    """The single answer to a single question."""
    (item,) = items
    return item
