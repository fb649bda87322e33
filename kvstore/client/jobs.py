"""Puts and gets of many paths as state machines without I/O: `AsyncClient` and `Client` ask them what to do next and
tell the outcome.

A `GetJob` goes lookup → load, and once more for what failed if a fresh lookup tells of another block or other replicas.
A `PutJob` goes store → publish, and again (with new blocks) for what failed in a way that may pass, until the deadline.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from kvstore.client import files
from kvstore.client.cache import MetadataCache, Token
from kvstore.client.deadline import Deadline
from kvstore.client.lost import LostNames
from kvstore.client.messages import Publication, PublishMode, PublishName, PublishResult
from kvstore.client.sockets import SealedBlock
from kvstore.client.staging import Loaded, Wish
from kvstore.core import retry
from kvstore.core.errors import (
    MISSES,
    IsDirectory,
    KvError,
    NotFound,
    Overloaded,
    Stale,
    Timeout,
    TooLarge,
    Unavailable,
)
from kvstore.core.types import Entry
from kvstore.rpc.breaker import NotAsked

T = TypeVar("T")

Puts = list["Put | KvError"]
Values = list[bytes | None]
Sizes = list[int | None]
Flags = list[bool]
MAX_RACES = 3
"""Times that a remove or rename is tried on what has just become another file."""
PASSING = (Stale, Unavailable, Overloaded)
"""What may be over the next time: the master or the worker restarted, a bound was reached."""


class Put(NamedTuple):
    """The entry as it is now, and whether this put made it: not when an equal or (if-absent) any file was there."""

    entry: Entry
    created: bool


WORDS: Mapping[str, str] = {
    "no_name": "does not exist",
    "no_replica": "no live worker has it",
    "not_directory": "goes through a file",
    "exists": "exists already",
}
MKDIR_WORDS = {**WORDS, "no_name": "a directory above it does not exist"}


def told(row: T, name: str, words: Mapping[str, str] = WORDS) -> T | KvError:
    """Rows of a batch carry the reason alone: a line for people. Anything but such an error stays as it is."""
    if not isinstance(row, KvError) or row.message != row.reason:
        return row
    return type(row)(f"{name or '/'}: {words.get(row.reason, row.reason)}", reason=row.reason, fault=row.fault)


def of_block(error: KvError) -> KvError:
    """The error of a block whose name is there: nobody has it then, whatever its worker's NotFound says of names."""
    if not isinstance(error, NotFound) or error.reason != NotFound.reason:
        return error
    return NotFound(error.message, reason="no_replica", fault=error.fault)


def as_miss(error: KvError) -> KvError:
    """What a reader gets: `NotFound` with the reason, whatever kept the bytes away."""
    if isinstance(error, NotFound) or not isinstance(error, (*MISSES, Overloaded)):
        return error
    return NotFound(error.message, reason=error.reason, fault=error.fault)


