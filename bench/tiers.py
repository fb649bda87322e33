"""Three workers with memory and disk under LMCache's load: ``python -m bench.tiers [--minutes 3]``.

The working set is four times the memory and twice the whole. Two engines work through mounts on two nodes, one through
the SDK on the third. Shown: where hot and other prompts were found, how full each volume ever was, and the accounts at
the end. It fails when a client met an error, a cap was passed, or a byte is not accounted for.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from bench.tiers_books import Account, Caps, accounts, settle
from bench.tiers_load import MIB, Directory, Prompts, Sdk, Tally, engine
from kvstore import Client
from kvstore.client.messages import Node
from kvstore.config.units import format_size
from tests.support.cluster import Cluster
from tests.support.crew import Crew
from tests.support.mounts import mounted

WORKERS: Final = 3
VOLUME_BYTES: Final = 96 * MIB
"""Of each tier on each worker."""
DIRECTORY: Final = "lmcache"
JOIN_S: Final = 60.0


class Outcome(NamedTuple):
    prompts: Prompts
    tallies: list[Tally]
    highest: dict[str, int]
    looks: int
    nodes: list[Node]
    accounts: list[Account]

    @property
    def failures(self) -> list[str]:
        """What must not be."""
        errors = sum((tally.errors for tally in self.tallies), Counter[str]())
        found = [f"{count} × {error}" for error, count in errors.items()]
        found += [f"{v}: {format_size(size)} were used" for v, size in self.highest.items() if size > VOLUME_BYTES]
        found += [f"accounts do not fit: {account}" for account in self.accounts if not account.fits]
        return found

    def share_in_memory(self, *, hot: bool) -> float:
        """Of the chunks that were found in the second half of the run, by prompts that are hot or not."""
        tiers = sum((tally.tiers for tally in self.tallies), Counter[tuple[bool, str]]())
        total = sum(count for (is_hot, tier), count in tiers.items() if is_hot is hot and tier)
        return tiers[hot, "mem"] / total if total else 0.0


def run(home: Path, seconds: float) -> Outcome:
    """A store of its own below `home`, and the load for so long."""
    prompts = Prompts(4 * WORKERS * VOLUME_BYTES)
    size = f"{VOLUME_BYTES // MIB}MiB"
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(home, workers=WORKERS, capacity=size, memory=size))
        mounts = [
            stack.enter_context(mounted(cluster, home / f"mount-{worker.node}", worker))
            for worker in cluster.workers[:2]
        ]
        with Client(cluster.url, worker_socket="") as client:
            client.mkdir(DIRECTORY)
            with Crew(home) as crew, Caps(cluster) as caps:
                engines = [
                    crew.start(engine, Directory(mount.path / DIRECTORY), prompts, seed, seconds)
                    for seed, mount in enumerate(mounts)
                ]
                with ThreadPoolExecutor() as threads:  # a fork of a process that has used gRPC could not use it
                    last = threads.submit(_sdk_engine, cluster.url, cluster.workers[2].socket, prompts, seconds)
                    tallies = [*crew.together(engines, seconds + JOIN_S), last.result(JOIN_S)]
            settle(cluster)
            found = list(accounts(cluster, client, DIRECTORY))
        return Outcome(prompts, tallies, caps.highest, caps.looks, list(cluster.map().nodes), found)


def _sdk_engine(url: str, socket: str, prompts: Prompts, seconds: float) -> Tally:
    with Client(url, worker_socket=socket) as client:
        return engine(Sdk(client, DIRECTORY), prompts, 2, seconds)


def show(outcome: Outcome) -> None:
    prompts, tallies = outcome.prompts, outcome.tallies
    print(
        f"{prompts.count} prompts, {format_size(prompts.size_bytes)} of chunks; "
        f"{WORKERS} workers with {format_size(VOLUME_BYTES)} of memory and as much disk each"
    )
    requests, asked, hits, puts, lost = (sum(column) for column in zip(*(t[:5] for t in tallies), strict=True))
    print(f"{requests:,} requests, {asked:,} chunks asked for, {hits / max(1, asked):.1%} found, {puts:,} stored")
    print(f"{lost:,} were evicted between look-up and read; longest request {max(t.longest_s for t in tallies):.2f} s")
    for title, hot in (("hot prompts (the first tenth)", True), ("the others", False)):
        print(f"found in memory, {title}: {outcome.share_in_memory(hot=hot):.1%}")
    for node in sorted(outcome.nodes, key=lambda node: node.id):
        for tier in node.tiers:
            reasons = ", ".join(f"{u.reason} {u.files:,}" for u in tier.unlinked if u.files) or "none"
            print(
                f"{node.id} {tier.tier}: hits {tier.hits:,}, promoted into {tier.promotions:,}, demoted into "
                f"{tier.demotions:,}, unlinked: {reasons}"
            )
    for volume, size in outcome.highest.items():
        print(f"{Path(volume).name}: at most {format_size(size)} of {format_size(VOLUME_BYTES)}")
    print(f"looked {outcome.looks:,} times")
    for a in outcome.accounts:
        wrong = f"DOES NOT FIT: {a.strangers} files without a name, {a.absent} names without a file"
        fits = "fits" if a.fits else wrong
        print(f"{a.node}: came {a.came:,} - unlinked {a.unlinked:,} = on disk {a.on_disk:,} = told {a.told:,}: {fits}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tiers", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    minutes: float = parser.parse_args(arguments).minutes
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as home:
        outcome = run(Path(home), minutes * 60)
    show(outcome)
    for failure in outcome.failures:
        print(f"FAILED: {failure}")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
