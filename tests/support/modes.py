"""The ways in which a mount serves bytes. What a mount promises holds in each of them, so every such test runs in each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.cluster import Cluster
from tests.support.mounts import Mount, mounted

_OPTION: Final = "--passthrough"


def _has_option() -> bool:
    help_text = subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", "mount", "--help"],
        capture_output=True, text=True, check=True, timeout=30, env={"COLUMNS": "200", "NO_COLOR": "1"},
    ).stdout  # fmt: skip
    return _OPTION in help_text


HAS_OPTION: Final = _has_option()  # to be removed with the option's arrival
MODES: Final = ("plain", "passthrough") if HAS_OPTION else ("plain",)


def mode_options(mode: str) -> tuple[str, ...]:
    """What `kvstore mount` is told."""
    return (_OPTION, "on" if mode == "passthrough" else "off") if HAS_OPTION else ()


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
        Cluster(root, workers=2, capacity=capacity) as cluster,
        mounted(cluster, root / "a", cluster.workers[0], *mode_options(mode)) as a,
        mounted(cluster, root / "b", cluster.workers[1], *mode_options(mode), settings=settings_b) as b,
    ):
        yield Pair(mode, cluster, a, b)