class GetJob:
    """Reads of many paths. `rows[i]`: what the master (or the cache) says of path i; `results[i]`: the bytes or the
    error.
    """

    def __init__(
        self,
        names: Sequence[str],
        cache: MetadataCache,
        lost: LostNames,
        buffers: Sequence[memoryview] | None = None,
    ) -> None:
        self._names, self._cache, self._lost, self._buffers = names, cache, lost, buffers
        self.rows: list[Entry | KvError | None] = [cache.get(n) for n in names]
        self.results: list[Loaded | None] = [None] * len(names)
        self._failed: dict[int, tuple[Entry, KvError]] = {}
        """Entries whose block could not be loaded, and why: not to be tried again as they are."""

    def unknown(self) -> list[str]:
        """Paths to look up now."""
        return [self._names[i] for i in self._open_rows()]

    def looked_up(self, token: Token, rows: Sequence[Entry | KvError]) -> None:
        self._lost.looked_up(self.unknown(), rows)
        for i, row in zip(self._open_rows(), rows, strict=True):
            self.rows[i] = row
            if isinstance(row, Entry):
                self._cache.put(token, self._names[i], row)

    def lookup_failed(self, error: KvError) -> None:
        for i in self._open_rows():
            self.rows[i] = self._failed[i][1] if i in self._failed else error

    def to_load(self) -> list[Wish]:
        """Blocks to load now; what needs none gets its result. Raises InvalidRequest for a buffer that is too small."""
        for i in self._open_results():
            self.results[i] = self._without_load(i)
        return [self._wish(i) for i in self._open_results()]

    def loaded(self, results: Sequence[Loaded]) -> None:
        for i, result in zip(self._open_results(), results, strict=True):
            row = self.rows[i]
            result = self._told_of_block(i, result)
            if isinstance(result, MISSES) and isinstance(row, Entry) and i not in self._failed:
                self._failed[i] = (row, result)
                self._cache.drop(self._names[i])
                self.rows[i] = None
            else:
                self.results[i] = result

    def load_failed(self, error: KvError) -> None:
        self.loaded([error] * len(self._open_results()))

    def again(self) -> bool:
        """Whether something failed that a fresh lookup may mend; then it begins anew with `unknown`."""
        return None in self.rows

    @property
    def total_bytes(self) -> int:
        """Of all blocks that may have to be loaded."""
        return sum(self.length(i) for i in range(len(self.rows)))

    def values(self) -> Values:
        return [result if isinstance(result, bytes) else None for result in self.results]

    def sizes(self) -> Sizes:
        return [self.length(i) if isinstance(result, bytes) else None for i, result in enumerate(self.results)]

    def found(self) -> Flags:
        return [isinstance(row, Entry) for row in self.rows]

    def length(self, index: int) -> int:
        row = self.rows[index]
        return row.length_bytes if isinstance(row, Entry) else 0

    def _told_of_block(self, index: int, result: Loaded) -> Loaded:
        """An error as it is meant; remembered for the next put of the name."""
        if isinstance(result, KvError):
            self._lost.failed(self._names[index], result)
            return of_block(result)
        self._lost.forget(self._names[index])
        return result

    def _open_rows(self) -> list[int]:
        return [i for i, row in enumerate(self.rows) if row is None]

    def _open_results(self) -> list[int]:
        return [i for i, result in enumerate(self.results) if result is None]

    def _without_load(self, index: int) -> Loaded | None:
        """The result of a path that has no block to load, or the same one as before."""
        row = self.rows[index]
        if row is None or isinstance(row, KvError):
            return told(row, self._names[index])
        if row.is_dir:
            return IsDirectory(f"{self._names[index] or '/'} is a directory")
        if row.address is None:
            return b""
        before, error = self._failed.get(index, (None, None))
        same = before is not None and (before.address, before.replicas) == (row.address, row.replicas)
        return error if same else None

    def _wish(self, index: int) -> Wish:
        row = self.rows[index]
        assert isinstance(row, Entry)
        if self._buffers is None:
            return Wish(row)
        return Wish(row, files.writable_view(self._buffers[index], row.length_bytes))


