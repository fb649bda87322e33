"""The words of `kvstore nodes list`."""

from __future__ import annotations

import pytest

from kvstore.cli.nodes_cmd import state
from kvstore.client.messages import Node
from kvstore.core.told import VolumeState, WorkerCounters


@pytest.mark.parametrize(
    ("live", "draining", "volumes", "word"),
    [
        (True, False, 1, "live"),
        (True, True, 1, "draining"),
        (False, False, 1, "dead"),
        (True, False, 0, "no volume"),
        (False, False, 0, "dead"),
    ],
)
def test_the_state_of_a_node(live: bool, draining: bool, volumes: int, word: str) -> None:
    here = tuple(VolumeState(i, "ssd", 100, 0, 100) for i in range(volumes))
    assert state(Node("a", "a:1", "", live, 0.1, here, WorkerCounters(), 0, draining, "1")) == word
