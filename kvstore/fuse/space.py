"""statfs: asked often (df, LMCache before each O_DIRECT file), answered from memory for a second, longer while the
master is away.
"""

from __future__ import annotations

from typing import Final

from kvstore.client.messages import Statfs
from kvstore.fuse.circuit import Master
from kvstore.fuse.tree import AWAY
from kvstore.runtime import Runtime

TTL_S: Final = 1.0


class Space:
    """Capacity of the store below the mounted directory."""

    def __init__(self, master: Master, root: int, runtime: Runtime) -> None:
        self._master, self._root, self._runtime = master, root, runtime
        self._known: Statfs | None = None
        self._until_s = 0.0

    async def get(self) -> Statfs:
        """Raises Unavailable or Timeout only when it was never known."""
        now_s = self._runtime.monotonic_s()
        if self._known is not None and now_s < self._until_s:
            return self._known
        try:
            self._known = await self._master.statfs(self._root)
        except AWAY:
            if self._known is None:
                raise
            return self._known
        self._until_s = now_s + TTL_S
        return self._known
