"""Load as LMCache makes it: prompts that share prefixes, a few of them hot; through a mount or through the SDK.

A request looks its prompt's chunks up in order until one is missing, reads those that are there, computes the rest and
stores it: to a temporary name, which is renamed. Every byte that is read is compared with what its name must hold.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from kvstore import Client, NotFound
from tests.support.versions import checked, content

MIB: Final = 1 << 20
CHUNK_BYTES: Final = MIB // 2
SYSTEM_CHUNKS: Final = 4
"""Chunks of a system prompt, shared by all conversations that begin with it."""
OWN_CHUNKS: Final = 12
CONVERSATIONS: Final = 4
"""That begin with the same system prompt."""
POPULARITY: Final = 1.1
"""Exponent of Zipf's law: how much hotter the first prompts are than the last."""
HOT_SHARE: Final = 0.1
"""Of the prompts, the most popular ones: these are called hot."""


class Prompts:
    """`chunks(i)`: the chunk numbers of prompt i, in order; prompt 0 is the most popular."""

    def __init__(self, working_set_bytes: int) -> None:
        family = SYSTEM_CHUNKS + CONVERSATIONS * OWN_CHUNKS
        self.families = max(1, round(working_set_bytes / CHUNK_BYTES / family))
        self.count = self.families * CONVERSATIONS
        self.size_bytes = self.families * family * CHUNK_BYTES

    def chunks(self, prompt: int) -> list[int]:
        family, member = prompt % self.families, prompt // self.families
        first = family * (SYSTEM_CHUNKS + CONVERSATIONS * OWN_CHUNKS)
        own = first + SYSTEM_CHUNKS + member * OWN_CHUNKS
        return [*range(first, first + SYSTEM_CHUNKS), *range(own, own + OWN_CHUNKS)]

    def is_hot(self, prompt: int) -> bool:
        return prompt < max(1, round(self.count * HOT_SHARE))

    def draw(self, luck: random.Random) -> Iterator[int]:
        weights = [1 / (rank + 1) ** POPULARITY for rank in range(self.count)]
        while True:
            yield from luck.choices(range(self.count), weights, k=64)


class Place(Protocol):
    """Where chunks are kept."""

    def exists(self, name: str) -> bool: ...

    def get(self, name: str) -> bytes | None:
        """None for a miss."""

    def put(self, name: str, data: bytes) -> None: ...

    def tier(self, name: str) -> str:
        """Of the nearest replica, "" when it is gone; nobody's heat rises by the question."""


class Directory:
    """A mount, with LMCache's system calls."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def exists(self, name: str) -> bool:
        return (self._path / name).exists()

    def get(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        temporary = self._path / f"{name}.tmp"
        try:
            temporary.write_bytes(data)
            os.replace(temporary, self._path / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def tier(self, name: str) -> str:
        try:
            return os.getxattr(self._path / name, "user.kvstore.tier").decode()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENODATA):
                return ""
            raise


class Sdk:
    """A client on a node without a mount."""

    def __init__(self, client: Client, directory: str) -> None:
        self._client, self._directory = client, directory

    def exists(self, name: str) -> bool:
        return self._client.exists(f"{self._directory}/{name}")

    def get(self, name: str) -> bytes | None:
        try:
            return self._client.get(f"{self._directory}/{name}")
        except NotFound:
            return None

    def put(self, name: str, data: bytes) -> None:
        self._client.put(f"{self._directory}/{name}", data)

    def tier(self, name: str) -> str:
        try:
            replicas = self._client.stat(f"{self._directory}/{name}").replicas
        except NotFound:
            return ""
        return min((r.tier for r in replicas if r.node == self._client.node), default="ssd")


class Tally(NamedTuple):
    """What one engine met. `tiers`: (hot prompt or not, tier) → chunks that were read in the second half of the run."""

    requests: int
    asked: int
    hits: int
    puts: int
    lost: int
    """Chunks that were there when they were looked up and gone when they were read: computed again."""
    tiers: Counter[tuple[bool, str]]
    errors: Counter[str]
    longest_s: float


def engine(place: Place, prompts: Prompts, seed: int, seconds: float) -> Tally:
    """Requests one after the other, for so long."""
    luck = random.Random(seed)
    start_s = time.monotonic()
    tiers, errors = Counter[tuple[bool, str]](), Counter[str]()
    requests = asked = hits = puts = lost = 0
    longest_s = 0.0
    for prompt in prompts.draw(luck):
        now_s = time.monotonic()
        if now_s > start_s + seconds:
            break
        chunks = prompts.chunks(prompt)
        try:
            found = _look_up(place, chunks)
            if now_s > start_s + seconds / 2:
                tiers.update((prompts.is_hot(prompt), place.tier(name_of(chunk))) for chunk in chunks[:found])
            read = _read(place, chunks[:found])
            _store(place, chunks[read:])
        except Exception as error:  # noqa: BLE001 - counted: none of them may come
            errors[f"{type(error).__name__}: {error}"[:200]] += 1
            continue
        finally:
            longest_s = max(longest_s, time.monotonic() - now_s)
        requests, asked, hits = requests + 1, asked + len(chunks), hits + read
        puts, lost = puts + len(chunks) - read, lost + found - read
    return Tally(requests, asked, hits, puts, lost, tiers, errors, longest_s)


def name_of(chunk: int) -> str:
    return f"model@4@0@{chunk:08x}@half.data"


def _look_up(place: Place, chunks: Sequence[int]) -> int:
    """How many are there from the first on."""
    for found, chunk in enumerate(chunks):
        if not place.exists(name_of(chunk)):
            return found
    return len(chunks)


def _read(place: Place, chunks: Sequence[int]) -> int:
    """How many could be read from the first on, each compared with what it must be."""
    for read, chunk in enumerate(chunks):
        data = place.get(name_of(chunk))
        if data is None:
            return read
        checked(data, chunk)
    return len(chunks)


def _store(place: Place, chunks: Sequence[int]) -> None:
    for chunk in chunks:
        place.put(name_of(chunk), content(chunk, 0, 0, CHUNK_BYTES))
