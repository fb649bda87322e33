"""Which master this worker obeys, and in how much (rule 16)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from kvstore.core.errors import Denied, InvalidRequest
from kvstore.runtime import Runtime
from kvstore.worker.fences import Fences
from kvstore.worker.identity import MAX_BOOTS
from kvstore.worker.store import Store
from kvstore.worker.volume import Volume

log = logging.getLogger(__name__)


class Membership:
    """
    cluster      the only cluster obeyed, "" until the first master was met
    sequence     the highest durable one that its master has shown
    rolled_back  a lower one was shown since: the master lost state, nothing is unlinked by its word until an operator
    accepts it
    """

    def __init__(self, volumes: Sequence[Volume]) -> None:
        clusters = {v.identity.cluster: v.path for v in volumes if v.identity.cluster}
        if len(clusters) > 1:
            parts = ", ".join(f"{path} to {cluster}" for cluster, path in clusters.items())
            raise InvalidRequest(f"volumes belong to different clusters ({parts}); give each cluster its own worker")
        self.cluster = next(iter(clusters), "")
        self._old_boots = tuple(dict.fromkeys(boot for v in volumes for boot in v.identity.boots))
        self.sequence = max(v.identity.sequence for v in volumes)
        self.rolled_back = any(v.identity.rolled_back for v in volumes)
        if self.rolled_back:
            log.error(
                "the master was rolled back earlier: nothing is collected by its word (--accept-rollback ends this)"
            )

    @property
    def collects(self) -> bool:
        """Whether the master's word is enough to unlink a block."""
        return not self.rolled_back

    def accept_rollback(self) -> None:
        """The operator says that the master's state is the one to go by."""
        self.rolled_back, self.sequence = False, 0

    def meet(self, cluster: str, sequence: int, known: int) -> None:
        """A reply of the master; `known` is what `sequence` here was when the request left. Raises Denied for a
        stranger.
        """
        if cluster != self.cluster and self.cluster:
            raise Denied(
                f"the master belongs to cluster {cluster or '(none)'}, this worker's blocks to {self.cluster}: "
                "point the worker at its own master, or empty its volumes"
            )
        self.cluster = cluster
        if sequence < known and not self.rolled_back:
            log.error(
                "the master is at sequence %d and was at %d: it lost state. Nothing is collected from now on; "
                "restore its data, or start the worker with --accept-rollback",
                sequence,
                known,
            )
            self.rolled_back = True
        if not self.rolled_back:
            self.sequence = max(self.sequence, sequence)

    async def save(self, runtime: Runtime, store: Store, fences: Fences) -> None:
        """Bring the identities of all volumes up to date, durably."""
        # Until all blocks are found, no earlier boot is known to be over.
        old = (boot for boot, _ in fences) if store.scanned.is_set() else self._old_boots
        boots = tuple(boot for boot in old if boot != fences.boot)[-MAX_BOOTS:]
        for volume in store.in_service:
            wanted = msgspec.structs.replace(
                volume.identity,
                cluster=self.cluster,
                sequence=self.sequence,
                rolled_back=self.rolled_back,
                boots=(*boots, fences.boot),
            )
            if wanted != volume.identity:
                try:
                    await runtime.in_thread(volume.write_identity, wanted)
                except OSError as error:
                    store.fail(volume, f"writing its identity: {error.strerror}")
