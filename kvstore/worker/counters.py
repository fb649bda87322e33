"""What a worker counts; travels in heartbeats and is shown as metrics."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Counters:
    """All since the worker's start. Written on the loop, read by the heartbeat's thread."""

    hits: int = 0
    """Opens and reads of a block that was here."""
    misses: int = 0
    fetches: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    read_bytes: int = 0
    """Bytes of blocks handed out: a whole block an fd, the frames sent otherwise."""
    written_bytes: int = 0
    corruptions: int = 0
    promotions: int = 0
    promoted_bytes: int = 0
    demotions: int = 0
    demoted_bytes: int = 0
