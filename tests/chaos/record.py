"""What a load process writes down: one line for each call that it made, as it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

OK: Final = "ok"
MISS: Final = "miss"
WRONG: Final = "wrong"
"""Bytes that nobody ever wrote under this name; the outcome goes on with what it was."""

UNTYPED: Final = "untyped"
"""Likewise, of an error that no caller is told to expect."""


class Call(NamedTuple):
    """Times are CLOCK_MONOTONIC, which all processes of the machine share."""

    actor: str
    """Who called: one thread; it alone changes its names, in order."""
    place: str
    """By which way: "a" and "b" are mounts, "sync…" and "async…" clients."""
    verb: str
    """put, get, remove, rename, stat, list; of a mount also the steps of a put: create, write, close, replace."""
    name: str
    turn: int
    """The actor's number of the version that it put, renamed, removed or found; 0 for none."""
    start_s: float
    end_s: float
    outcome: str
    """OK, MISS, WRONG …, UNTYPED …, else what the error is called: a `KvError`'s class, an errno."""
    length_bytes: int = 0
    target: str = ""
    """Of a rename."""

    @property
    def took_s(self) -> float:
        return self.end_s - self.start_s


class Recorder:
    """Appends; a process that is killed leaves whole lines and at most one torn one."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def add(self, call: Call) -> None:
        self._file.write(json.dumps(call) + "\n")

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Call]:
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield Call(*json.loads(line))
