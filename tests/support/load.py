"""Work of several kinds on a mount, each turn verified; what went wrong is counted, not raised."""

from __future__ import annotations

import errno
import mmap
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.crew import Crew, Member, shift
from tests.support.puts import get, put
from tests.support.versions import Version, checked, content

STABLE: Final = range(8)
"""Keys that are put once, by `prepare`, and never change."""
STABLE_BYTES: Final = 3_000_000
MAX_PUT_BYTES: Final = 2_000_000

Action = Callable[[int], None]
"""Called with the number of the turn."""


class Tally(NamedTuple):
    """What one worker met."""

    name: str
    turns: int
    errors: Counter[str]
    """Name of the error, or what was wrong, and the line that met it."""
    longest_s: float


def prepare(directory: Path) -> None:
    """The directory, one for temporary files, and the stable keys in it."""
    directory.mkdir()
    (directory / ".tmp").mkdir()
    luck = random.Random(0)
    for key in STABLE:
        put(directory, key, content(key, 0, 0, STABLE_BYTES), luck)


def work(name: str, action: Action, stop: Path) -> Tally:
    errors, longest_s, turns = Counter[str](), 0.0, 0
    for turn in shift(stop):
        start_s = time.monotonic()
        try:
            action(turn)
            turns += 1
        except (OSError, AssertionError) as error:
            errors[_described(error)] += 1
        longest_s = max(longest_s, time.monotonic() - start_s)
    return Tally(name, turns, errors, longest_s)


def _described(error: OSError | AssertionError) -> str:
    line = traceback.extract_tb(error.__traceback__)[-1].line
    what = errno.errorcode.get(error.errno or 0, "?") if isinstance(error, OSError) else f"wrong {error}"
    return f"{what}: {line}"


def start_all(crew: Crew, directory: Path) -> list[Member[Tally]]:
    """Six processes: two put, one gets, one looks about, one edits ordinary files, one reads through maps."""
    actions = {
        "put": putting(directory, 100),
        "put by way of a directory": putting(directory, 101, ".tmp/{}.data"),
        "get": getting(directory),
        "look": looking(directory),
        "edit": editing(directory),
        "map": mapping(directory),
    }
    return [crew.start(work, name, action, crew.stop) for name, action in actions.items()]


def expect(found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{found} instead of {wanted}")


def putting(directory: Path, key: int, temporary: str = "{}.tmp") -> Action:
    """Alone with its key: what was put is there, and is this turn's."""
    luck = random.Random(key)

    def action(turn: int) -> None:
        length_bytes = luck.randrange(50_000, MAX_PUT_BYTES)
        put(directory, key, content(key, 0, turn, length_bytes), luck, temporary)
        expect(get(directory, key), Version(key, 0, turn, length_bytes))

    return action


def getting(directory: Path) -> Action:
    luck = random.Random(1)

    def action(turn: int) -> None:
        key = luck.choice(STABLE)
        expect(get(directory, key), Version(key, 0, 0, STABLE_BYTES))

    return action


def looking(directory: Path) -> Action:
    """Stats and listings: stable names are there, once; unknown ones are not."""

    def action(turn: int) -> None:
        expect((directory / f"{turn % len(STABLE)}.data").stat().st_size, STABLE_BYTES)
        names = sorted(os.listdir(directory))
        expect(names, sorted(set(names)))
        expect({f"{key}.data" for key in STABLE} - set(names), set())
        try:
            os.stat(directory / f"unknown{turn}")
        except FileNotFoundError:
            return
        raise AssertionError("a name that nobody made")

    return action


def editing(directory: Path) -> Action:
    """Ordinary names: directories, files, appending, truncating, renaming."""

    def action(turn: int) -> None:
        place = directory / f"edit{turn}"
        place.mkdir()
        with (place / "f").open("wb") as out:
            out.write(b"0123456789")
        with (place / "f").open("ab") as out:
            out.write(b"abc")
        os.truncate(place / "f", 12)
        os.rename(place / "f", place / "g")
        expect((place / "g").read_bytes(), b"0123456789ab")
        (place / "g").unlink()
        place.rmdir()

    return action


def mapping(directory: Path) -> Action:
    luck = random.Random(2)

    def action(turn: int) -> None:
        key = luck.choice(STABLE)
        with (directory / f"{key}.data").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            expect(checked(view[:], key), Version(key, 0, 0, STABLE_BYTES))

    return action