class PutJob:
    """Writes of many paths. `results[i]` is None until path i is done."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], lost: LostNames, *, if_absent: bool) -> None:
        self.names, self._sizes, self._lost, self.if_absent = names, sizes, lost, if_absent
        self.results: list[Put | KvError | None] = [None] * len(names)
        self._blocks: dict[int, SealedBlock] = {}
        """Stored in this round and to be published."""
        self._unpublished: list[SealedBlock] = []
        """Of values whose publish failed. Some may have been published all the same: the master knows."""
        self._attempt = 0
        self._return_by: Deadline | None = None
        """Until then a server that went may come back; from the first failure on."""

    def refuse_larger(self, max_bytes: int) -> None:
        """What no worker would take is not even hashed."""
        for i, size in enumerate(self._sizes):
            if size > max_bytes:
                message = f"{self.names[i]}: {size} bytes are too large for one value; at most {max_bytes}"
                self.results[i] = TooLarge(message)

    def pending(self) -> list[str]:
        """Paths to look up before an if-absent put: what is there already needs no bytes moved."""
        return [self.names[i] for i in self._open()]

    def looked_up(self, rows: Sequence[Entry | KvError]) -> None:
        for i, row in zip(self._open(), rows, strict=True):
            if isinstance(row, Entry):
                self.results[i] = IsDirectory(f"{self.names[i]} is a directory") if row.is_dir else Put(row, False)

    def to_store(self) -> list[int]:
        """Indexes of values to store now; an empty one has no block."""
        return [i for i in self._open() if self._sizes[i]]

    def stored(self, index: int, outcome: SealedBlock | KvError) -> None:
        """Of one of `to_store`, as soon as it is known, in any order and thread."""
        if isinstance(outcome, NotFound):  # of the worker's own files, not of a name: it may pass
            self.results[index] = Unavailable(outcome.message, fault=outcome.fault)
        elif isinstance(outcome, KvError):
            self.results[index] = outcome
        else:
            self._blocks[index] = outcome

    def publications(self) -> list[Publication]:
        """Of all that are stored."""
        mode = PublishMode.IF_ABSENT if self.if_absent else PublishMode.REPLACE
        return [Publication([self._publish_name(i)], mode, parents=True) for i in self._open()]

    def published(self, results: Sequence[PublishResult | KvError]) -> None:
        """In the order of `publications`."""
        for i, result in zip(self._open(), results, strict=True):
            block = self._blocks.pop(i, None)
            if isinstance(result, KvError):
                self.results[i] = result
                self._unpublished += [block] if block else []
                continue
            self.results[i] = put = Put(result.entries[0], result.created[0])
            if put.created:
                self._lost.forget(self.names[i])

    def failed(self, error: KvError) -> None:
        """A whole call failed, after the retries that it allows: the round is over for all that are not done."""
        for i in self._open():
            self.results[i] = error

    def unpublished(self) -> list[SealedBlock]:
        """At the end of a round, however it ended: blocks that it has stored and, as far as it knows, not published. A
        further one stores them anew, so these are to be given up.
        """
        blocks = [*self._unpublished, *self._blocks.values()]
        self._unpublished.clear()
        self._blocks.clear()
        return blocks

    def pause(self, deadline: Deadline) -> float | None:
        """Seconds until the next round, for what failed in passing; None when nothing is left to do, or no time.

        Who has no patience neither waits for a server that is known to be away, nor longer than for one answer for one
        that went just now: the rest of his time is for bytes.
        """
        passing = [i for i, result in enumerate(self.results) if self._passes(result, deadline)]
        if not passing or deadline.passed:
            return None
        self._attempt += 1
        self._return_by = self._return_by or Deadline(deadline.answer_s)
        asked_s = max(error.retry_after_s for error in self.results if isinstance(error, KvError))
        pause = retry.delay_s(self._attempt, random.getrandbits(64), deadline.left_s, asked_s)
        if pause is not None:
            for i in passing:
                self.results[i] = None
        return pause

    def _passes(self, result: Put | KvError | None, deadline: Deadline) -> bool:
        if isinstance(result, Timeout):
            return result.fault is not None  # whoever was called, not the caller's own time: slow, or away
        if isinstance(result, Unavailable) and not deadline.is_patient:
            return not isinstance(result, NotAsked) and (self._return_by is None or not self._return_by.passed)
        return isinstance(result, PASSING)

    def done(self) -> Puts:
        return [result if result is not None else Timeout("not stored in time") for result in self.results]

    def _open(self) -> list[int]:
        return [i for i, result in enumerate(self.results) if result is None]

    def _publish_name(self, index: int) -> PublishName:
        name, block = self.names[index], self._blocks.get(index)
        if block is None:
            return PublishName(name)
        return PublishName(name, block.address, block.volume, replace_equal=name in self._lost)


def whole(result: Loaded | None) -> bytes:
    """What `get` returns. Raises the miss."""
    if isinstance(result, bytes):
        return result
    raise as_miss(result or Timeout("not loaded in time"))


def or_raise(result: T | KvError) -> T:
    if isinstance(result, KvError):
        raise result
    return result


def is_race(error: KvError | None, attempt: int) -> bool:
    """Whether the inode that was meant was replaced meanwhile, so that the path is to be looked up and tried again."""
    return isinstance(error, NotFound | Stale) and attempt + 1 < MAX_RACES


def readable(entry: Entry, path: str) -> Entry:
    if entry.is_dir:
        raise IsDirectory(f"{path or '/'} is a directory")
    return entry
