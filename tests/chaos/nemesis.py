"""What is done to the store, in an order that the seed decides."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Final, NamedTuple

from tests.chaos import disks
from tests.chaos.daemons import Daemon
from tests.chaos.limits import LONGEST_S, SHORTEST_S
from tests.chaos.net import HERE
from tests.chaos.world import SMALL_DISK, WORKERS, World

ROUNDS: Final = 12
"""In a short run so many actions should fit at least: the longest is shorter then."""
CALM_S: Final = (0.5, 2.0)
"""Between two rounds, at random."""
_TOGETHER: Final = 0.3
"""How often two actions overlap."""
_OFTEN: Final = {"kill": 3, "stop": 3}
"""How often these are dealt for each time that others are: they have the most targets."""
_BRIEF: Final = frozenset({"kill fs", "swap", *disks.DAMAGES})
"""Done as soon as they are begun: no use in waiting for their end."""
_BRIEF_S: Final = 1.0
_CLIENTS: Final = (HERE, "node-0", "node-1", "node-2")


class Deed(NamedTuple):
    """One action as it was done; times are CLOCK_MONOTONIC."""

    what: str
    target: str
    detail: str
    start_s: float
    end_s: float
    done: bool = True
    """False: there was nothing to do it to."""
    back_s: float = math.inf
    """When all processes served again."""

    @property
    def kind(self) -> str:
        """What was done to what kind of process: ``kill worker``."""
        target = "worker" if self.target.startswith("node-") else self.target.partition("-")[0]
        return self.what if target == "all" else f"{self.what} {target}"


Action = Callable[[str], AbstractContextManager[str]]
"""Called with its target; holds while the context is entered, which gives a detail for the log."""


class Nemesis:
    """`run` deals all kinds of action in a random order, again and again, and each kind to its targets likewise."""

    def __init__(self, world: World, seed: int, say: Callable[[str], None]) -> None:
        self._world, self._say, self._luck = world, say, random.Random(seed)
        self._aim = random.Random(seed)
        """Apart, as it depends on what lies on the disks: the order does not."""
        self._start_s = time.monotonic()
        self.deeds: list[Deed] = []
        self.broken: tuple[str, ...] = ()
        """What is, at this moment."""
        self._decks: dict[str, list[str]] = {}
        workers = [w.name for w in world.workers]
        processes = ["master", *workers, "mount-a", "mount-b"]
        links = ["master", *workers]
        self._actions: dict[str, tuple[Action, list[str]]] = {
            "kill": (self._kill, processes),
            "kill fs": (self._kill_fs, ["mount-a"]),
            "stop": (self._stop, processes),
            "stop fs": (self._stop_fs, ["mount-a"]),
            "loss": (self._loss, links),
            "deaf": (self._deaf, links),
            "part": (self._part, links),
            "rate": (self._rate, links),
            "delay": (self._delay, ["proxy"]),
            "fill": (self._fill, [workers[SMALL_DISK]]),
            "wipe": (self._wipe, workers),
            "old image": (self._old_image, workers),
            "blackout": (self._blackout, ["all"]),
            "swap": (self._swap, workers),
            **{how: (self._damaging(how), workers) for how in disks.DAMAGES},
        }

    def run(self, seconds: float) -> None:
        """Returns when all is healed, and all processes serve. Raises NotBack."""
        end_s = time.monotonic() + seconds
        longest_s = min(LONGEST_S, max(4 * SHORTEST_S, seconds / ROUNDS))
        cards = [kind for kind in self._actions for _ in range(_OFTEN.get(kind, 1))]
        while time.monotonic() < end_s:
            count = 2 if self._luck.random() < _TOGETHER else 1
            self._round({self._deal("", cards) for _ in range(count)}, longest_s)
            time.sleep(self._luck.uniform(*CALM_S))

    def _deal(self, deck: str, cards: Sequence[str]) -> str:
        """The next card of this deck, which is shuffled anew when it is used up."""
        left = self._decks.setdefault(deck, [])
        if not left:
            left += self._luck.sample(cards, len(cards))
        return left.pop()

    def _round(self, kinds: set[str], longest_s: float) -> None:
        """These at the same time, on different targets; healed in turn, and then all have to come back."""
        targets, first = list[str](), len(self.deeds)
        length_s = self._luck.uniform(SHORTEST_S, _BRIEF_S if kinds <= _BRIEF else longest_s)
        with ExitStack() as stack:
            for kind in sorted(kinds):
                action, possible = self._actions[kind]
                target = self._deal(kind, possible)
                if not {target, "all"} & {*targets} and not (targets and target == "all"):
                    targets.append(target)
                    stack.enter_context(self._deed(kind, target, action))
            time.sleep(length_s)
        self.broken = ("waiting for all to serve again",)
        self._world.back()
        self.broken, back_s = (), time.monotonic()
        self.deeds[first:] = [deed._replace(back_s=back_s) for deed in self.deeds[first:]]

    @contextmanager
    def _deed(self, kind: str, target: str, action: Action) -> Iterator[None]:
        start_s, detail, done = time.monotonic(), "", True
        with ExitStack() as stack:
            try:
                detail = stack.enter_context(action(target))
            except disks.NotDone as why:
                detail, done = f"not done: {why}", False
            self._log(f"{kind} {target} {detail}")
            if done:
                self.broken += (f"{kind} {target}",)
            yield
        end_s = time.monotonic()
        self._log(f"{kind} {target} over after {end_s - start_s:.1f} s")
        self.deeds.append(Deed(kind, target, detail, start_s, end_s, done))

    def _log(self, line: str) -> None:
        self._say(f"{time.monotonic() - self._start_s:7.1f} s  {line}")

    # ---- processes ----

    @contextmanager
    def _kill(self, target: str) -> Iterator[str]:
        daemon = self._daemon(target)
        daemon.end()
        try:
            yield ""
        finally:
            daemon.start(wait=False)

    @contextmanager
    def _blackout(self, target: str) -> Iterator[str]:
        """The master and all workers at once."""
        with ExitStack() as stack:
            for daemon in (self._world.master, *self._world.workers):
                stack.enter_context(self._kill(daemon.name))
            yield ""

    @contextmanager
    def _stop(self, target: str) -> Iterator[str]:
        with self._daemon(target).stopped():
            yield ""

    @contextmanager
    def _kill_fs(self, target: str) -> Iterator[str]:
        pid = self._file_system_process()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        yield f"pid {pid}"

    @contextmanager
    def _stop_fs(self, target: str) -> Iterator[str]:
        pid = self._file_system_process()
        with self._daemon(target).stopped(pid):
            yield f"pid {pid}"

    def _file_system_process(self) -> int:
        pid = self._world.mounts["a"].file_system_process()
        if pid is None:
            raise disks.NotDone("there is none now")
        return pid

    def _daemon(self, name: str) -> Daemon:
        return next(daemon for daemon in self._world.daemons if daemon.name == name)

    # ---- network ----

    @contextmanager
    def _loss(self, target: str) -> Iterator[str]:
        share = self._luck.uniform(0.02, 0.3)
        with self._world.network.loss(target, share):
            yield f"{share:.0%}"

    @contextmanager
    def _deaf(self, target: str) -> Iterator[str]:
        others = self._others(target)
        with self._world.network.deaf(target, others):
            yield f"to {', '.join(others)}"

    @contextmanager
    def _part(self, target: str) -> Iterator[str]:
        others = self._others(target)
        with self._world.network.parted(target, others):
            yield f"from {', '.join(others)}"

    def _others(self, target: str) -> list[str]:
        """Some or all of the other ends."""
        others = [name for name in ("master", *_CLIENTS) if name != target]
        return (
            others if self._luck.random() < 0.5 else self._luck.sample(others, self._luck.randint(1, len(others) - 1))
        )

    @contextmanager
    def _rate(self, target: str) -> Iterator[str]:
        mbit = self._luck.choice((2, 10, 50))
        with self._world.network.rate(target, mbit):
            yield f"{mbit} Mbit/s"

    @contextmanager
    def _delay(self, target: str) -> Iterator[str]:
        delay_s = self._luck.uniform(0.02, 0.6)
        with self._world.proxy.delay(delay_s):
            yield f"{delay_s * 1000:.0f} ms each way"

    # ---- disks ----

    @contextmanager
    def _fill(self, target: str) -> Iterator[str]:
        try:
            yield f"{self._world.filler.fill() / 1e6:.0f} MB taken"
        finally:
            self._world.filler.remove()

    @contextmanager
    def _wipe(self, target: str) -> Iterator[str]:
        with self._kill(target):
            disks.wipe(self._world.volume(self._index(target)))
            yield ""

    @contextmanager
    def _old_image(self, target: str) -> Iterator[str]:
        """What lies on the disk now comes back at the end, when the store has gone on."""
        volume = self._world.volume(self._index(target))
        image = self._world.root / f"image-{target}"
        try:
            with self._kill(target):
                shutil.copytree(volume, image)
            self._daemon(target).back()
            yield f"of {len(disks.blocks(image))} blocks"
            with self._kill(target):
                disks.wipe(volume)
                shutil.copytree(image, volume, dirs_exist_ok=True)
        finally:
            shutil.rmtree(image, ignore_errors=True)

    @contextmanager
    def _swap(self, target: str) -> Iterator[str]:
        yield f"{disks.swap(self._world.volume(self._index(target)), self._aim)} blocks"

    def _damaging(self, how: str) -> Action:
        @contextmanager
        def action(target: str) -> Iterator[str]:
            yield f"{disks.damage(self._world.volume(self._index(target)), how, self._aim)} blocks"

        return action

    def _index(self, target: str) -> int:
        index = int(target.rpartition("-")[2])
        assert 0 <= index < WORKERS
        return index
