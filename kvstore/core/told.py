"""What a worker tells of itself: the same words at the master and for whoever asks it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class VolumeState(NamedTuple):
    id: int
    tier: str
    capacity_bytes: int
    used_bytes: int
    free_bytes: int


class WorkerCounters(NamedTuple):
    """Of one worker since its start."""

    hits: int = 0
    misses: int = 0
    fetches: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    corruptions: int = 0
    promotions: int = 0
    promoted_bytes: int = 0
    demotions: int = 0
    demoted_bytes: int = 0
    fetched_bytes: int = 0
    """Of blocks that were brought from a peer and kept."""
    extra_bytes: int = 0
    """That files of blocks have come to take on the disk beyond their lengths, for their names mostly."""


class Unlinked(NamedTuple):
    """`reason`: capacity, floor, quota, ttl, removed, corrupt, orphan; a newer worker may have others."""

    reason: str
    files: int
    bytes: int
    """What they took on the disk."""


class TierCounters(NamedTuple):
    """Of one worker's volumes of one tier, since its start. Moves count where they end."""

    tier: str
    blocks: int = 0
    """That are there now."""
    hits: int = 0
    promotions: int = 0
    promoted_bytes: int = 0
    demotions: int = 0
    demoted_bytes: int = 0
    pinned_bytes: int = 0
    """That are never evicted, now."""
    unpinned_bytes: int = 0
    """Of blocks whose pin has no effect now: the share for pins is used up."""
    unlinked: Sequence[Unlinked] = ()
    """Of the reasons that occurred."""
