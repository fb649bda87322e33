"""The ways in which a mount serves bytes. What it promises holds in each of them, so every such test runs in each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.cluster import Cluster
from tests.support.mounts import Mount, mounted

MODES: Final = ("plain", "passthrough")

DEAD_TICKS: Final = 200
"""Nobody is killed here: a machine that is busy for some seconds must not look like a death, whose names are gone."""


def mode_options(mode: str) -> tuple[str, ...]:
    """What `kvstore mount` is told."""
    return ("--passthrough", "on" if mode == "passthrough" else "off")


class Pair(NamedTuple):
    """A running store with two mounts in one mode: `a` on the node of worker 0, `b` on that of worker 1."""

    mode: str
    cluster: Cluster
    a: Mount
    b: Mount


@contextmanager
def mounted_pair(root: Path, mode: str, *, capacity: str = "1GiB", settings_b: str = "") -> Iterator[Pair]:
    """`capacity` of each worker's volume; `settings_b`: TOML for the second mount."""
    with (
        Cluster(root, workers=2, capacity=capacity, dead_ticks=DEAD_TICKS) as cluster,
        mounted(cluster, root / "a", cluster.workers[0], *mode_options(mode)) as a,
        mounted(cluster, root / "b", cluster.workers[1], *mode_options(mode), settings=settings_b) as b,
    ):
        yield Pair(mode, cluster, a, b)
