"""The results of `bench.trace` as a picture: one panel a trace, one line a policy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.trace import Result


def plot(results: Sequence[Result], path: Path) -> None:
    """Write a PNG; without matplotlib say what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("trace: no plot without matplotlib; pip install matplotlib", file=sys.stderr)
        return
    traces = list(dict.fromkeys(result.trace for result in results))
    figure = Figure(figsize=(6 * len(traces), 5), layout="constrained")
    for trace, axes in zip(traces, figure.subplots(1, len(traces), squeeze=False)[0], strict=True):
        mine = [result for result in results if result.trace == trace]
        for policy, tiers in dict.fromkeys((result.policy, result.tiers) for result in mine):
            line = [result for result in mine if (result.policy, result.tiers) == (policy, tiers)]
            axes.plot(
                [100 * result.size for result in line],
                [result.hits for result in line],
                marker="o",
                linestyle="-" if tiers == 1 else "--",
                linewidth=2.5 if policy == "ours" else 1,
                label=policy if tiers == 1 else f"{policy}, two tiers",
            )
        axes.set(title=trace, xlabel="cache size, % of unique blocks", ylabel="prefix hits, % of blocks asked for")
        axes.set_xscale("log")
        sizes = sorted({100 * result.size for result in mine})
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
