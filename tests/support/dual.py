"""What an example of `tests.fuse.test_dual` stands on: two mounts, a plain directory, and who works on them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from hypothesis import currently_in_test_context, note
from hypothesis.stateful import RuleBasedStateMachine, invariant

from tests.support import fsops
from tests.support.actor import Actor
from tests.support.fsops import Attributes, Bytes, Call, Failed, call
from tests.support.modes import Pair, mounted_pair
from tests.support.promise import Opened, Promise, is_temporary

ACTORS: Final = 3
FILES: Final = ("a", "b", "d/a", "d/b", "e/a", "x.tmp", "y.tmp", "d/x.tmp", "d/y.tmp", ".tmp/a")
DIRECTORIES: Final = ("d", "e", "d/e", ".tmp", "e.tmp")
ODD: Final = ("none/a", "a/b", "b/x.tmp", ".")
START: Final = ("a", "d/a", "x.tmp")
"""Files that are there when an example begins."""


@dataclass(eq=False)
class Handle:
    """A descriptor on both sides. `side`: which mount; `access`: O_RDONLY, O_WRONLY or O_RDWR."""

    number: int
    actor: int
    side: str
    access: int
    opened: Opened


@dataclass(eq=False)
class Scan:
    """A listing in progress. `fd`: the directory on the plain side; `stayed`: names that were there all the time;
    `came`: that were there at some time.
    """

    number: int
    actor: int
    fd: int
    stayed: set[str]
    came: set[str]
    seen: list[str] = field(default_factory=list)


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


@contextmanager
def shared_world(root: Path, mode: str, differences: dict[str, str]) -> Iterator[World]:
    """The first mount remembers entries for the usual time; what the other shows is asked for each time."""
    with mounted_pair(root, mode, settings_b='[client]\nmetadata_ttl = "0s"\n') as pair:
        world = World(pair, root / "plain", differences)
        try:
            yield world
        finally:
            world.close()


class SideBySide(RuleBasedStateMachine):
    """Each example has a directory of its own on every side: "mount", "other" (the same on another mount), "plain"."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        """Something differed, or an actor hung or died: the example is over."""
        self.actors = self.world.living_actors()
        self.handles: list[Handle] = []
        self.scans: list[Scan] = []
        self.numbers, self.seeds = itertools.count(1), itertools.count(1)
        pair, name = self.world.pair, f"example-{next(self.world.examples)}"
        self.promise = Promise(self.world.plain / name, self.differs)
        self.ask(0, ("mount", call(fsops.enter, pair.a.path)), ("mount", call(fsops.make_directory, name)))
        roots = {"mount": pair.a / name, "other": pair.b / name, "plain": self.promise.tree}
        for actor in range(ACTORS):
            self.ask(actor, *((side, call(fsops.enter, root)) for side, root in roots.items()))
        self._begin()

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

    def step(
        self,
        actor: int,
        wanted: Call,
        promised: Call | Failed | None = None,
        side: str = "mount",
        seen: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        """Carry it out on the mount, and what is promised on the plain side; their answer, which is the same as far as
        `seen` shows it.
        """
        promised = wanted if promised is None else promised
        answer: Any
        expected: Any
        if isinstance(promised, Failed):
            answer, expected = self.ask(actor, (side, wanted))[0], promised
        else:
            answer, expected = self.ask(actor, (side, wanted), ("plain", promised))
        tell(f"{actor} {side} {wanted}: {short(answer)}" + (f"  [{promised}]" if promised is not wanted else ""))
        answer, expected = seen(answer), seen(expected)
        self.broken = self.broken or answer != expected
        assert answer == expected, f"{wanted} on {side}: {short(answer)}, should be {short(expected)}"
        return answer

    def ask(self, actor: int, *requests: tuple[str, Call]) -> list[Any]:
        try:
            return self.actors[actor].ask(*requests)
        except BaseException:
            self.broken = True
            raise

    def elsewhere(self, path: str, wanted: Call) -> Call | Failed:
        """What the other mount answers: it has no temporary names of this one."""
        if is_temporary(path) and (self.promise.tree / path).exists():
            self.differs("hidden from other mounts")
            return Failed("ENOENT")
        return wanted

    def path(self, pick: int) -> str:
        """Half of them lead to a file that is there."""
        there = [str(p.relative_to(self.promise.tree)) for p in self.promise.tree.rglob("*") if p.is_file()]
        pool = sorted(there) * 3 + [*FILES, *DIRECTORIES, *ODD]
        return pool[pick % len(pool)]

    def data(self, size: int) -> Bytes:
        """Unlike any other."""
        return Bytes(next(self.seeds), size)

    def size_of(self, handle: Handle) -> int:
        (attributes,) = self.ask(handle.actor, ("plain", call(fsops.stat_open, handle.number)))
        assert isinstance(attributes, Attributes)
        return attributes.size or 0

    def open(self, actor: int, path: str, flags: int, mode: int) -> Handle | None:
        number = next(self.numbers)
        promised, opened = self.promise.open(number, path, flags, mode)
        answer = self.step(actor, call(fsops.open_file, number, path, flags, mode), promised)
        self.promise.opened(opened, failed=isinstance(answer, Failed))
        return self.keep(answer, path, Handle(number, actor, "mount", flags & os.O_ACCMODE, opened))

    def keep(self, answer: Any, path: str, handle: Handle) -> Handle | None:
        """It was opened, unless `answer` says why not. A directory is closed again: there is nothing to do with it."""
        if isinstance(answer, Failed):
            return None
        self.handles.append(handle)
        if (self.promise.tree / path).is_dir():
            self.close(handle)
            return None
        return handle

    def close(self, handle: Handle) -> None:
        self.handles.remove(handle)
        self.step(handle.actor, call(fsops.close, handle.number), side=handle.side)
        self.promise.closed(handle.opened)

    def duplicate(self, handle: Handle) -> Handle:
        copy = Handle(next(self.numbers), handle.actor, handle.side, handle.access, handle.opened)
        self.step(handle.actor, call(fsops.dup, handle.number, copy.number), side=handle.side)
        handle.opened.fds += 1
        self.handles.append(copy)
        return copy

    def cut(self, actor: int, path: str, size: int) -> None:
        """truncate(2)"""
        promised, opened = self.promise.truncate(path, size)
        answer = self.step(actor, call(fsops.truncate, path, size), promised)
        self.promise.opened(opened, failed=isinstance(answer, Failed))
        if not isinstance(answer, Failed):
            self.promise.closed(opened)

    @invariant()
    def follow_scans(self) -> None:
        for scan in self.scans:
            there = set(os.listdir(scan.fd))
            scan.stayed &= there
            scan.came |= there

    def teardown(self) -> None:
        """All closed, the whole tree is the same, and can be removed."""
        for scan in self.scans:
            os.close(scan.fd)
        if self.broken:
            return
        while self.handles:
            self.close(self.handles[0])
        for path in sorted(p for p in self.promise.tree.rglob("*") if p.is_file()):
            name = str(path.relative_to(self.promise.tree))
            wanted = call(fsops.read_file, name)
            self.step(0, wanted)
            self.step(0, wanted, self.elsewhere(name, wanted), "other")
        self.step(0, call(fsops.remove_tree))

    def _begin(self) -> None:
        for directory in ("d", ".tmp"):
            self.step(0, call(fsops.make_directory, directory))
        for path in START:
            handle = self.open(0, path, os.O_CREAT | os.O_WRONLY, 0o644)
            assert handle is not None
            self.step(0, call(fsops.write, handle.number, self.data(5000)))
            self.close(handle)


def attribute_setter(mode: int, mtime_ns: int, times: bool) -> Callable[[Path], None]:
    return lambda path: os.utime(path, ns=(mtime_ns, mtime_ns)) if times else path.chmod(mode)


def tell(line: str) -> None:
    """Printed with the failure of a Hypothesis test; a failure of another test prints it as it is."""
    (note if currently_in_test_context() else print)(line)


def short(answer: Any) -> str:
    return f"{len(answer)} bytes, {answer[:20]!r}…" if isinstance(answer, bytes) and len(answer) > 40 else repr(answer)
