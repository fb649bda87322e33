"""Temporary names (rule 24): which names they are, and the versions that each of them has.

A temporary name never reaches the master. It is a list of versions, one for each open that wrote it, every one with an
inode number and a staging file of its own; so two writers who share ``X.tmp`` cannot mix their bytes, and each of their
renames finds a whole version. Of several, a RENAME and an UNLINK mean one that their own process opened; the table is
for the choice among those, and among all where there are none (``mv`` renames what another process wrote):

=================== ==================== ========================================= ==========
the kernel asks     only open versions   a closed version                          none
=================== ==================== ========================================= ==========
LOOKUP              no such name         the one that was flushed last             no such name
CREATE              a new version        a new version                             a new version
OPEN to write       –                    the number gets a fresh file, the closed  –
                                         bytes move to a fresh number
RENAME to another   the oldest           the one the last LOOKUP answered, else    no such name
                                         the one that was flushed last
=================== ==================== ========================================= ==========

Processes come first, because a FLUSH alone proves little: a forked child that closes what it inherited flushes its
parent's half. Flushed last, because whoever renames has just closed: what a writer left behind that died in the middle
of its put is older. Bytes that moved because somebody opened the name to write are *superseded* and come after all
others; they only serve the writer whose rename comes second.

Everything here is pure: time comes in, what is to be dropped goes out.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeVar

SUPERSEDED_TTL_S: Final = 60.0
"""How long superseded bytes wait for a second writer's rename. In LMCache it follows the close in milliseconds, but the
machine may be busy.
"""

Key = tuple[int, str]
"""Inode of the directory, name."""


class TempPatterns:
    """Patterns for the last part of a path (``*.tmp``) or its last two (``.tmp/*``).

    A leading ``*`` stands for at least one character: ``.tmp`` itself, the usual directory for temporary files, is an
    ordinary name.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        compiled = [_compile(p) for p in patterns]
        self._one = [last for parent, last in compiled if parent is None]
        self._two = [(parent, last) for parent, last in compiled if parent is not None]

    def match(self, directory_name: str, name: str) -> bool:
        """Whether `name` in a directory called `directory_name` is temporary."""
        if any(last.fullmatch(name) for last in self._one):
            return True
        return any(last.fullmatch(name) and parent.fullmatch(directory_name) for parent, last in self._two)

    def differ(self, one: str, other: str) -> bool:
        """Whether a name in a directory could be temporary while that is called `one`, and ordinary while `other`."""
        return self._inside(one) != self._inside(other)

    def _inside(self, directory_name: str) -> set[re.Pattern[str]]:
        """What makes names temporary in a directory of this name."""
        return {*self._one, *(last for parent, last in self._two if parent.fullmatch(directory_name))}


def _compile(pattern: str) -> tuple[re.Pattern[str] | None, re.Pattern[str]]:
    *_, parent, last = ("", *pattern.rsplit("/", 2))
    glob = "?" + last if last.startswith("*") else last
    return (_regex(parent) if "/" in pattern else None), _regex(glob)


def _regex(glob: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(glob))


class Version(Protocol):
    """What the table needs to know of a version."""

    inode: int
    process: int
    """Id of the one that opened it for writing; 0 where that is not known."""


class State(NamedTuple):
    """Where a version stands among its like: plain data, so that it can be written down."""

    name: Literal["", "open", "flushed", "closed", "superseded"]
    since_s: float
    """Monotonic; 0 where time does not count."""


NO_STATE: Final = State("", 0.0)
V = TypeVar("V", bound=Version)


def _of(versions: list[V], process: int) -> list[V]:
    """Those of the process, in the same order; all where it has none."""
    return [v for v in versions if process and v.process == process] or versions


class _Slot(Generic[V]):
    """One name: its versions by state.

    FLUSH comes before RELEASE, and a rename may overtake the RELEASE; so flushed versions are ready too. But a FLUSH
    also comes when a forked child closes what it inherited in the middle of a write; so versions that were released go
    first.
    """

    def __init__(self) -> None:
        self.open: list[V] = []
        self.flushed: list[V] = []
        self.closed: list[tuple[V, float]] = []
        self.superseded: list[tuple[V, float]] = []
        """Newest first."""
        self.flushes: dict[int, int] = {}
        """id of a version → rank of its last FLUSH."""
        self.answered: int = 0
        """Inode number that the last LOOKUP answered."""

    def __bool__(self) -> bool:
        return bool(self.open or self.ready())

    def ready(self) -> list[V]:
        closed, flushed = self._newest_first(v for v, _ in self.closed), self._newest_first(self.flushed)
        return [*closed, *flushed, *(v for v, _ in self.superseded)]

    def _newest_first(self, versions: Iterable[V]) -> list[V]:
        return sorted(versions, key=lambda v: self.flushes.get(id(v), 0), reverse=True)

    def was_flushed(self, version: V) -> None:
        self.flushes[id(version)] = max(self.flushes.values(), default=0) + 1

    def take(self, version: V) -> None:
        """It leaves. Bytes are taken newest first, times to live oldest first: under constant use of a name the oldest
        bytes would expire otherwise, and the rename that is due for them would find none.
        """
        times = sorted((t for _, t in (*self.closed, *self.superseded)), reverse=True)
        self.remove(version)
        timed = {id(v) for v, _ in (*self.closed, *self.superseded)}
        rank = {id(v): times[i] for i, v in enumerate(v for v in self.ready() if id(v) in timed)}
        self.closed = [(v, rank[id(v)]) for v, _ in self.closed]
        self.superseded = [(v, rank[id(v)]) for v, _ in self.superseded]

    def state_of(self, version: V) -> State:
        if any(v is version for v in self.open):
            return State("open", 0.0)
        if any(v is version for v in self.flushed):
            return State("flushed", 0.0)
        for v, since_s in self.closed:
            if v is version:
                return State("closed", since_s)
        return next((State("superseded", since_s) for v, since_s in self.superseded if v is version), NO_STATE)

    def remove(self, version: V) -> None:
        self.open = [v for v in self.open if v is not version]
        self.flushed = [v for v in self.flushed if v is not version]
        self.closed = [(v, t) for v, t in self.closed if v is not version]
        self.superseded = [(v, t) for v, t in self.superseded if v is not version]


class TempNames(Generic[V]):
    """All temporary names of a mount. A version is in one slot at most, and there in one state."""

    def __init__(self) -> None:
        self._slots: dict[Key, _Slot[V]] = {}

    def __len__(self) -> int:
        """How many versions there are, open ones included."""
        return sum(len(s.open) + len(s.ready()) for s in self._slots.values())

    def lookup(self, key: Key) -> V | None:
        """The version that the name shows, if any; a RENAME that follows takes this one."""
        slot = self._slots.get(key)
        ready = slot.ready() if slot else []
        if not slot or not ready:
            return None
        slot.answered = ready[0].inode
        return ready[0]

    def opened(self, key: Key, version: V) -> None:
        """A new version, or one that is written again after its flush."""
        slot = self._slots.setdefault(key, _Slot())
        slot.remove(version)
        slot.open.append(version)

    def flushed(self, key: Key, version: V) -> None:
        """An open one was closed once; other duplicates of the descriptor may go on."""
        if self.is_open(key, version):
            self._slots[key].remove(version)
            self._slots[key].flushed.append(version)
            self._slots[key].was_flushed(version)

    def is_open(self, key: Key, version: V) -> bool:
        slot = self._slots.get(key)
        return slot is not None and any(v is version for v in slot.open)

    def is_ready(self, key: Key, version: V) -> bool:
        """Whether its bytes are whole: flushed or closed."""
        slot = self._slots.get(key)
        return slot is not None and any(v is version for v in slot.ready())

    def closed(self, key: Key, version: V, now_s: float) -> None:
        """Its last writer has gone. What is superseded stays so."""
        slot = self._slots.setdefault(key, _Slot())
        if not any(v is version for v, _ in slot.superseded):
            slot.remove(version)
            slot.closed.append((version, now_s))
            if id(version) not in slot.flushes:
                slot.was_flushed(version)

    def rewritten(self, key: Key, old: V, fresh: V, now_s: float) -> None:
        """Somebody opened closed `old` to write: `fresh` is open in its place, the bytes of `old` are superseded."""
        slot = self._slots.setdefault(key, _Slot())
        slot.remove(old)
        slot.open.append(fresh)
        slot.superseded.insert(0, (old, now_s))

    def state_of(self, key: Key, version: V) -> State:
        """`NO_STATE` for one that is not here."""
        slot = self._slots.get(key)
        return slot.state_of(version) if slot else NO_STATE

    def restore(self, key: Key, version: V, state: State) -> None:
        """Put it where `state_of` said it was. Within one state in order of time."""
        slot = self._slots.setdefault(key, _Slot())
        if state.name in ("flushed", "closed"):
            slot.was_flushed(version)
        if state.name == "open":
            slot.open.append(version)
        elif state.name == "flushed":
            slot.flushed.append(version)
        elif state.name == "closed":
            slot.closed = sorted([*slot.closed, (version, state.since_s)], key=lambda item: item[1])
        elif state.name == "superseded":
            slot.superseded = sorted([*slot.superseded, (version, state.since_s)], key=lambda item: -item[1])
        self._tidy(key, slot)

    def to_rename(self, key: Key, process: int = 0) -> V | None:
        """The version that a RENAME by this process means; it stays until `remove`."""
        slot = self._slots.get(key)
        if not slot:
            return None
        ready = _of(slot.ready(), process)
        return next((v for v in ready if v.inode == slot.answered), None) or next(iter(ready or slot.open), None)

    def remove(self, key: Key, version: V) -> None:
        slot = self._slots.get(key)
        if slot:
            slot.take(version)
            slot.flushes.pop(id(version), None)
            self._tidy(key, slot)

    def unlink(self, key: Key, process: int = 0) -> list[V]:
        """The version that an UNLINK by this process means and all superseded ones leave; open ones stay with their
        writers. It never means a superseded one: then the name would still be there.
        """
        slot = self._slots.get(key)
        if not slot:
            return []
        superseded = [v for v, _ in slot.superseded]
        current = slot.ready()[: -len(superseded) or None]
        return self._remove_all(key, [*_of(current, process)[:1], *superseded])

    def take_ready(self, key: Key) -> list[V]:
        """Every version that is not open leaves: another file was renamed to this name."""
        slot = self._slots.get(key)
        return self._remove_all(key, slot.ready() if slot else [])

    def listed(self, directory: int) -> list[tuple[str, V]]:
        """What a listing of the directory shows, in order of names."""
        here = sorted((name, slot.ready()) for (parent, name), slot in self._slots.items() if parent == directory)
        return [(name, ready[0]) for name, ready in here if ready]

    def expire(self, now_s: float, ttl_s: float) -> list[V]:
        """Closed versions that nobody renamed in time leave."""
        gone: list[V] = []
        for key, slot in list(self._slots.items()):
            old = [v for v, t in slot.closed if now_s - t >= ttl_s]
            old += [v for v, t in slot.superseded if now_s - t >= min(ttl_s, SUPERSEDED_TTL_S)]
            gone += self._remove_all(key, old)
        return gone

    def all(self) -> list[V]:
        return [v for s in self._slots.values() for v in (*s.open, *s.ready())]

    def _remove_all(self, key: Key, versions: list[V]) -> list[V]:
        for version in versions:
            self.remove(key, version)
        return versions

    def _tidy(self, key: Key, slot: _Slot[V]) -> None:
        if not slot:
            self._slots.pop(key, None)
