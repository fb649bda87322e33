"""``python -m tests.sim``: many seeds on all cores, one seed with its whole trace, or the planted bugs."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from typing import Final

from tests.sim.planted import PLANTS
from tests.sim.run import Outcome, freeze, run_seed

PROGRESS_EVERY_S: Final = 10.0
STORY_LINES: Final = 60
MOST_SHOWN: Final = 12
MAX_PLANT_SEEDS: Final = 200


def main() -> int:
    """0 when all held."""
    options = _options()
    if options.planted:
        return _find_plants()
    if options.seed is not None:
        return _show(run_seed(options.seed, show=True), [])
    return _run_many(range(options.first, options.first + options.seeds), options.jobs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, help="this one alone, with everything that happens")
    parser.add_argument("--planted", action="store_true", help="find the bugs that were put in on purpose")
    return parser.parse_args()


def _run_many(seeds: range, jobs: int) -> int:
    began_s, outcomes, failed = time.perf_counter(), Counter[str](), list[int]()
    said_s = began_s
    print(
        f"sim: seeds {seeds.start} to {seeds.stop - 1}, each a cluster in virtual time that breaks in its own way; "
        f"{jobs} at a time",
        flush=True,
    )
    with multiprocessing.get_context("spawn").Pool(jobs, freeze) as pool:
        for done, outcome in enumerate(pool.imap_unordered(run_seed, seeds), 1):
            outcomes += outcome.outcomes
            if outcome.error:
                failed.append(outcome.seed)
                _show(outcome, outcome.story)
            now_s = time.perf_counter()
            if now_s - said_s >= PROGRESS_EVERY_S or done == len(seeds):
                said_s = now_s
                print(f"{now_s - began_s:7.0f} s  {done} of {len(seeds)} seeds, {len(failed)} failed", flush=True)
    print("calls of clients, and how they ended (a hit: the right bytes; NotFound: a miss), the most frequent ones:")
    print("  " + ", ".join(f"{count} {what}" for what, count in outcomes.most_common(MOST_SHOWN)))
    if failed:
        print(
            f"BAD: invariants failed with {' '.join(map(str, sorted(failed)))}; see one with its trace: make sim SEED=n"
        )
        return 1
    print("GOOD: all invariants held at every step")
    return 0


def _show(outcome: Outcome, story: list[str]) -> int:
    for line in story[-STORY_LINES:]:
        print(f"    {line}")
    print(f"seed {outcome.seed}: {outcome.error or 'all held'} (trace {outcome.digest})", flush=True)
    return 1 if outcome.error else 0


def _find_plants() -> int:
    """Seeds in order, until each planted bug is found."""
    missed = 0
    for plant in PLANTS:
        found = plant.find(MAX_PLANT_SEEDS)
        if found is None:
            missed += 1
            print(f"{plant.name}: not found by {MAX_PLANT_SEEDS} seeds")
        else:
            print(f"{plant.name} ({plant.what}): seed {found.seed}: {found.error}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
