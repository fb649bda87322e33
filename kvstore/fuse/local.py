"""The table of local files: by number, by name, and the hand-shake that leads a write-open of a sealed file to one.

A sealed file is never written, and its inode number stands for its content: readers have it in their page cache. So an
open for writing is answered ESTALE once; the kernel looks the name up again, is answered a local inode
(`LocalFiles.expected`), and opens that. Until it has, every look-up of the name is answered the local inode; before and
after, the published one. So readers on this mount see what was published last, as everybody else does, and the writer
sees its own bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from kvstore.core.types import Entry
from kvstore.fuse.inodes import Numbers
from kvstore.fuse.localfile import Key, LocalFile
from kvstore.fuse.names import TempNames

HAND_SHAKE_S: Final = 1.0
"""How long the second open may take to come. It comes within microseconds, unless it is refused on the way."""

MAX_GONE: Final = 1024
"""Temporary versions remembered after they went; an open follows its look-up within microseconds."""


class LocalFiles:
    """Every local file of a mount, until its last handle and its last name are gone.

    * `by_key`: ordinary names that are open for writing, or about to be;
    * `temps`: the versions of temporary names;
    * `_opened_as`: by the number that the kernel used, the files that were opened as it and are still open. Between a
      look-up and its open a temporary version may be renamed or written anew; then that open gets a version of its own
      behind the number;
    * `_gone`: temporary versions that went not long ago, for opens that are still on their way.
    """

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._files: dict[int, LocalFile] = {}
        self._opened_as: dict[int, list[LocalFile]] = {}
        self._gone: OrderedDict[int, LocalFile] = OrderedDict()
        self._wanted: dict[int, tuple[int, float]] = {}
        self.by_key: dict[Key, LocalFile] = {}
        self.temps: TempNames[LocalFile] = TempNames()

    def get(self, inode: int) -> LocalFile | None:
        """The file with this number, or else the one that was opened last as it."""
        opened = self._opened_as.get(inode)
        return self._files.get(inode) or (opened[-1] if opened else None)

    def to_open(self, inode: int) -> LocalFile | None:
        """What an open of this number finds: a temporary version may have gone since its look-up."""
        return self.get(inode) or self._gone.get(inode)

    def all(self) -> list[LocalFile]:
        return list(self._files.values())

    def new(self, key: Key, temporary: bool, mode: int, uid: int, gid: int, now_ns: int) -> LocalFile:
        """An empty one."""
        file = LocalFile(self._numbers.new_local(), key, temporary, mode, uid, gid, now_ns, now_ns)
        self._files[file.inode] = file
        if temporary:
            file.temp_key = key
        else:
            self.by_key[key] = file
        return file

    def want(self, inode: int, key: Key | None, now_s: float) -> None:
        """A write-open of sealed `inode`, last seen as `key`, is about to be answered ESTALE."""
        file = self.by_key.get(key) if key else None
        if file is not None:
            _expect(file, 1, now_s + HAND_SHAKE_S)
            return
        count, _ = self._wanted.get(inode, (0, 0.0))
        self._wanted[inode] = (count + 1, now_s + HAND_SHAKE_S)

    def expected(self, key: Key, entry: Entry, now_s: float) -> LocalFile | None:
        """The local file that a look-up of `key`, which leads to `entry`, must answer instead; None as a rule."""
        count, until_s = self._wanted.pop(entry.inode, (0, 0.0))
        file = self.by_key.get(key)
        if count and now_s < until_s:
            file = file or self._from_entry(key, entry)
            _expect(file, count, until_s)
        return file if file and file.is_expected(now_s) else None

    def opened(self, file: LocalFile, number: int, writes: bool) -> None:
        """A new handle, which the kernel opened as `number`."""
        self._opened_as.setdefault(number, []).append(file)
        file.handles += 1
        if writes:
            file.writers += 1
            file.expected_opens = max(0, file.expected_opens - 1)

    def closed(self, file: LocalFile, number: int, writes: bool) -> None:
        """A handle is gone."""
        opened = self._opened_as[number]
        opened.remove(file)
        if not opened:
            del self._opened_as[number]
        file.handles -= 1
        file.writers -= writes

    def detach(self, file: LocalFile) -> None:
        """It has lost its name: whoever has it open goes on, nobody else will see it."""
        if file.key is not None and self.by_key.get(file.key) is file:
            del self.by_key[file.key]
        file.key = None

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

    def rewrite(self, old: LocalFile, now_ns: int, now_s: float) -> LocalFile:
        """A write-open of closed temporary `old`: an empty version under its number, the old bytes get another."""
        assert old.key is not None
        fresh = LocalFile(old.inode, old.key, True, old.mode, old.uid, old.gid, now_ns, now_ns)
        fresh.temp_key, fresh.inherited, old.inode = old.key, True, self._numbers.new_local()
        self._files[fresh.inode], self._files[old.inode] = fresh, old
        self.temps.rewritten(old.key, old, fresh, now_s)
        return fresh

    def remove(self, file: LocalFile) -> None:
        """Out of every table."""
        if file.key is not None:
            self.temps.remove(file.key, file)
        self.detach(file)
        self._files.pop(file.inode, None)
        if file.temp_key is not None:
            self._gone[file.inode] = file
            if len(self._gone) > MAX_GONE:
                self._gone.popitem(last=False)

    def abandoned(self, now_s: float) -> Iterator[LocalFile]:
        """Ordinary files that nobody has open and no open is on its way to."""
        for file in list(self.by_key.values()):
            if file.handles == 0 and not file.is_expected(now_s):
                yield file
        for inode, (_, until_s) in list(self._wanted.items()):
            if now_s >= until_s:
                del self._wanted[inode]

    def _from_entry(self, key: Key, entry: Entry) -> LocalFile:
        file = self.new(key, False, entry.mode, entry.uid, entry.gid, entry.mtime_ns)
        file.entry, file.published, file.size_bytes, file.ctime_ns = entry, True, entry.length_bytes, entry.ctime_ns
        return file


def _expect(file: LocalFile, count: int, until_s: float) -> None:
    file.expected_opens += count
    file.expected_until_s = max(file.expected_until_s, until_s)
