"""What an example of `tests.fuse.test_fuse_dual` stands on: two mounts, a plain directory, and who works on them."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine

from tests.support import fsops
from tests.support.actor import Actor
from tests.support.fsops import Attributes, Bytes, Call, Failed, call
from tests.support.modes import Pair
from tests.support.promise import Opened, Promise, is_temporary

ACTORS: Final = 3


@dataclass(eq=False)
class Handle:
    """A descriptor on both sides. `side`: which mount; `access`: O_RDONLY, O_WRONLY or O_RDWR."""

    number: int
    actor: int
    side: str
    access: int
    opened: Opened


class World:
    """What all examples share. `differences`: what may differ; `differed`: what did."""

    def __init__(self, pair: Pair, plain: Path, differences: dict[str, str]) -> None:
        self.pair, self.plain, self.differences = pair, plain, differences
        self.examples = itertools.count()
        self.differed: set[str] = set()
        self.actors: list[Actor] = []

    def living_actors(self) -> list[Actor]:
        """One that hung or died in the last example is replaced."""
        sides = {"mount": self.pair.a.path, "other": self.pair.b.path, "plain": self.plain}
        self.actors = [actor for actor in self.actors if actor.pid]
        while len(self.actors) < ACTORS:
            self.actors.append(Actor(f"actor {len(self.actors)}", sides))
        return self.actors

    def close(self) -> None:
        for actor in self.actors:
            actor.end()


class SideBySide(RuleBasedStateMachine):
    """Each example has a directory of its own on every side: "mount", "other" (the same on another mount), "plain"."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        """Something differed: the example is over."""
        self.actors = self.world.living_actors()
        self.handles: list[Handle] = []
        self.numbers, self.seeds = itertools.count(1), itertools.count(1)
        pair, name = self.world.pair, f"example-{next(self.world.examples)}"
        self.promise = Promise(self.world.plain / name, self.differs)
        self._ask(0, ("mount", call(fsops.enter, pair.a.path)), ("mount", call(fsops.make_directory, name)))
        roots = {"mount": pair.a / name, "other": pair.b / name, "plain": self.promise.tree}
        for actor in range(ACTORS):
            self._ask(actor, *((side, call(fsops.enter, root)) for side, root in roots.items()))
        for directory in ("d", ".tmp"):
            self.step(0, call(fsops.make_directory, directory))

    @property
    def here(self) -> list[Handle]:
        """Those on the first mount."""
        return [h for h in self.handles if h.side == "mount"]

    @property
    def writers(self) -> list[Handle]:
        return [h for h in self.here if h.access != os.O_RDONLY]

    def differs(self, name: str) -> None:
        assert name in self.world.differences, name
        self.world.differed.add(name)

    def step(self, actor: int, wanted: Call, promised: Call | Failed | None = None, side: str = "mount") -> Any:
        """Carry it out on the mount, and what is promised on the plain side; their answer, which is the same."""
        promised = wanted if promised is None else promised
        if isinstance(promised, Failed):
            answer, expected = self._ask(actor, (side, wanted))[0], promised
        else:
            answer, expected = self._ask(actor, (side, wanted), ("plain", promised))
        note(f"{actor} {side} {wanted}: {short(answer)}" + (f"  [{promised}]" if promised is not wanted else ""))
        if side == "other" and wanted.function is fsops.stat_open:
            answer, expected = self._content_only(answer), self._content_only(expected)
        self.broken = self.broken or answer != expected
        assert answer == expected, f"{wanted} on {side}: {short(answer)}, should be {short(expected)}"
        return answer

    def ask_one(self, actor: int, side: str, wanted: Call) -> Any:
        return self._ask(actor, (side, wanted))[0]

    def elsewhere(self, path: str, wanted: Call) -> Call | Failed:
        """What the other mount answers: it has no temporary names of this one."""
        if is_temporary(path) and (self.promise.tree / path).exists():
            self.differs("hidden from other mounts")
            return Failed("ENOENT")
        return wanted

    def data(self, size: int) -> Bytes:
        """Unlike any other."""
        return Bytes(next(self.seeds), size)

    def path(self, place: int | str) -> str:
        """A path as it is, or one of the files that are there."""
        if isinstance(place, str):
            return place
        there = [str(p.relative_to(self.promise.tree)) for p in sorted(self.promise.tree.rglob("*")) if p.is_file()]
        return there[place % len(there)] if there else "a"

    def keep(self, handle: Handle, path: str) -> None:
        """It is open: one of a directory is closed again, as only a file can do something with it."""
        if (self.promise.tree / path).is_dir():
            self.step(handle.actor, call(fsops.close, handle.number), side=handle.side)
        else:
            self.handles.append(handle)

    def size_of(self, handle: Handle) -> int:
        attributes = self.ask_one(handle.actor, "plain", call(fsops.stat_open, handle.number))
        assert isinstance(attributes, Attributes)
        return attributes.size or 0

    def _ask(self, actor: int, *requests: tuple[str, Call]) -> list[Any]:
        return self.actors[actor].ask(*requests)

    def _content_only(self, answer: Attributes) -> tuple[str, int | None]:
        self.differs("attributes of another mount's version")
        return answer.kind, answer.size


def short(answer: Any) -> str:
    return f"{len(answer)} bytes, {answer[:20]!r}…" if isinstance(answer, bytes) and len(answer) > 40 else repr(answer)
