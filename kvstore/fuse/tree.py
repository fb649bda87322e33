"""Names and entries: the cache in front of the master, and what may be served while the master is away (rules 23, 25,
27).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.core.errors import NotFound, Stale, Timeout, Unavailable
from kvstore.core.recently import Recently
from kvstore.core.types import Entry
from kvstore.fuse.circuit import Master
from kvstore.fuse.inodes import Cached, EntryCache, Key
from kvstore.runtime import Runtime

AWAY: Final = (Timeout, Unavailable)
"""How a master that does not answer shows itself."""
UNREADABLE_S: Final = 60.0
"""So long a name whose block could not be read is remembered: LMCache computes and stores it again meanwhile."""


class Tree:
    """Entries by name and by number. All numbers here are the master's."""

    def __init__(self, master: Master, cache: EntryCache, runtime: Runtime) -> None:
        self.master, self.cache, self._runtime = master, cache, runtime
        self._asking: dict[Key, list[Question]] = {}
        self.unreadable: Recently[Key] = Recently(UNREADABLE_S)

    def left_s(self, cached: Cached) -> float:
        """How long the kernel may keep it."""
        return cached.left_s(self.now_s(), self.cache.ttl_s)

    async def by_name(self, key: Key) -> Cached:
        """What the name leads to. Raises NotFound; while the master is away, for names that are not remembered, too."""
        cached = self.cache.fresh(self.cache.by_name(key), self.now_s())
        return cached or await self._ask_name(key)

    async def by_inode(self, inode: int) -> Cached:
        """The entry with this number. Raises Stale when there is none any more, NotFound when its block is nowhere."""
        cached = self.cache.fresh(self.cache.by_inode(inode), self.now_s())
        return cached or await self.ask_inode(inode)

    async def ask_inode(self, inode: int) -> Cached:
        """Like `by_inode`, from the master while it answers."""
        try:
            entry = await self.master.lookup(inode)
        except AWAY:
            cached = self.cache.by_inode(inode)
            if cached is None:
                # Of unknown kind: ENOENT for a directory would make processes lose their working directory.
                raise
            return self._without_master(cached)
        except (NotFound, Stale):
            self.cache.forget_inode(inode)
            raise
        return self.cache.put(entry, None, self.now_s())

    def learn(self, entry: Entry, key: Key | None) -> Cached:
        """An entry that a change made here brought back. Questions about the name that are on their way are void."""
        if key is not None:
            self._void(key)
        return self.cache.put(entry, key, self.now_s())

    def remember(self, entry: Entry, key: Key | None) -> None:
        """What a former process knew: too old to serve, unless the master is away."""
        self.cache.put(entry, key, self.now_s() - self.cache.ttl_s)

    def learn_attributes(self, entry: Entry) -> Cached:
        """An entry whose attributes changed here; its names are what they were."""
        return self.cache.put(entry, None, self.now_s())

    def listed(self, entry: Entry, key: Key, asked_s: float) -> Cached:
        """A row of a listing that was asked for at `asked_s`: never replaces what is newer."""
        known = self.cache.by_name(key)
        if key in self._asking or (known and known.fetched_s >= asked_s):
            return known or Cached(entry, asked_s - self.cache.ttl_s, key)
        return self.cache.put(entry, key, asked_s)

    def gone(self, key: Key) -> None:
        """A change made here took the name away."""
        self._void(key)
        self.cache.forget_name(key)

    def directory_changed(self, directory: int) -> None:
        """A name in it changed here. Not asked again: that would cost every put another call of the master."""
        self.cache.touch(directory, self._runtime.wall_ns())

    async def _ask_name(self, key: Key) -> Cached:
        with self._question(key) as question:
            try:
                entry = await self.master.lookup(*key)
            except AWAY:
                return self._without_master(self.cache.by_name(key))
            except NotFound:
                if not question.void:
                    self.cache.forget_name(key)
                raise
            if question.void:  # right when it was asked, changed here since: use it once, keep nothing
                return self.cache.by_name(key) or Cached(entry, self.now_s() - self.cache.ttl_s, key)
        return self.cache.put(entry, key, self.now_s())

    def _without_master(self, cached: Cached | None) -> Cached:
        usable = self.cache.usable_without_master(cached, self.now_s())
        if usable is None:
            raise NotFound("not remembered, and the master does not answer", reason="unavailable")
        return usable

    @contextmanager
    def _question(self, key: Key) -> Iterator[Question]:
        question = self.ask(key)
        try:
            yield question
        finally:
            self.answered(key, question)

    def ask(self, key: Key) -> Question:
        """Begin a question about a name (the empty one: about all names of a directory). End it with `answered`."""
        question = Question()
        self._asking.setdefault(key, []).append(question)
        return question

    def answered(self, key: Key, question: Question) -> None:
        left = self._asking[key]
        left.remove(question)
        if not left:
            del self._asking[key]

    def _void(self, key: Key) -> None:
        directory, _ = key
        for question in (*self._asking.get(key, ()), *self._asking.get((directory, ""), ())):
            question.void = True

    def now_s(self) -> float:
        """Monotonic."""
        return self._runtime.monotonic_s()


class Question:
    """A look-up or a listing on its way.

    `void`: a name changed here meanwhile, so the answer may be older than what is known.
    """

    def __init__(self) -> None:
        self.void = False
