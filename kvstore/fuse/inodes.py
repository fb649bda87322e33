"""Numbers and remembered entries.

The kernel's inode numbers are the master's, with two exceptions (rule 23): the directory that the mount shows is 1, and
numbers with bit 62 are staging files of this mount. `EntryCache` remembers what the master said, for as long as the
time to live allows, and longer while the master is away. Pure: time comes in.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from kvstore.core.types import LOCAL_INODE_BIT, Entry

KERNEL_ROOT: Final = 1
_GENERATION_SHIFT: Final = 40
MAX_FILES: Final = 32_768
"""Remembered files, about 700 bytes each. The kernel's own cache is bigger; what fell out here costs one call."""
MAX_DIRECTORIES: Final = 65_536
"""Directories are kept longer: they must be served while the master is away (rule 27)."""

Key = tuple[int, str]
"""Inode of the directory at the master, name."""


class Numbers:
    """Inode numbers of the kernel ⇄ of the master, and new local ones."""

    def __init__(self, root: int, generation: int = 0) -> None:
        """`generation`: of the process, among those that serve one mount one after the other."""
        self.root = root
        self._local = itertools.count((LOCAL_INODE_BIT | generation << _GENERATION_SHIFT) + 1)

    def to_master(self, inode: int) -> int:
        return self.root if inode == KERNEL_ROOT else inode

    def to_kernel(self, inode: int) -> int:
        return KERNEL_ROOT if inode == self.root else inode

    def new_local(self) -> int:
        """Never the same twice in the life of a mount."""
        return next(self._local)

    @staticmethod
    def is_local(inode: int) -> bool:
        return bool(inode & LOCAL_INODE_BIT)


class Cached(NamedTuple):
    """An entry as the master told it at `fetched_s` (monotonic). `key` is the name it was last seen under."""

    entry: Entry
    fetched_s: float
    key: Key | None

    def left_s(self, now_s: float, ttl_s: float) -> float:
        """How long it may still be used; 0 when it is over."""
        return max(0.0, self.fetched_s + ttl_s - now_s)


class EntryCache:
    """Entries by number, and numbers by name. Positive answers only.

    Invariant: every name in `_names` leads to a number in `_files` or `_directories` whose `key` is that name.
    """

    def __init__(self, ttl_s: float, stale_max_s: float) -> None:
        self.ttl_s, self.stale_max_s = ttl_s, stale_max_s
        self._files: OrderedDict[int, Cached] = OrderedDict()
        self._directories: OrderedDict[int, Cached] = OrderedDict()
        self._names: dict[Key, int] = {}
        self._former: OrderedDict[int, Key] = OrderedDict()
        self.on_directory: Callable[[Cached], None] = lambda cached: None

    def put(self, entry: Entry, key: Key | None, now_s: float) -> Cached:
        """Remember what the master just said of `key` (None: asked by number; the name known so far stays)."""
        table = self._table(entry)
        old = table.pop(entry.inode, None)
        if key is None and old is not None:
            key = old.key
        elif old is not None and old.key != key:
            self._forget_name(old.key)
        if key is not None:
            self._replace_name(key, entry.inode)
        cached = table[entry.inode] = Cached(entry, now_s, key)
        if entry.is_dir and (old is None or old.key != key or old.entry.mode != entry.mode):
            self.on_directory(cached)
        self._trim(table, MAX_DIRECTORIES if entry.is_dir else MAX_FILES)
        return cached

    def by_inode(self, inode: int) -> Cached | None:
        """Of any age."""
        if inode in self._directories:
            self._directories.move_to_end(inode)
            return self._directories[inode]
        return self._files.get(inode)

    def by_name(self, key: Key) -> Cached | None:
        """Of any age."""
        inode = self._names.get(key)
        return None if inode is None else self.by_inode(inode)

    def fresh(self, cached: Cached | None, now_s: float) -> Cached | None:
        """It, unless its time to live is over."""
        return cached if cached and cached.left_s(now_s, self.ttl_s) > 0 else None

    def usable_without_master(self, cached: Cached | None, now_s: float) -> Cached | None:
        """It, when it may be served while the master is away: directories always, files up to `stale_max_s`."""
        if cached is None or cached.entry.is_dir:
            return cached
        return cached if cached.left_s(now_s, self.ttl_s + self.stale_max_s) > 0 else None

    def forget_name(self, key: Key) -> None:
        """The name is gone, or leads elsewhere."""
        self._forget_name(key)

    def forget_inode(self, inode: int) -> None:
        cached = self._files.pop(inode, None) or self._directories.pop(inode, None)
        if cached and cached.key and self._names.get(cached.key) == inode:
            del self._names[cached.key]
        if cached and cached.key:
            self._remember(inode, cached.key)

    def touch(self, inode: int, now_ns: int) -> None:
        """A directory's content changed here: its times are what the master's clock says, near enough until it is
        asked again.
        """
        cached = self._directories.get(inode)
        if cached:
            self._directories[inode] = cached._replace(entry=cached.entry._replace(mtime_ns=now_ns, ctime_ns=now_ns))

    def directory_name(self, inode: int) -> str:
        """The name under which a directory was last seen, "" if it is not known."""
        cached = self._directories.get(inode)
        return cached.key[1] if cached and cached.key else ""

    def validate(self) -> None:
        """The invariant; for tests."""
        for key, inode in self._names.items():
            cached = self._files.get(inode) or self._directories.get(inode)
            assert cached is not None, (key, inode)
            assert cached.key == key, (key, cached)

    def _table(self, entry: Entry) -> OrderedDict[int, Cached]:
        return self._directories if entry.is_dir else self._files

    def _replace_name(self, key: Key, inode: int) -> None:
        old = self._names.get(key)
        if old is not None and old != inode:
            self._forget_name(key)
        self._names[key] = inode

    def _forget_name(self, key: Key | None) -> None:
        inode = self._names.pop(key, None) if key else None
        if inode is None:
            return
        for table in (self._files, self._directories):
            if inode in table and table[inode].key == key:
                table[inode] = table[inode]._replace(key=None)
        assert key is not None
        self._remember(inode, key)

    def _remember(self, inode: int, key: Key) -> None:
        self._former[inode] = key
        if len(self._former) > 4096:
            self._former.popitem(last=False)

    def last_key(self, inode: int) -> Key | None:
        """The name it has, or had not long ago."""
        cached = self.by_inode(inode)
        return (cached.key if cached else None) or self._former.get(inode)

    def _trim(self, table: OrderedDict[int, Cached], limit: int) -> None:
        while len(table) > limit:
            _, cached = table.popitem(last=False)
            if cached.key:
                self._names.pop(cached.key, None)
