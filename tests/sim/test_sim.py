"""The simulation in short: some seeds, the same one twice, and the planted bugs. `make sim` runs many more."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Final

import pytest

from tests.sim.planted import PLANTS, Plant
from tests.sim.run import freeze, run_seed

SEEDS: Final = 15
PLANT_SEEDS: Final = 12
SHORT_S: Final = 4.0
"""Virtual seconds of load of a run that is only compared with another one."""


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("first", range(1, SEEDS + 1, 5))
def test_all_invariants_hold_whatever_breaks(first: int) -> None:
    total = Counter[str]()
    for seed in range(first, first + 5):
        outcome = run_seed(seed)
        assert not outcome.error, "\n".join([*outcome.story, f"seed {seed}: {outcome.error}"])
        total.update(outcome.outcomes)
    assert total["put created"] > 100  # in one of them the master may have been away nearly all the time
    assert total["get hit"] > 100


def test_a_seed_has_one_course_of_events_in_every_process() -> None:
    script = f"from tests.sim.run import run_seed; print(run_seed(7, load_s={SHORT_S}).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }  # fmt: skip
    assert digests == {run_seed(7, load_s=SHORT_S).digest}


def test_another_seed_has_another_course() -> None:
    assert run_seed(1, load_s=1.0).digest != run_seed(2, load_s=1.0).digest


@pytest.mark.parametrize("plant", PLANTS, ids=[plant.name.replace(" ", "-") for plant in PLANTS])
def test_a_planted_bug_is_found_by_one_of_a_few_seeds(plant: Plant) -> None:
    assert plant.find(PLANT_SEEDS) is not None
