"""One block on this worker."""

from __future__ import annotations

import dataclasses

from kvstore.core.types import Address, BlockId
from kvstore.worker.volumes.disk import Stamp, disk_bytes
from kvstore.worker.volumes.volume import Volume

FOUND = 0
"""Session of blocks that were there at start: whoever wrote them, its grace starts with the worker."""


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """A sealed file. Changed on the loop only, by `Store`."""

    address: Address
    volume: Volume
    session: int
    """Who may still publish it, while it is not owned."""
    since_s: float
    """When it came here (monotonic)."""
    owned: bool = False
    """The master said that an entry lists it: only then it is a victim of eviction (rule 11)."""
    stamp: Stamp | None = None
    """Of the file whose bytes were hashed since the worker started: verified, as long as the file is still that one
    and its pages are in memory (rule 6). None: not verified."""
    leaving: bool = False
    """Reported as "nowhere", about to be unlinked."""
    given_up: bool = False
    """Its writer does not want it any more: to be made dead unless somebody published it (rule 11)."""
    fetched: bool = False
    """It came from a peer, so it was published: once the master does not know it, nobody ever will."""
    touches: int = 0
    """Uses since it came to its volume."""
    proven: bool = False
    """It was read, or came back after its eviction."""
    moving: bool = False
    """A copy of it to another volume is under way."""
    used_s: float = 0.0
    """Its last use (monotonic). Idle time of former processes counts: it may be before this one began."""
    policy: int = 0
    """The nearest one that holds for its entry, as the master said; 0 = none."""
    pinned: bool = False
    """Never evicted: its pin holds on its volume (`Pins`)."""
    extra_bytes: int = 0
    """What its file takes on the disk beyond its length, as it was last measured, and as the books have it: a page for
    its name on ext4, an extent block where it is fragmented.
    """
    noted: bool = False
    """Its name stands beside its bytes, as far as this process knows (rule 22)."""
    shielded_until_s: float = 0.0
    """Served to a peer, which is about to name itself a replica (rule 12)."""

    @property
    def id(self) -> BlockId:
        return self.address.block

    @property
    def is_movable(self) -> bool:
        return self.owned and not self.leaving and not self.moving

    @property
    def path(self) -> str:
        return self.volume.block_path(self.address)

    @property
    def data_bytes(self) -> int:
        """Of its content, on a disk: the same at all times and in every volume."""
        return disk_bytes(self.address.length_bytes)

    @property
    def used_bytes(self) -> int:
        """What it has in the books of its volume now."""
        return self.data_bytes + self.extra_bytes
