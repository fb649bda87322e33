"""What a worker counts; travels in heartbeats and is shown as metrics."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Final

from kvstore.core.types import TIERS
from kvstore.pb import master_pb2 as m


class Reason(enum.StrEnum):
    """Why a file is unlinked. The value is its name on the wire and in metrics."""

    CAPACITY = enum.auto()
    """Its volume needs the room."""
    FLOOR = enum.auto()
    """The disk's other users do: the free_floor was reached before the capacity."""
    QUOTA = enum.auto()
    """Its directory holds more than its quota."""
    TTL = enum.auto()
    """Nobody used it for the TTL of its directory."""
    REMOVED = enum.auto()
    """Its name was removed or replaced."""
    CORRUPT = enum.auto()
    """Its bytes differ from its hash; it was in quarantine until newer ones took its place there."""
    ORPHAN = enum.auto()
    """It was never published, or its writer is gone."""


EVICTED: Final = (Reason.CAPACITY, Reason.FLOOR, Reason.QUOTA, Reason.TTL)
"""The cache gave them up; the others went because nobody could have asked for them any more."""


@dataclasses.dataclass(slots=True)
class Unlinked:
    files: int = 0
    bytes: int = 0
    """On the disk."""


@dataclasses.dataclass(slots=True)
class TierCounters:
    """Of the volumes of one tier. Moves count where they end."""

    hits: int = 0
    promotions: int = 0
    promoted_bytes: int = 0
    demotions: int = 0
    demoted_bytes: int = 0
    unlinked: dict[Reason, Unlinked] = dataclasses.field(
        default_factory=lambda: {reason: Unlinked() for reason in Reason}
    )

    def unlink(self, reason: Reason, size_bytes: int) -> None:
        count = self.unlinked[reason]
        count.files += 1
        count.bytes += size_bytes

    def unlink_all(self, reason: Reason, sizes_bytes: Iterable[int]) -> None:
        for size_bytes in sizes_bytes:
            self.unlink(reason, size_bytes)

    def to_pb(self, tier: str, blocks: int, pinned_bytes: int = 0, unpinned_bytes: int = 0) -> m.TierCounters:
        """Counts with what is there now; only the reasons that occurred."""
        occurred = ((reason, count) for reason, count in self.unlinked.items() if count.files)
        return m.TierCounters(
            tier=tier, blocks=blocks, hits=self.hits,
            promotions=self.promotions, promoted_bytes=self.promoted_bytes,
            demotions=self.demotions, demoted_bytes=self.demoted_bytes,
            unlinked=[m.Unlinked(reason=reason, files=count.files, bytes=count.bytes) for reason, count in occurred],
            pinned_bytes=pinned_bytes, unpinned_bytes=unpinned_bytes,
        )  # fmt: skip


@dataclasses.dataclass(slots=True)
class Counters:
    """All since the worker's start. Written on the loop, read by the heartbeat's thread."""

    misses: int = 0
    fetches: int = 0
    read_bytes: int = 0
    """Bytes of blocks handed out: a whole block an fd, the frames sent otherwise."""
    written_bytes: int = 0
    fetched_bytes: int = 0
    """Of blocks that were brought from a peer and kept."""
    extra_bytes: int = 0
    """That files of blocks have come to take beyond their lengths, for their names mostly (`Block.extra_bytes`); less
    what they have lost of it while they stayed.
    """
    corruptions: int = 0
    scrubbed_blocks: int = 0
    scrubbed_bytes: int = 0
    scrub_corruptions: int = 0
    """Those of the corruptions that the scrubber found: nobody had come for them."""
    tiers: dict[str, TierCounters] = dataclasses.field(default_factory=lambda: {tier: TierCounters() for tier in TIERS})

    def hit(self, tier: str) -> None:
        """A block that was here was opened or read."""
        self.tiers[tier].hits += 1

    @property
    def hits(self) -> int:
        return sum(tier.hits for tier in self.tiers.values())

    @property
    def promotions(self) -> int:
        return sum(tier.promotions for tier in self.tiers.values())

    @property
    def promoted_bytes(self) -> int:
        return sum(tier.promoted_bytes for tier in self.tiers.values())

    @property
    def demotions(self) -> int:
        return sum(tier.demotions for tier in self.tiers.values())

    @property
    def demoted_bytes(self) -> int:
        return sum(tier.demoted_bytes for tier in self.tiers.values())

    @property
    def evictions(self) -> int:
        return sum(tier.unlinked[reason].files for tier in self.tiers.values() for reason in EVICTED)

    @property
    def evicted_bytes(self) -> int:
        return sum(tier.unlinked[reason].bytes for tier in self.tiers.values() for reason in EVICTED)

    def to_pb(self) -> m.Counters:
        """What is not told by tier, and the sums of what is."""
        return m.Counters(**{field.name: getattr(self, field.name) for field in m.Counters.DESCRIPTOR.fields})
