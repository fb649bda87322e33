"""The verified load: processes whose threads put, get, remove and rename, and write down how each call ended.

An actor alone changes the names of its directory, each time with a new turn and in order, so that it is known what a
name may hold; it reads those of all others. Run as ``python -m tests.chaos.load <spec as JSON>``.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from kvstore import Client
from kvstore.core.errors import KvError
from kvstore.node import parent
from tests.chaos.places import MountPlace, Place, SdkPlace
from tests.chaos.record import MISS, OK, UNTYPED, WRONG, Call, Recorder
from tests.support.blocking import BlockingClient, LoopThread
from tests.support.versions import MIN_BYTES, Torn, checked, content

DIRECTORY: Final = "load"
NAMES: Final = 40
"""Of each actor, put again and again."""
_SMALL_BYTES: Final = 512 << 10
_LARGE_BYTES: Final = 3 << 20
_LARGE_SHARE: Final = 0.1
_OWN_SHARE: Final = 0.4
"""Of the names that are read: the actor's own, which must be as new as its last put."""
_PAUSE_S: Final = 0.01
"""Between two calls: two cores serve all of it."""
_REFUSED_PAUSE_S: Final = 0.05
"""After an error, which may have come in a millisecond: else the run would be about refused calls."""
_LONGEST_S: Final = 3 * 3600.0
"""A load that nobody stops ends by itself."""


class Spec(NamedTuple):
    """One process. `kind`: mount, sync, async; its calls are recorded in `out`, until the file `stop` exists."""

    place: str
    kind: str
    path: str
    """Of a mount."""
    url: str
    worker_socket: str
    actors: Sequence[int]
    """Numbers of those that run in this process, a thread each."""
    all_actors: int
    seed: int
    out: str
    stop: str


def directory_of(actor: int) -> str:
    return f"w{actor}"


def key_of(name: str) -> int:
    """The number that contents of this name carry."""
    directory, _, number = name.partition("/")
    return int(directory[1:]) * 1000 + int(number)


