"""What each name may hold: every attempt to change it, and what a reader may see in between.

An attempt takes effect at one moment between its start and its end; one that failed, or whose reply was lost, at any
moment from its start on, or never. A miss is always allowed: it is a cache.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections import defaultdict

from kvstore.core.hashing import hash_block
from tests.sim.faults import Violation

_NUMBER = struct.Struct(">Q")
ABSENT = 0
"""In the place of a version's number."""


@dataclasses.dataclass(slots=True, eq=False)
class Attempt:
    """To make a name hold one of these versions. `end_s` is infinite until it is acknowledged."""

    versions: set[int]
    start_s: float
    end_s: float = math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    number: int
    data: bytes
    hash: int


class Oracle:
    def __init__(self) -> None:
        self.versions: dict[int, Version] = {}
        self._by_content: dict[tuple[int, int], int] = {}
        self._attempts: defaultdict[str, list[Attempt]] = defaultdict(list)
        self._moving: list[tuple[str, str, Attempt]] = []
        """Renames under way: (from, to, the attempt on `to`)."""
        self._whole_since_s = -math.inf

    def new_version(self, length_bytes: int) -> Version:
        """Bytes that say at each place which version they are of."""
        number = len(self.versions) + 1
        data = (_NUMBER.pack(number) * (length_bytes // 8 + 1))[:length_bytes]
        version = self.versions[number] = Version(number, data, hash_block(memoryview(data)))
        self._by_content[length_bytes, version.hash] = number
        return version

    def begin(self, name: str, versions: set[int], now_s: float) -> Attempt:
        attempt = Attempt(set(versions), now_s)
        self._attempts[name].append(attempt)
        self._spread(name, versions)
        return attempt

    def begin_move(self, name: str, to: str, now_s: float) -> tuple[Attempt, Attempt]:
        """Attempts on both names of a rename: it takes along what is there at some moment before `end_move`."""
        arrival = self.begin(to, set(self.possible(name, now_s, now_s)), now_s)
        self._moving.append((name, to, arrival))
        return self.begin(name, {ABSENT}, now_s), arrival

    def end_move(self, arrival: Attempt) -> None:
        self._moving = [move for move in self._moving if move[2] is not arrival]

    def _spread(self, name: str, versions: set[int]) -> None:
        """What is being renamed may be this by now."""
        for source, target, arrival in self._moving:
            if source == name and not versions - {ABSENT} <= arrival.versions:
                arrival.versions |= versions - {ABSENT}
                self._spread(target, arrival.versions)

    def acknowledge(self, attempt: Attempt, now_s: float) -> None:
        attempt.end_s = now_s

    def withdraw(self, name: str, attempt: Attempt) -> None:
        """It certainly changes nothing, and never will."""
        self._attempts[name].remove(attempt)

    def possible(self, name: str, since_s: float, until_s: float) -> set[int]:
        """Versions that may be there at some moment between the two."""
        attempts = self._attempts[name]
        closers = (a.start_s for a in attempts if a.end_s < since_s and a.start_s >= self._whole_since_s)
        over = max(closers, default=-math.inf)
        found = [a.versions for a in attempts if a.start_s <= until_s and a.end_s >= over]
        return set().union(*found)

    def lose(self) -> None:
        """The master lost acknowledged changes: from now on whatever a name ever held may be there again (rule 22)."""
        self._whole_since_s = math.inf
        for source, target, arrival in self._moving:
            arrival.versions |= self.possible(source, -math.inf, math.inf)
            self._spread(target, arrival.versions)

    def regain(self, now_s: float) -> None:
        """Names are taken back no more: what begins from now on ends what was before it."""
        self._whole_since_s = now_s

    def number_of(self, length_bytes: int, digest: int) -> int | None:
        return self._by_content.get((length_bytes, digest))

    def check_bytes(self, name: str, data: bytes, since_s: float, until_s: float) -> int:
        """That a reader may have got these; the version's number. Raises Violation."""
        number = _NUMBER.unpack_from(data)[0] if len(data) >= 8 else 0
        version = self.versions.get(number)
        if version is None or version.data != data:
            raise Violation(f"{name}: read {len(data)} bytes that nobody ever wrote ({data[:16].hex()}…)", [name])
        self.check_version(name, number, since_s, until_s)
        return number

    def check_version(self, name: str, number: int, since_s: float, until_s: float) -> None:
        possible = self.possible(name, since_s, until_s)
        if number not in possible:
            raise Violation(
                f"{name}: holds version {number}, which was replaced or was never there; possible: {sorted(possible)}",
                [name, f"v{number}"],
            )
