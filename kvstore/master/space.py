"""Room as a caller sees it: that of the cluster, or what a quota leaves of it."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.master.storage.records import PolicyRow


class Space(NamedTuple):
    """Bytes of all live volumes, names of the whole store; below a quota those of its directory."""

    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    files: int
    directories: int

    def within(self, policy: PolicyRow, hidden_bytes: int) -> Space:
        """The same below a directory with this policy, if its quota leaves less."""
        if not policy.quota_bytes:
            return self
        used = policy.used_bytes - hidden_bytes
        free = max(0, policy.quota_bytes - used)
        if free >= self.free_bytes:
            return self
        return Space(policy.quota_bytes, used, free, policy.files, self.directories)
