"""The bytes of one volume: what is used, by whom, and what may still be given away. Pure; changed on the loop only."""

from __future__ import annotations

import dataclasses

from kvstore.config.units import format_size


@dataclasses.dataclass(slots=True)
class Books:
    """All in bytes as a disk counts them (`disk.disk_bytes`). `used` never passes `capacity` by anything given away
    here.
    """

    capacity: int
    floor: int
    """What the file system's other users keep."""
    blocks: int = 0
    staging: int = 0
    """Per staging file the larger of its reservation and its actual size."""
    held: int = 0
    """Unlinked, but somebody still has it open (rule 8)."""
    quarantine: int = 0
    naming: int = 0
    """Given away for names that are being written beside blocks: part of `staging`."""
    slack: int = 0
    """What the file system had free above the floor at the last look, less what was given away since and not yet
    written.
    """
    in_motion: int = 0
    """Bytes given away or settled so far: what moved while the disk was looked at, the look may have missed."""

    @property
    def used(self) -> int:
        return self.blocks + self.staging + self.held + self.quarantine

    @property
    def free(self) -> int:
        return max(0, min(self.capacity - self.used, self.slack))

    def take(self, size: int) -> None:
        """Give `size` bytes away as staging."""
        self.staging += size
        self.slack -= size
        self.in_motion += size

    def give_back(self, size: int) -> None:
        """Staging that was unlinked, and nobody holds it."""
        self.staging -= size
        self.slack += size

    def settle(self, taken: int, kept: int) -> None:
        """Staging of `taken` bytes became a block of `kept`."""
        self.staging -= taken
        self.blocks += kept
        self.slack += taken - kept
        self.in_motion += kept

    def begin_naming(self, size: int) -> None:
        """`size` bytes that were given away are for names beside blocks."""
        self.naming += size

    def end_naming(self, taken: int, more: int) -> None:
        """A name for which `taken` bytes were given away is written, or not: its block takes `more` than before, less
        than 0 where a longer one stood there.
        """
        self.naming -= taken
        self.settle(taken, more)

    def free_block(self, size: int) -> None:
        """A block was unlinked, and nobody holds it."""
        self.blocks -= size
        self.slack += size

    def hold(self, blocks: int = 0, staging: int = 0) -> None:
        """A block or staging was unlinked, and somebody still has it open."""
        self.blocks -= blocks
        self.staging -= staging
        self.held += blocks + staging

    def held_resized(self, by: int) -> None:
        """Somebody who holds an unlinked file wrote on, or truncated it."""
        self.held += by
        self.slack -= by

    def let_go(self, size: int) -> None:
        """The last holder closed it."""
        self.held -= size
        self.slack += size

    def look(self, disk_free: int, unwritten: int) -> None:
        """What statvfs said; `unwritten` of what files in staging were given will still be taken from it."""
        self.slack = disk_free - self.floor - unwritten - self.naming

    def found_full(self) -> None:
        """The operating system said so: nothing is given away before the next look."""
        self.slack = min(self.slack, 0)

    def missing(self, size: int) -> int:
        """Bytes to free before `size` can be given away; 0 or less when there is room."""
        return size - min(self.capacity - self.used, self.slack)

    @property
    def is_disk_full(self) -> bool:
        """Whether it is the disk that ends first, not the capacity."""
        return self.slack < self.capacity - self.used

    def doubt(self) -> str:
        """Why less than the capacity will ever fit, as of now; "" when all of it does."""
        if self.slack <= 0 and not self.blocks:
            return f"the disk has no more free than the {format_size(self.floor)} of free_floor: nothing fits"
        if not self.is_disk_full:
            return ""
        return (
            f"capacity is {format_size(self.capacity)}, but at most {format_size(self.used + max(self.slack, 0))} fit: "
            f"{format_size(self.used)} used and {format_size(max(self.slack, 0))} free on the disk above free_floor"
        )

    def describe(self) -> str:
        size = format_size
        uses = (self.blocks, "blocks"), (self.staging, "staging"), (self.held, "held by readers")
        parts = ", ".join(f"{size(count)} {what}" for count, what in (*uses, (self.quarantine, "quarantine")) if count)
        free = f"{size(max(self.slack, 0))} free on the disk above free_floor ({size(self.floor)})"
        return f"{size(self.used)} of {size(self.capacity)} used ({parts or 'nothing'}), {free}"
