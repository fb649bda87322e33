"""The table of local files: by number, by name, and the hand-shake that leads a write-open of a sealed file to one.

A sealed file is never written, and its inode number stands for its content: readers have it in their page cache, or
read its block by passthrough. So an open for writing is answered ESTALE once; the kernel looks the name up again, is
answered a local inode (`LocalFiles.expected`), and opens that. Until it has, every look-up of the name is answered the
local inode; before and after, the published one. So readers on this mount see what was published last, as everybody
else does, and the writer sees its own bytes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Final

from kvstore.core.types import Entry
from kvstore.fuse.inodes import Numbers
from kvstore.fuse.localfile import Key, LocalFile
from kvstore.fuse.names import TempNames
from kvstore.fuse.saved import NOTHING_SAVED, Saved

HAND_SHAKE_S: Final = 1.0
"""How long the second open may take to come. It comes within microseconds, unless it is refused on the way."""
CONTESTED_S: Final = 10.0
"""How long after a lost race for a temporary name each look-up is answered a number of its own: the kernel's second try
may have to wait for the directory's lock behind many others."""
GRACE_S: Final = 0.1
"""How long after an ESTALE every look-up leads to the writers' file, while anybody has it open for writing."""
MAX_ALIASES: Final = 1024
"""Numbers that were given for one look-up each; its open follows within microseconds."""


