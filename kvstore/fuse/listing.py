"""Directory listings: pages of the master's ordered list, then the temporary names of this mount.

A position is the number of names before it. The names seen so far stay in memory with the handle (80 MB for a million),
the entries of one page do; going back fetches the page again by name. So positions are stable while entries come and
go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvstore.core.types import Entry
from kvstore.fuse.inodes import Cached
from kvstore.fuse.localfile import LocalFile
from kvstore.fuse.tree import Question, Tree

PAGE_NAMES: Final = 1024
_UNKNOWN: Final = ""
"""In place of a name that a former process listed."""

Row = tuple[int, str, Cached | LocalFile]
"""Position behind it, name, what it leads to."""
LocalNames = Callable[[], list[tuple[str, LocalFile]]]


class Listing:
    """One open directory (a number of the master's). `local` gives the names of this mount alone; `hidden` ones are
    left out.
    """

    def __init__(self, tree: Tree, directory: int, local: LocalNames, hidden: Callable[[str], bool]) -> None:
        self.directory = directory
        self._tree, self._local, self._hidden = tree, local, hidden
        self._question: Question = tree.ask((directory, ""))
        self._rewind()

    def _rewind(self) -> None:
        self._names: list[str] = []
        """Names of the master's list so far, in order."""
        self._after = ""
        """The last name fetched, hidden or not."""
        self._complete = False
        self._page: dict[int, Entry] = {}
        """By position: what was fetched last."""
        self._page_range = range(0)
        self._asked_s = 0.0
        self._extra: list[tuple[str, LocalFile]] = []

    def mark(self, position: int) -> tuple[int, str]:
        """For `resume`: how many names of the master's list lie before this position, and the last of them."""
        names = min(position, len(self._names))
        return names, self._names[names - 1] if names else ""

    def resume(self, names: int, after: str) -> None:
        """Go on in another process where a `mark` was made."""
        self._names, self._after = [_UNKNOWN] * names, after

    async def row(self, position: int) -> Row | None:
        """The entry at this position, or the next one that is still there; None at the end. Position 0 begins anew."""
        if position == 0 or self._names[position - 1 : position + 1] == [_UNKNOWN, _UNKNOWN]:
            self._rewind()  # or back to before a resume, which only seekdir(3) does
        while True:
            while position >= len(self._names) and not self._complete:
                await self._fetch_next()
            if position >= len(self._names):
                return self._extra_row(position)
            if position not in self._page_range:
                await self._fetch_again(position)
            if position in self._page:
                name = self._names[position]
                return position + 1, name, self._cached(name, self._page[position])
            position += 1  # it went since

    def close(self) -> None:
        self._tree.answered((self.directory, ""), self._question)

    def _extra_row(self, position: int) -> Row | None:
        index = position - len(self._names)
        return (position + 1, *self._extra[index]) if index < len(self._extra) else None

    def _cached(self, name: str, entry: Entry) -> Cached:
        key = (self.directory, name)
        if self._question.void:  # a name changed here since: true when it was asked, not to be kept
            return self._tree.cache.by_name(key) or Cached(entry, self._asked_s - self._tree.cache.ttl_s, key)
        return self._tree.listed(entry, key, self._asked_s)

    async def _fetch_next(self) -> None:
        rows = await self._fetch(self._after)
        self._complete = len(rows) < PAGE_NAMES
        self._after = rows[-1][0] if rows else self._after
        shown = [(name, entry) for name, entry in rows if not self._hidden(name)]
        start = len(self._names)
        self._page = {start + i: entry for i, (_, entry) in enumerate(shown)}
        self._names += [name for name, _ in shown]
        self._page_range = range(start, len(self._names))
        if self._complete:
            self._extra = self._local()

    async def _fetch_again(self, position: int) -> None:
        """A page that was left. What came since is not shown, what went is skipped: positions stay."""
        rows = await self._fetch(self._names[position - 1] if position else "")
        entries = dict(rows)
        last = rows[-1][0] if len(rows) == PAGE_NAMES else None
        end = position
        while end < len(self._names) and (last is None or self._names[end] <= last):
            end += 1
        self._page_range = range(position, max(end, position + 1))
        self._page = {i: entries[self._names[i]] for i in range(position, end) if self._names[i] in entries}

    async def _fetch(self, after: str) -> list[tuple[str, Entry]]:
        self._question.void = False
        self._asked_s = self._tree.now_s()
        return await self._tree.master.list(self.directory, after, PAGE_NAMES)