class Actor:
    """One thread of calls. `turn` counts its changes."""

    def __init__(self, number: int, spec: Spec, place: Place, recorder: Recorder) -> None:
        self._number, self._spec, self._place, self._recorder = number, spec, place, recorder
        self._luck = random.Random(spec.seed * 1000 + number)
        self._turn = 0
        self._is_refused = False
        self._lengths: dict[str, set[int]] = {}
        self._verbs: dict[Callable[[], None], int] = {
            self._get: 50, self._put: 25, self._put_by_rename: 8, self._exists: 10, self._remove: 4, self._list: 3,
        }  # fmt: skip

    def run(self, stop: Path) -> None:
        end_s = time.monotonic() + _LONGEST_S
        verbs, weights = list(self._verbs), list(self._verbs.values())
        while not stop.exists() and time.monotonic() < end_s:
            (verb,) = self._luck.choices(verbs, weights)
            self._is_refused = False
            verb()
            time.sleep(_REFUSED_PAUSE_S if self._is_refused else _PAUSE_S)

    def _get(self) -> None:
        own = self._luck.random() < _OWN_SHARE
        name = self._own() if own else self._name(self._luck.randrange(self._spec.all_actors))
        outcome = self._look("get", name, lambda: self._read(name))
        if own and outcome == MISS:
            self._put(name)

    def _read(self, name: str) -> tuple[int, int]:
        """(turn, bytes) of what is there; (0, 0) for a miss. Raises Torn."""
        data = self._place.get(name)
        if data is None:
            return 0, 0
        return checked(data, key_of(name)).turn, len(data)

    def _put(self, name: str = "") -> None:
        name = name or self._own()
        turn, data = self._next(name)
        self._call("put", name, turn, lambda: self._place.put(name, data), len(data))

    def _put_by_rename(self) -> None:
        """To a name that nobody else has, then renamed onto the one that is meant."""
        name = self._own()
        turn, data = self._next(name)
        fresh = f"{directory_of(self._number)}/fresh{turn}"
        if self._call("put", fresh, turn, lambda: self._place.put(fresh, data), len(data)) == OK:
            self._call("rename", fresh, turn, lambda: self._place.rename(fresh, name), len(data), target=name)

    def _remove(self) -> None:
        name = self._own()
        self._turn += 1
        self._call("remove", name, self._turn, lambda: self._place.remove(name))

    def _exists(self) -> None:
        name = self._name(self._luck.randrange(self._spec.all_actors))
        self._look("stat", name, lambda: (int(self._place.exists(name)), 0))

    def _list(self) -> None:
        directory = directory_of(self._luck.randrange(self._spec.all_actors))
        self._look("list", directory, lambda: (len(self._place.names(directory)) + 1, 0))

    def _call(
        self, verb: str, name: str, turn: int, change: Callable[[], None], length_bytes: int = 0, target: str = ""
    ) -> str:
        """A change, recorded; its outcome."""

        def do() -> tuple[int, int]:
            change()
            return turn, length_bytes

        start_s = time.monotonic()
        _, _, outcome = _tried(do)
        for step in self._place.steps if verb == "put" else ():
            self._write_down(step.verb, name, turn, step.start_s, step.end_s, outcome, length_bytes)
        return self._record(verb, name, turn, start_s, outcome, length_bytes, target)

    def _look(self, verb: str, name: str, find: Callable[[], tuple[int, int]]) -> str:
        """`find` gives (turn, bytes), turn 0 for a miss."""
        start_s = time.monotonic()
        turn, length_bytes, outcome = _tried(find)
        return self._record(verb, name, turn, start_s, outcome, length_bytes)

    def _record(
        self, verb: str, name: str, turn: int, start_s: float, outcome: str, length_bytes: int, target: str = ""
    ) -> str:
        self._write_down(verb, name, turn, start_s, time.monotonic(), outcome, length_bytes, target)
        self._is_refused |= outcome not in (OK, MISS)
        return outcome

    def _write_down(
        self, verb: str, name: str, turn: int, start_s: float, end_s: float, outcome: str, length_bytes: int,
        target: str = "",
    ) -> None:  # fmt: skip
        place = self._spec.place
        who = f"{place}.{self._number}"
        self._recorder.add(Call(who, place, verb, name, turn, start_s, end_s, outcome, length_bytes, target))

    def _next(self, name: str) -> tuple[int, bytes]:
        """A new turn and its content, of a length that this name never had: the master's journal knows lengths."""
        self._turn += 1
        had, length_bytes = self._lengths.setdefault(name, set()), 0
        while not length_bytes or length_bytes in had:
            largest = _LARGE_BYTES if self._luck.random() < _LARGE_SHARE else _SMALL_BYTES
            length_bytes = self._luck.randrange(MIN_BYTES, largest)
        had.add(length_bytes)
        return self._turn, content(key_of(name), self._number, self._turn, length_bytes)

    def _own(self) -> str:
        return self._name(self._number)

    def _name(self, actor: int) -> str:
        return f"{directory_of(actor)}/{self._luck.randrange(NAMES)}"


def _tried(find: Callable[[], tuple[int, int]]) -> tuple[int, int, str]:
    """(turn, bytes, outcome)."""
    try:
        turn, length_bytes = find()
    except Exception as error:  # noqa: BLE001 - each is recorded
        return 0, 0, described(error)
    return turn, length_bytes, OK if turn else MISS


def described(error: Exception) -> str:
    match error:
        case Torn():
            return f"{WRONG}: {error}"
        case KvError():
            return f"{type(error).__name__}.{error.reason}"
        case OSError():
            return errno.errorcode.get(error.errno or 0, type(error).__name__)
        case _:
            return f"{UNTYPED}: {error!r}"


def main() -> None:
    parent.obey()
    spec = Spec(*json.loads(sys.argv[1]))
    with ExitStack() as stack:
        place_of = _places(spec, stack)
        recorder = Recorder(Path(spec.out))
        stack.callback(recorder.close)
        actors = [Actor(number, spec, place_of(), recorder) for number in spec.actors]
        threads = [threading.Thread(target=actor.run, args=(Path(spec.stop),), daemon=True) for actor in actors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    sys.stdout.flush()
    os._exit(0)  # gRPC's threads may be in the middle of something: their end is not what is measured


def _places(spec: Spec, stack: ExitStack) -> Callable[[], Place]:
    """Makes the place of one thread; all clients of a process are one."""
    if spec.kind == "mount":
        return lambda: MountPlace(Path(spec.path) / DIRECTORY)
    if spec.kind == "sync":
        place = SdkPlace(stack.enter_context(Client(spec.url, worker_socket=spec.worker_socket)), DIRECTORY)
    else:
        loop = LoopThread()
        stack.callback(loop.close)
        client = BlockingClient(loop, spec.url, worker_socket=spec.worker_socket)
        place = SdkPlace(stack.enter_context(client), DIRECTORY)
    return lambda: place


if __name__ == "__main__":
    main()
