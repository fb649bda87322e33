"""What the store under test is told, and what follows from it for whoever judges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MOUNTS: Final = ("a", "b")
CLIENTS: Final = ("sync", "sync-far", "async")
METADATA_TTL_S: Final = 1.0
"""Of clients and mounts: their default."""
STALE_S: Final = 5.0
"""How much longer a mount serves what it knows while the master is away."""
MOUNT_DEADLINE_S: Final = 5.0
"""How long calls wait for a file system process that died or stopped."""
SHORTEST_S: Final = 0.5
LONGEST_S: Final = 15.0
"""Of any fault."""
_ANSWER_S: Final = 3.0
"""A look-up takes so long at most: it was true when it began, and is believed from its end on."""

MAY_REMEMBER_S: Final[Mapping[str, float]] = {
    **dict.fromkeys(CLIENTS, METADATA_TTL_S + _ANSWER_S),
    **dict.fromkeys(MOUNTS, METADATA_TTL_S + STALE_S + LONGEST_S + MOUNT_DEADLINE_S + _ANSWER_S),
}
"""Place → how old at most what it believes of names that others change. A mount's process may be stopped between the
master's answer and its own to the kernel."""
