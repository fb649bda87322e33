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
from kvstore.core.errors import KvError, Stale, Timeout, Unavailable
from kvstore.core.limits import MOUNT_METADATA_TIMEOUT_S
from kvstore.core.types import Entry

log = logging.getLogger(__name__)
T = TypeVar("T")
Question = Callable[[int, float], Awaitable[T]]
"""Of a base and a timeout in seconds. It raises what the master says of the one thing that it asks for."""

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
    """What the mount asks the master. Bases are inode numbers of the master; the empty name is the base itself.

    The directory that the mount shows keeps the number that it had at the start, whatever becomes of it: when it is
    another one by now (removed and made anew, or taken back by a rebuild), its path is followed.
    """

    def __init__(self, meta: AsyncMeta, timeout_s: float = MOUNT_METADATA_TIMEOUT_S) -> None:
        self._meta, self._timeout_s = meta, timeout_s
        self._ping: asyncio.Task[None] | None = None
        self._away = False
        self._heard_s = -math.inf
        """When it last answered anybody, in the loop's time."""
        self._waits: set[asyncio.Timeout] = set()
        self._root = self._root_now = 0
        """What the mount calls the directory that it shows, and its number at the master."""
        self._root_path = ""

    @property
    def is_away(self) -> bool:
        """Whether the circuit is open."""
        return self._away

    def check(self) -> None:
        """Raises Unavailable while the circuit is open: for whoever has work to do first that would be in vain."""
        if self.is_away:
            raise Unavailable("the master does not answer; waiting for it to come back")

    def shows(self, root: int, path: str) -> None:
        """The directory `root` at this path from the root of the store, from now on called `root`."""
        self._root = self._root_now = root
        self._root_path = path

    async def lookup(self, base: int, name: str = "") -> Entry:
        """Raises NotFound, Stale (the base is gone) …"""

        async def ask(base: int, timeout_s: float) -> Entry:
            return whole(one(await self._meta.lookup([name], base=base, timeout_s=timeout_s)))

        return self._renamed(await self._ask(base, ask))

    async def publish(self, base: int, name: PublishName, mode: PublishMode) -> tuple[Entry, bool]:
        """The entry as it is now, and whether this call made it."""
        publication = Publication([name], mode)

        async def ask(base: int, timeout_s: float) -> PublishResult:
            result = one(await self._meta.publish([publication], base=base, timeout_s=timeout_s))
            if isinstance(result, KvError):
                raise result
            return result

        try:
            result = await self._ask(base, ask, max(self._timeout_s - LIFE_SIGN_S, 0.5 * self._timeout_s))
        except Timeout:
            if not await self._lives():
                raise
            result = await self._ask(base, ask)
        return one(result.entries), one(result.created)

    async def mkdir(self, base: int, name: str, mode: int, uid: int, gid: int) -> Entry:
        async def ask(base: int, timeout_s: float) -> Entry:
            rows = await self._meta.mkdir([name], base=base, mode=mode, uid=uid, gid=gid, timeout_s=timeout_s)
            return whole(one(rows))

        return await self._ask(base, ask)

    async def make_directories(self, path: str) -> Entry:
        """The directory at a path from the root of the store, made with its parents if it is not there."""
        if not path:
            return await self.lookup(0)

        async def ask(base: int, timeout_s: float) -> Entry:
            return whole(one(await self._meta.mkdir([path], base=base, parents=True, timeout_s=timeout_s)))

        return await self._ask(0, ask)

    async def remove(self, base: int, name: str, kind: RemoveKind, inode: int) -> None:
        async def ask(base: int, timeout_s: float) -> None:
            _check(await self._meta.remove([RemoveName(name, kind, inode)], base=base, timeout_s=timeout_s))

        await self._ask(base, ask)

    async def rename(self, name: RenameName) -> None:
        async def ask(base: int, timeout_s: float) -> None:
            now = name._replace(from_base=self._number(name.from_base), to_base=self._number(name.to_base))
            _check(await self._meta.rename([now], timeout_s=timeout_s))

        await self._ask(self._root if name.to_base == self._root else name.from_base, ask)

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
        async def ask(base: int, timeout_s: float) -> Entry:
            return await self._meta.set_attr(
                name, base=base, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns, timeout_s=timeout_s
            )

        return self._renamed(await self._ask(base, ask))

    async def list(self, base: int, after: str, limit: int) -> list[tuple[str, Entry]]:
        """The next names of a directory in order."""

        async def ask(base: int, timeout_s: float) -> list[tuple[str, Entry]]:
            return [row async for row in self._meta.list(base=base, after=after, limit=limit, timeout_s=timeout_s)]

        return await self._ask(base, ask)

    async def statfs(self, base: int) -> Statfs:
        return await self._ask(base, lambda base, t: self._meta.statfs(base=base, timeout_s=t))

    async def policies(self, inode: int) -> Holding:
        """Quota, TTL and pin that hold for an entry."""
        return await self._ask(inode, lambda base, t: self._meta.policies.of("", base=base, timeout_s=t))

    async def close(self) -> None:
        if self._ping is not None:
            self._ping.cancel()
            await asyncio.gather(self._ping, return_exceptions=True)

    async def _ask(self, base: int, question: Question[T], timeout_s: float | None = None) -> T:
        """The answer to a question about a base, asked once more if that is the mount's directory and has moved."""
        timeout_s, asked = timeout_s or self._timeout_s, self._number(base)
        try:
            return await self._ask_once(asked, question, timeout_s)
        except Stale:
            if base != self._root or not await self._has_moved(asked):
                raise
        return await self._ask_once(self._root_now, question, timeout_s)

    async def _has_moved(self, known: int) -> bool:
        """Whether another directory is at the mount's path by now; it is made if there is none, as at the start."""
        if self._root_now == known and self._root_path:
            self._root_now = (await self.make_directories(self._root_path)).inode
        return self._root_now != known

    def _number(self, base: int) -> int:
        return self._root_now if base == self._root else base

    def _renamed(self, entry: Entry) -> Entry:
        """As the mount calls it."""
        return entry._replace(inode=self._root) if entry.inode == self._root_now else entry

    async def _ask_once(self, base: int, question: Question[T], timeout_s: float) -> T:
        self.check()
        began_s = _now_s()
        try:
            async with asyncio.timeout(timeout_s + PING_PAUSE_S) as wait:
                with self._under_way(wait):
                    answer = await question(base, timeout_s)
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
        began_s = _now_s()
        while (error := await self._silence()) is not None:
            if isinstance(error, Unavailable) or self._heard_s < began_s:
                self._open(error)
            await asyncio.sleep(PING_PAUSE_S)
            began_s = _now_s()
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


def _check(failures: Sequence[KvError | None]) -> None:
    error = one(failures)
    if error is not None:
        raise error


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def one(items: Sequence[T]) -> T:
    """The single answer to a single question."""
    (item,) = items
    return item