class LocalFiles:
    """Every local file of a mount, until its last handle and its last name are gone.

    * `by_key`: ordinary names that are open for writing, or about to be;
    * `temps`: the versions of temporary names;
    * `_opens`: open handles by the number that the kernel opened. All handles of a number are of one file;
    * `_contested`: temporary names for whose versions two writers raced not long ago, each with the time until which
      every look-up is answered a number of its own (`_aliases`), so that the next open cannot lose the race again: the
      kernel tries only once more.
    """

    def __init__(self, numbers: Numbers, saved: Saved = NOTHING_SAVED) -> None:
        self._numbers, self._saved = numbers, saved
        self._files: dict[int, LocalFile] = {}
        self._opens: Counter[int] = Counter()
        self._aliases: OrderedDict[int, LocalFile] = OrderedDict()
        self._contested: dict[Key, float] = {}
        self._wanted: dict[int, tuple[int, float]] = {}
        self._former: OrderedDict[int, Key] = OrderedDict()
        self.by_key: dict[Key, LocalFile] = {}
        self.temps: TempNames[LocalFile] = TempNames()

    def get(self, inode: int) -> LocalFile | None:
        """The file with this number."""
        file = self._files.get(inode)
        if file is None and (alias := self._aliases.get(inode)) is not None:
            return alias if self._files.get(alias.inode) is alias else None
        return file

    def all(self) -> list[LocalFile]:
        return list(self._files.values())

    def is_open(self, number: int) -> bool:
        """Whether somebody has a file open as this number."""
        return self._opens[number] > 0

    def new(self, key: Key, temporary: bool, mode: int, uid: int, gid: int, now_ns: int) -> LocalFile:
        """An empty one."""
        number = self._numbers.new_local()
        file = LocalFile(number, number, key, temporary, mode, uid, gid, now_ns, now_ns)
        self.add(file)
        if temporary:
            file.temp_key = key
        else:
            self.by_key[key] = file
        return file

    def add(self, file: LocalFile) -> None:
        """Under its number; the names are the caller's."""
        self._files[file.inode] = file
        self._saved.touch(file)

    def shown(self, key: Key, now_s: float) -> tuple[LocalFile, int] | None:
        """What a look-up of a temporary name is answered: the version, and the number to give for it."""
        version = self.temps.lookup(key)
        if version is None:
            return None
        version.looked_up = True
        self._saved.touch(version)
        if now_s >= self._contested.get(key, 0.0):
            return version, version.inode
        alias = self._numbers.new_local()
        self._aliases[alias] = version
        if len(self._aliases) > MAX_ALIASES:
            self._aliases.popitem(last=False)
        return version, alias

    def contested(self, key: Key | None, now_s: float) -> None:
        """An open of this temporary name came too late for the version that its look-up was answered."""
        if key is not None:
            self._contested[key] = now_s + CONTESTED_S

    def want(self, inode: int, key: Key | None, now_s: float) -> None:
        """A write-open of sealed `inode`, last seen as `key`, is about to be answered ESTALE."""
        file = self.by_key.get(key) if key else None
        if file is not None:
            _expect(file, 1, now_s + HAND_SHAKE_S)
            return
        count, _ = self._wanted.get(inode, (0, 0.0))
        self._wanted[inode] = (count + 1, now_s + HAND_SHAKE_S)
        self._saved.wanted(inode, count + 1)

    def resume_hand_shakes(self, wanted: Mapping[int, int], now_s: float) -> None:
        """Those of a former process: the kernel's second tries are still to come."""
        for inode, count in wanted.items():
            self._wanted[inode] = (count, now_s + HAND_SHAKE_S)
        for file in self.by_key.values():
            if file.expected_opens:
                _expect(file, 0, now_s + HAND_SHAKE_S)

    def former_key(self, number: int) -> Key | None:
        """Of a temporary version that is gone."""
        return self._former.get(number)

    def private_version(self, number: int, now_ns: int) -> LocalFile | None:
        """An empty version behind a number that was given for one look-up: nobody else has it, so its open need not
        fail, whatever became of the version that it stood for.
        """
        found = self._aliases.pop(number, None)
        if found is None or found.temp_key is None:
            return None
        fresh = LocalFile(
            self._numbers.new_local(), number, found.temp_key, True, found.mode, found.uid, found.gid, now_ns, now_ns,
            temp_key=found.temp_key, looked_up=True,
        )  # fmt: skip
        self.add(fresh)
        self.temps.opened(found.temp_key, fresh)
        return fresh

    def expected(self, key: Key, entry: Entry, now_s: float) -> LocalFile | None:
        """The local file that a look-up of `key`, which leads to `entry`, must answer instead; None as a rule."""
        count, until_s = self._wanted.pop(entry.inode, (0, 0.0))
        if count:
            self._saved.wanted(entry.inode, 0)
        file = self.by_key.get(key)
        if count and now_s < until_s:
            file = file or self._from_entry(key, entry)
            _expect(file, count, until_s)
        if file is None or not file.is_expected(now_s):
            return None
        file.looked_up = True
        self._saved.touch(file)
        return file

    def opened(self, file: LocalFile, number: int, writes: bool) -> None:
        """A new handle, which the kernel opened as `number`."""
        self._opens[number] += 1
        file.handles += 1
        if writes:
            file.writers += 1
            self.arrived(file)

    def arrived(self, file: LocalFile) -> None:
        """The second try that a look-up of its name led here."""
        file.expected_opens = max(0, file.expected_opens - 1)
        if file.expected_opens == 0:
            file.arrived.set()

    def expect_nobody(self, file: LocalFile) -> None:
        """Whoever should have come is late, or was refused on the way: look-ups lead to what was published again."""
        file.expected_opens = 0
        file.arrived.set()

    def closed(self, file: LocalFile, number: int, writes: bool) -> None:
        """A handle is gone."""
        self._opens[number] -= 1
        if not self._opens[number]:
            del self._opens[number]
        file.handles -= 1
        file.writers -= writes
        if file.writers == 0:
            file.grace_until_s = 0.0
        if file.handles == 0:
            file.fixed = False
        self._saved.touch(file)

    def detach(self, file: LocalFile) -> None:
        """It has lost its name: whoever has it open goes on, nobody else will see it."""
        self.forget_name(file)
        file.key = None
        self._saved.touch(file)

    def forget_name(self, file: LocalFile) -> None:
        """Nobody will find it by its name any more, which it keeps."""
        if file.key is not None and self.by_key.get(file.key) is file:
            del self.by_key[file.key]

    def detach_key(self, key: Key) -> None:
        file = self.by_key.get(key)
        if file is not None:
            self.detach(file)

    def move(self, file: LocalFile, key: Key) -> None:
        """Its name is `key` now, an ordinary one; whoever was there has lost it."""
        if self.by_key.get(key) is not file:
            self.detach_key(key)
        self.detach(file)
        file.key, file.temporary = key, False
        self.by_key[key] = file

    def rewrite(self, old: LocalFile, number: int, now_ns: int, now_s: float) -> LocalFile:
        """A write-open, as `number`, of closed temporary `old`: an empty version takes the number, the old bytes keep
        theirs or get another.
        """
        assert old.key is not None
        fresh = LocalFile(
            self._numbers.new_local(), number, old.key, True, old.mode, old.uid, old.gid, now_ns, now_ns,
            temp_key=old.key, looked_up=True,
        )  # fmt: skip
        if self._aliases.pop(number, None) is None:
            old.inode = self._numbers.new_local()
            self.add(old)
        self.add(fresh)
        self.temps.rewritten(old.key, old, fresh, now_s)
        return fresh

    def remove(self, file: LocalFile) -> None:
        """Out of every table."""
        if file.key is not None:
            self.temps.remove(file.key, file)
        self.detach(file)
        self._files.pop(file.inode, None)
        if file.temp_key is not None:
            self._former[file.inode] = file.temp_key
            if len(self._former) > MAX_ALIASES:
                self._former.popitem(last=False)
        self._saved.remove(file)

    def abandoned(self, now_s: float) -> Iterator[LocalFile]:
        """Ordinary files that nobody has open and no open is on its way to."""
        for file in list(self.by_key.values()):
            if file.handles == 0 and not file.is_expected(now_s):
                yield file
        for inode, (_, until_s) in list(self._wanted.items()):
            if now_s >= until_s:
                del self._wanted[inode]
                self._saved.wanted(inode, 0)
        for key, until_s in list(self._contested.items()):
            if now_s >= until_s:
                del self._contested[key]

    def _from_entry(self, key: Key, entry: Entry) -> LocalFile:
        file = self.new(key, False, entry.mode, entry.uid, entry.gid, entry.mtime_ns)
        file.entry, file.published, file.size_bytes, file.ctime_ns = entry, True, entry.length_bytes, entry.ctime_ns
        return file


def _expect(file: LocalFile, count: int, until_s: float) -> None:
    file.expected_opens += count
    file.expected_until_s = max(file.expected_until_s, until_s)
    file.grace_until_s = max(file.grace_until_s, until_s - HAND_SHAKE_S + GRACE_S)
    file.arrived.clear()
