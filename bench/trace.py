"""Traces of a production LLM service, through the code that decides what the store keeps: ``python -m bench.trace``.

A request asks for the blocks of its prompt, first block first, until one is missing; those it found are hits, the rest
of the prompt is computed and stored. Printed: the share of hits in all blocks asked for. The usual policies get each
prompt last block first, which suits them (LRU would drop heads before tails); ours gets it as an engine opens it, and
one of `CLIENTS` engines serves each request, so that its bursts are found by time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench.trace_ours import Ours
from bench.trace_policies import Arc, Fifo, Lru, Policy, S3Fifo

TRACES: Final = ("conversation", "synthetic")
SHARES: Final = (0.01, 0.03, 0.1, 0.3)
"""Sizes of the cache, in unique blocks of the trace."""
QUICK_SHARES: Final = (0.03, 0.1)
QUICK_REQUESTS: Final = 3000
CLIENTS: Final = 8
CHUNK_S: Final = 0.002
"""An engine opens its chunks about so fast."""
STORED_AT_ONCE: Final = 32
"""Blocks of a prompt for which room is made together."""
DEFAULT_DATA: Final = Path(__file__).resolve().parents[2] / "shared" / "data"
BASELINES: Final[Mapping[str, Callable[[int], Policy]]] = {"LRU": Lru, "FIFO": Fifo, "ARC": Arc, "S3-FIFO": S3Fifo}


class Request(NamedTuple):
    time_s: float
    blocks: Sequence[int]


class Result(NamedTuple):
    """Shares in percent."""

    trace: str
    policy: str
    tiers: int
    size: float
    hits: float
    fast_hits: float | None = None
    """Of the hits, those in the fast tier."""


def load(path: Path, max_requests: int | None) -> list[Request]:
    with path.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [Request(row["timestamp"] / 1000, row["hash_ids"]) for row in rows[:max_requests]]


def replay(requests: Sequence[Request], policy: Policy) -> float:
    """Hits in percent, each prompt last block first."""
    hits = asked = 0
    for request in requests:
        found = prefix_length(request.blocks, policy)
        for i in reversed(range(len(request.blocks))):
            block = request.blocks[i]
            if block not in policy:
                policy.insert(block)
            elif i < found:
                policy.hit(block)
        hits += found
        asked += len(request.blocks)
    return 100 * hits / asked


def replay_ours(requests: Sequence[Request], ours: Ours) -> tuple[float, float]:
    """Hits in percent, and how many percent of them were in the fast tier."""
    hits = fast = asked = 0
    free_s = [0.0] * CLIENTS
    for number, request in enumerate(requests):
        client = number % CLIENTS
        now_s = max(request.time_s, free_s[client])
        free_s[client] = now_s + CHUNK_S * len(request.blocks)
        found = prefix_length(request.blocks, ours)
        fast += sum(ours.is_fast(block) for block in request.blocks[:found])
        for i in range(found):
            ours.hit(request.blocks[i], client, now_s + i * CHUNK_S)
        new = [i for i in range(found, len(request.blocks)) if request.blocks[i] not in ours]
        orphans = {block for block in request.blocks[found:] if block in ours}
        for first in range(0, len(new), STORED_AT_ONCE):
            some = new[first : first + STORED_AT_ONCE]
            ours.make_room(len(some), keep=orphans)
            for i in some:
                ours.insert(request.blocks[i], client, now_s + i * CHUNK_S)
        ours.settle()
        hits += found
        asked += len(request.blocks)
    return 100 * hits / asked, 100 * fast / max(1, hits)


def prefix_length(blocks: Sequence[int], policy: Policy | Ours) -> int:
    return next((i for i, block in enumerate(blocks) if block not in policy), len(blocks))


def results(data: Path, quick: bool) -> Iterator[Result]:
    for trace in TRACES:
        requests = load(data / f"mooncake_{trace}_trace.jsonl", QUICK_REQUESTS if quick else None)
        unique = len({block for request in requests for block in request.blocks})
        for size in QUICK_SHARES if quick else SHARES:
            capacity = int(unique * size)
            for tiers in (1, 2):
                hits, fast = replay_ours(requests, Ours(capacity, tiers))
                yield Result(trace, "ours", tiers, size, hits, fast if tiers == 2 else None)
            for name, policy in BASELINES.items():
                yield Result(trace, name, 1, size, replay(requests, policy(capacity)))


def label(result: Result) -> str:
    return result.policy if result.tiers == 1 else f"{result.policy}, two tiers"


def table(found: Sequence[Result]) -> str:
    """One block of lines a trace, one line a policy, one column a size."""
    lines = []
    for trace in dict.fromkeys(result.trace for result in found):
        mine = [result for result in found if result.trace == trace]
        sizes = list(dict.fromkeys(result.size for result in mine))
        lines += ["", f"{trace}: prefix hits in % of all blocks asked for, by size of the cache (of unique blocks)"]
        lines.append(f"{'':24}" + "".join(f"{size:>9.0%}" for size in sizes))
        for name in dict.fromkeys(map(label, mine)):
            lines.append(f"{name:24}" + "".join(f"{r.hits:9.2f}" for r in mine if label(r) == name))
        shares = [r.fast_hits for r in mine if r.fast_hits is not None]
        lines.append(f"{'  hits in the fast 1/4, %':24}" + "".join(f"{share:9.1f}" for share in shares))
    return "\n".join(lines[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.trace", description="Prefix hits by policy, on real traces.")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="directory of mooncake_*_trace.jsonl")
    parser.add_argument("--quick", action="store_true", help="the first requests, two sizes")
    parser.add_argument("--png", type=Path, help="write a plot")
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args(arguments)
    missing = [name for name in TRACES if not (options.data / f"mooncake_{name}_trace.jsonl").is_file()]
    if missing:
        sys.exit(f"trace: no mooncake_{missing[0]}_trace.jsonl in {options.data}; name its directory with --data DIR")
    found = list(results(options.data, options.quick))
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps([result._asdict() for result in found], indent=1) + "\n")
    if options.png:
        from bench.trace_plot import plot  # matplotlib is no dependency of the project

        plot(found, options.png)


if __name__ == "__main__":
    main()
