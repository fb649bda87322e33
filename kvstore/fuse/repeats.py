"""Requests that the keeper sends again: the former process may have carried them out, and died before it said so.

Whoever made such a call must not be told that its file is gone, or there already, when it was itself who did it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from kvstore.fuse.localfile import Key
from kvstore.keeper.channel import Again

_MKDIR, _UNLINK, _RMDIR, _RENAME, _CREATE, _RENAME2 = 9, 10, 11, 12, 35, 45
TAKEN_FOR_S: Final = 10.0
_SAME: Final = {_RENAME2: _RENAME}


class Repeats:
    """Each counts once. Inode numbers are the kernel's."""

    def __init__(self, again: Iterable[Again] = ()) -> None:
        self._due = Counter(a._replace(opcode=_SAME.get(a.opcode, a.opcode)) for a in again)
        self._taken: list[tuple[Key, float]] = []

    def mkdir(self, parent: int, name: bytes) -> bool:
        return self._take(Again(_MKDIR, parent, name, 0, b""))

    def unlink(self, parent: int, name: bytes) -> bool:
        return self._take(Again(_UNLINK, parent, name, 0, b""))

    def rmdir(self, parent: int, name: bytes) -> bool:
        return self._take(Again(_RMDIR, parent, name, 0, b""))

    def create(self, parent: int, name: bytes) -> bool:
        return self._take(Again(_CREATE, parent, name, 0, b""))

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes) -> bool:
        return self._take(Again(_RENAME, parent, name, new_parent, new_name))

    def took(self, source: Key, now_s: float) -> None:
        """A repeated rename of a temporary name took a version; perhaps another writer's, since its own was renamed
        before. That writer's rename will find none.
        """
        self._taken.append((source, now_s + TAKEN_FOR_S))

    def was_taken(self, source: Key, now_s: float) -> bool:
        """Whether a rename that finds nothing was carried out by a repeated one."""
        self._taken = [(key, until_s) for key, until_s in self._taken if now_s < until_s]
        mine = next((item for item in self._taken if item[0] == source), None)
        if mine is not None:
            self._taken.remove(mine)
        return mine is not None

    def _take(self, wanted: Again) -> bool:
        if not self._due[wanted]:
            return False
        self._due[wanted] -= 1
        return True
