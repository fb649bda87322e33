"""A random reader, writer, truncater and mapper of one file, checked against bytes in memory (after Apple's fsx).

Several processes take turns. What they wrote is known at every moment; so is what was published last, which is what
everybody else must see. A failure prints the seed and all calls up to it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from tests.support import fsops
from tests.support.actor import Actor
from tests.support.fsops import Bytes, Call, Failed, call

FLAGS: Final = os.O_RDWR | os.O_CREAT
LOG_CALLS: Final = 200
"""Printed with a failure: those before do not matter any more."""


class Fsx:
    """One file named `name` on the side "mount" of all `actors`, never longer than `max_bytes`.

    An ordinary file is open in all of them all the time, but for moments. A temporary one (`final` is the name that it
    gets) is open in one at a time.
    """

    def __init__(self, seed: int, actors: Sequence[Actor], name: str, max_bytes: int, final: str = "") -> None:
        self._seed, self._actors, self._name, self._max_bytes, self._final = seed, actors, name, max_bytes, final
        self._random = random.Random(seed)
        self._log: list[str] = []
        self._content = bytearray()
        self._published: bytes | None = None
        """What readers see; None while there is nothing."""
        self._open: list[int] = []
        """Actors that have it open; the descriptor's number is the actor's."""
        self._steps: dict[Callable[[int], None], int] = {
            self._read: 20, self._write: 20, self._truncate: 8, self._read_map: 10, self._write_map: 10,
            self._copy: 6, self._sync: 3, self._reopen: 8, self._look: 6,
        }  # fmt: skip

    def run(self, steps: int) -> None:
        for actor in range(1 if self._final else len(self._actors)):
            self._open_file(actor)
        for _ in range(steps):
            (step,) = self._random.choices(list(self._steps), list(self._steps.values()))
            step(self._random.choice(self._open))
        while self._open:
            self._close(self._open[0])
        if self._final:
            self._publish()
        self._look(0)

    # ---- steps ----

    def _read(self, actor: int) -> None:
        offset, size = self._range(self._max_bytes)
        self._expect(actor, call(fsops.pread, actor, offset, size), bytes(self._content[offset : offset + size]))

    def _write(self, actor: int) -> None:
        offset, size = self._range(self._max_bytes)
        data = self._data(size)
        self._expect(actor, call(fsops.pwrite, actor, offset, data), size)
        self._store(offset, data.value)

    def _truncate(self, actor: int) -> None:
        size = self._random.randint(0, self._max_bytes)
        self._expect(actor, call(fsops.truncate_open, actor, size), None)
        del self._content[size:]
        self._content.extend(bytes(size - len(self._content)))

    def _read_map(self, actor: int) -> None:
        offset, size = self._range(len(self._content))
        offset -= offset % fsops.PAGE_BYTES
        if size:
            wanted = call(fsops.read_map, actor, offset, size, self._random.random() < 0.7)
            self._expect(actor, wanted, bytes(self._content[offset : offset + size]))

    def _write_map(self, actor: int) -> None:
        offset, size = self._range(len(self._content))
        if size:
            data = self._data(size)
            synced = self._random.random() < 0.5
            wanted = call(fsops.write_map, actor, offset, data, True, synced)
            self._store(offset, data.value)
            start = offset - offset % fsops.PAGE_BYTES
            self._expect(actor, wanted, bytes(self._content[start : offset + size]))
            if synced:  # msync is an fsync in plain mode; with passthrough the mount does not hear of it
                self._sync(actor)

    def _copy(self, actor: int) -> None:
        """Within the file; the ranges must not overlap."""
        middle = len(self._content) // 2
        offset, size = self._range(middle)
        if size:
            wanted = call(fsops.copy_range, actor, offset, actor, middle, size)
            self._expect(actor, wanted, size)
            self._store(middle, bytes(self._content[offset : offset + size]))

    def _sync(self, actor: int) -> None:
        self._expect(actor, call(fsops.sync, actor, self._random.random() < 0.5), None)
        self._was_published()

    def _reopen(self, actor: int) -> None:
        self._close(actor)
        if not self._final:
            self._open_file(actor)
            return
        if self._random.random() < 0.4:
            self._publish()
        self._open_file(self._random.randrange(len(self._actors)))

    def _look(self, actor: int) -> None:
        """What others see, here and on another mount: what was published last, whole."""
        wanted = call(fsops.read_file, self._final or self._name)
        for side in ("mount", "other"):
            self._expect(actor, wanted, Failed("ENOENT") if self._published is None else self._published, side)

    # ---- helpers ----

    def _open_file(self, actor: int) -> None:
        self._expect(actor, call(fsops.open_file, actor, self._name, FLAGS), None)
        self._open.append(actor)
        if self._published is None:
            self._was_published()

    def _close(self, actor: int) -> None:
        self._open.remove(actor)
        self._expect(actor, call(fsops.close, actor), None)
        self._was_published()

    def _publish(self) -> None:
        """The closed temporary file gets its name. An earlier version of it may be left (names.py: superseded)."""
        self._expect(0, call(fsops.rename, self._name, self._final), None)
        self._ask(0, call(fsops.unlink, self._name))
        self._published = bytes(self._content)
        self._content.clear()

    def _was_published(self) -> None:
        if not self._final:
            self._published = bytes(self._content)

    def _store(self, offset: int, data: bytes) -> None:
        if not data:
            return
        self._content.extend(bytes(max(0, offset - len(self._content))))
        self._content[offset : offset + len(data)] = data

    def _range(self, end: int) -> tuple[int, int]:
        """Offset and size within `end`: small or large, often on a page's border."""
        offset = self._random.randint(0, end)
        if self._random.random() < 0.3:
            offset -= offset % fsops.PAGE_BYTES
        size = self._random.randint(0, end - offset)
        return offset, min(size, self._random.choice((100, 5000, end)))

    def _data(self, size: int) -> Bytes:
        return Bytes(self._random.getrandbits(32), size)

    def _ask(self, actor: int, wanted: Call, side: str = "mount") -> Any:
        self._log.append(f"{actor} {side} {wanted}")
        (answer,) = self._actors[actor].ask((side, wanted))
        return answer

    def _expect(self, actor: int, wanted: Call, expected: Any, side: str = "mount") -> None:
        answer = self._ask(actor, wanted, side)
        if answer != expected:
            calls = "\n  ".join(self._log[-LOG_CALLS:])
            raise AssertionError(f"seed {self._seed}: {_difference(answer, expected)}\n  {calls}")


def _difference(answer: Any, expected: Any) -> str:
    if not isinstance(answer, bytes) or not isinstance(expected, bytes):
        return f"{_short(answer)}, should be {_short(expected)}"
    wrong = [i for i, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b]
    where = f"{len(wrong)} differ, from {wrong[0]} to {wrong[-1]}" if wrong else "none of the common ones differ"
    return f"{len(answer)} bytes, should be {len(expected)}; {where}"


def _short(answer: Any) -> str:
    return f"{len(answer)} bytes" if isinstance(answer, bytes) else repr(answer)
