"""Real mounts of a real store.

One store with two nodes for all tests of a module; tests that kill something make their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.child import in_child
from tests.support.cluster import Cluster
from tests.support.modes import MODES, Pair, mounted_pair
from tests.support.mounts import Mount, can_mount, mounted


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.fuse)
            if not can_mount():
                item.add_marker(pytest.mark.skip(reason="mounting needs root and /dev/fuse"))


class Store(NamedTuple):
    """A running store: `a` is mounted on the node of worker 0, `b` on that of worker 1."""

    cluster: Cluster
    a: Mount
    b: Mount


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = tmp_path_factory.mktemp("store")
    with (
        Cluster(root, workers=2, capacity="1GiB") as cluster,
        mounted(cluster, root / "a", cluster.workers[0]) as a,
        mounted(cluster, root / "b", cluster.workers[1]) as b,
    ):
        yield Store(cluster, a, b)


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> str:
    """A directory name of this test's own."""
    return "".join(c if c.isalnum() else "_" for c in request.node.name)[:60]


@pytest.fixture(scope="module", params=MODES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two mounts of one store, in each mode."""
    with mounted_pair(tmp_path_factory.mktemp("pair"), request.param) as pair:
        yield pair


@pytest.fixture
def place(pair: Pair, request: pytest.FixtureRequest) -> Path:
    """A directory of this test's own on the first mount."""
    path = pair.a / "".join(c if c.isalnum() else "_" for c in request.node.name)
    in_child(os.mkdir, path)
    return path
