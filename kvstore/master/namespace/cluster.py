"""What decisions about names and blocks need to know of the workers: a value, made anew when something about them
changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvstore.core.limits import MAX_BLOCK_BYTES
from kvstore.core.types import Replica


class Cluster(NamedTuple):
    live: Mapping[int, Replica]
    """Volume id → how a replica on it is told to readers; only volumes in service on live nodes (rule 4)."""
    homes: Mapping[int, str] = {}
    """Volume id → node, of every volume that is remembered."""
    fences: Mapping[int, int] = {}
    """Boot → lowest counter that may still be published; a boot that is not here is over (rules 10, 11)."""
    boots: Mapping[int, str] = {}
    """Boot → node."""
    max_block_bytes: int = MAX_BLOCK_BYTES
    hidden: Mapping[int, int] = {}
    """Policy → published bytes of it that no live worker holds, as far as it is known: no quota counts them."""

    def publishable(self, boot: int, counter: int) -> bool:
        fence = self.fences.get(boot)
        return fence is not None and counter >= fence
