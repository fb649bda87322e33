"""The mount in its modes beside a plain directory on the same disk, in one run: the figures of the mount.

    python -m bench.mount [--quick] [--home DIR] [--rounds 5] [--modes passthrough,keep_cache,direct_io] [--json FILE]

Starts a store (master, one worker) and one mount a mode below DIR (a fresh temporary directory), and measures each
place in turn, round by round: whole files of 14 and 32 MiB, 1 and 4 at a time (write + close + rename, which includes
hash, seal and the synced publish; first read of warm pages; read again), LMCache's own put and get, small calls, and
the CPU time of every process meanwhile. Everything is stopped, unmounted and removed in the end, also by Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench import lmcache_mount, mount_table
from bench.mount_load import Load, Sample, Samples
from bench.mount_places import MODES, Place, Places, running
from bench.mount_table import Results, What
from bench.store import PYTHON

MIB: Final = 1 << 20
LOAD_TIMEOUT_S: Final = 120.0
MODELS: Final = {"14 MiB": ("qwen2-7b", 16), "32 MiB": ("llama-3-8b", 8)}
"""Size of an LMCache chunk → the model that has it, and how many of them."""


class Plan(NamedTuple):
    """`bytes_each`: moved by one phase of one round. `lmcache_rounds` 0: not at all."""

    rounds: int
    sizes_mib: Sequence[int]
    bytes_each: int
    names: int
    lmcache_rounds: int


FULL: Final = Plan(5, (14, 32), 256 * MIB, 300, 3)
QUICK: Final = Plan(1, (14,), 56 * MIB, 40, 0)


def measure(places: Places, plan: Plan) -> Results:
    results = Results()
    for place in places:
        loaded(place, Load("files", "", 2, {}, MIB))  # connections, threads, code: not what is measured
    for number in range(plan.rounds):
        say(f"round {number + 1} of {plan.rounds}")
        for what, load in loads(plan):
            for place in places:
                for phase, sample in loaded(place, load).items():
                    results.add(what._replace(phase=phase), place.name, sample)
                places.settle()
    for number in range(plan.lmcache_rounds):
        say(f"LMCache, round {number + 1} of {plan.lmcache_rounds}")
        for size, (model, chunks) in MODELS.items():
            for place in places:
                for phase, sample in with_lmcache(place, number, model, chunks).items():
                    results.add(What(phase, size), place.name, sample)
                places.settle()
    return results


def loads(plan: Plan) -> Iterator[tuple[What, Load]]:
    for size in plan.sizes_mib:
        for at_a_time in (1, 4):
            count = max(at_a_time, plan.bytes_each // (size * MIB))
            yield What("", f"{size} MiB × {at_a_time}"), Load("files", "", count, {}, size * MIB, at_a_time)
    yield What("", unit="calls/s"), Load("small", "", plan.names, {})


def loaded(place: Place, load: Load) -> Samples:
    """Run it there."""
    load = load._replace(directory=str(place.directory), pids=place.pids, scratch=str(place.directory.parent))
    out = output_of([PYTHON, "-m", "bench.mount_load", json.dumps(load._asdict())], place.name)
    return {phase: Sample(*values) for phase, values in json.loads(out).items()}


def with_lmcache(place: Place, number: int, model: str, chunks: int) -> Samples:
    directory = place.directory / "lmcache"
    rates = lmcache_mount.one_round(directory, number + 1, model, chunks)
    output_of(["rm", "-r", str(directory)], place.name)
    return {f"LMCache {what}": Sample(1.0, int(rate * 1e6), {}, {}) for what, rate in rates.items()}


def output_of(command: Sequence[str], place: str) -> str:
    """What it printed. Raises SystemExit when it fails or hangs; then it is killed and not waited for: what frees it is
    the end of the mount.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        out, _ = process.communicate(timeout=LOAD_TIMEOUT_S)
    except BaseException as error:
        process.kill()
        if isinstance(error, subprocess.TimeoutExpired):
            raise SystemExit(f"{place}: {command[0]} did not end within {LOAD_TIMEOUT_S:g} s") from None
        raise
    if process.returncode:
        raise SystemExit(f"{place}: {command[0]} failed, see above")
    return out


def say(line: str) -> None:
    print(f"… {line}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace, home: Path) -> None:
    plan = QUICK if options.quick else FULL
    if options.rounds:
        plan = plan._replace(rounds=options.rounds, lmcache_rounds=min(options.rounds, plan.lmcache_rounds))
    if options.no_lmcache:
        plan = plan._replace(lmcache_rounds=0)
    with running(home, options.modes.split(",")) as places:
        results = measure(places, plan)
    for mode, why in places.absent.items():
        print(f"{mode} is not measured: {why}")
    for line in mount_table.lines(results, plan.rounds):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(results.raw(), indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small round without LMCache, under a minute")
    parser.add_argument("--home", type=Path, help="directory on the disk to measure")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--no-lmcache", action="store_true")
    parser.add_argument("--json", type=Path, help="also write every sample there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.home) as name:
        run(options, Path(name))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
