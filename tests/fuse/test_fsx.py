"""Random reads, writes, truncations and maps of one file (`tests.support.fsx`): small and as big as a chunk, by one
process and by several in turn, under an ordinary and under a temporary name.

`KVSTORE_LONG=1` goes on for longer with a new seed; `KVSTORE_SEED=n` repeats what a failure printed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final, NamedTuple

import pytest

from tests.support import fsops
from tests.support.actor import Actor
from tests.support.fsops import call
from tests.support.fsx import Fsx
from tests.support.modes import MODES, Pair, mounted_pair

LONG: Final = bool(os.environ.get("KVSTORE_LONG"))
MIB: Final = 1 << 20


class Case(NamedTuple):
    """`steps` of `actors` on a file of at most `max_bytes`."""

    actors: int
    max_bytes: int
    steps: int
    temporary: bool

    @property
    def label(self) -> str:
        return f"{'temporary' if self.temporary else 'ordinary'}-{self.actors}x{self.max_bytes}"


CASES: Final = [
    Case(actors, max_bytes, steps * (50 if LONG else 1), temporary)
    for temporary in (False, True)
    for actors in (1, 3)
    for max_bytes, steps in ((40_000, 250), (14 * MIB, 40))
]


@pytest.fixture(scope="module", params=MODES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("fsx")
    with mounted_pair(root, request.param, settings_b='[client]\nmetadata_ttl = "0s"\n') as pair:
        yield pair


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_a_file_is_what_was_written(pair: Pair, case: Case) -> None:
    seed = int(os.environ.get("KVSTORE_SEED") or (int.from_bytes(os.urandom(4)) if LONG else hash(case) & 0xFFFF_FFFF))
    name = case.label
    sides = {"mount": pair.a / name, "other": pair.b / name}
    with ExitStack() as stack:
        actors = [stack.enter_context(Actor(f"actor {i}", sides)) for i in range(case.actors)]
        actors[0].ask(("mount", call(fsops.make_directory, "")))
        Fsx(seed, actors, "file.tmp" if case.temporary else "file", case.max_bytes, "file" * case.temporary).run(
            case.steps
        )
