"""Which master this worker obeys, and in how much (rule 16)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from kvstore.core.errors import Denied, InvalidRequest
from kvstore.core.types import Seen
from kvstore.runtime import Runtime
from kvstore.worker.blocks.fences import Fences
from kvstore.worker.blocks.store import Store
from kvstore.worker.volumes.disk import FULL_ERRNOS, SHORT_ERRNOS
from kvstore.worker.volumes.identity import MAX_BOOTS
from kvstore.worker.volumes.volume import Volume

log = logging.getLogger(__name__)


class Membership:
    """
    cluster      the only cluster obeyed, "" until the first master was met
    sequence     the highest durable one that its master has shown
    rolled_back  a lower one was shown since, or the master found that it lacks what was seen here: it lost state,
                 nothing is unlinked by its word until an operator accepts it
    judge        incarnation of the master that has registered us, 0 before: another start of it has to judge anew what
                 was seen here, before its word counts
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
        self.judge = 0
        self._at: Seen | None = None
        """What is true of all volumes; until a master has taken us, each keeps what it has seen itself."""
        self._found = tuple(
            {Seen(v.identity.incarnation, v.identity.sequence) for v in volumes if v.identity.incarnation}
        )
        if self.rolled_back:
            log.error(
                "the master was rolled back earlier: nothing is collected by its word (the master's --rebuild or "
                "--discard ends this, or --accept-rollback for this worker alone)"
            )

    @property
    def collects(self) -> bool:
        """Whether the master's word is enough to unlink a block."""
        return not self.rolled_back

    @property
    def seen(self) -> Sequence[Seen]:
        """What the master has to judge at the registration."""
        if self._at is None:
            return self._found
        return (self._at,) if self._at.incarnation else ()

    def accept_rollback(self) -> None:
        """The operator says that the master's state is the one to go by."""
        self.rolled_back, self.sequence, self._at = False, 0, Seen(0, 0)

    def is_judge(self, incarnation: int) -> bool:
        """Whether a reply comes from the start of the master that has registered us; 0 is of one that does not say."""
        return incarnation in (0, self.judge)

    def registered(
        self, incarnation: int, cluster: str, sequence: int, known: int, *,
        rolled_back: bool, recovering: bool = False, recovered: bool = False,
    ) -> None:  # fmt: skip
        """The reply to a registration. Raises Denied like `meet`."""
        if recovered:
            self._trust()
        elif rolled_back and not self.rolled_back:
            self._distrust("lacks what this worker has seen of it", is_mended=recovering)
        self.judge = incarnation
        self.meet(cluster, sequence, 0 if recovered else known)

    def meet(self, cluster: str, sequence: int, known: int) -> None:
        """A reply of the master; `known` is what `sequence` here was when the request left. Raises Denied for a
        stranger.
        """
        if cluster != self.cluster and self.cluster:
            raise Denied(
                f"the master belongs to cluster {cluster or '(none)'}, this worker's blocks to {self.cluster}: "
                "point the worker at its own master; if that has lost its disk, start it on an empty directory with "
                "--rebuild (the names come back) or --discard (they are forgotten)"
            )
        self.cluster = cluster
        if sequence < known and not self.rolled_back:
            self._distrust(f"is at sequence {sequence} and was at {known}")
        if not self.rolled_back:
            self.sequence = max(self.sequence, sequence)
            self._at = Seen(self.judge, self.sequence)

    def _distrust(self, why: str, *, is_mended: bool = False) -> None:
        """`is_mended`: the master is about to do what the operator has said."""
        if is_mended:
            log.warning("the master %s, and takes it from its workers now: nothing is collected until then", why)
        else:
            log.error(
                "the master %s: it lost state. Nothing is collected from now on; restore its data, or start it with "
                "--rebuild (the names come back) or --discard (what it does not know goes)",
                why,
            )
        self.rolled_back = True

    def _trust(self) -> None:
        """An operator has had the master take in, or forget, what it lacked."""
        if self.rolled_back:
            log.info("the master has been made whole: what it does not know is collected again")
        self.rolled_back, self.sequence = False, 0

    async def save(self, runtime: Runtime, store: Store, fences: Fences) -> None:
        """Bring the identities of all volumes up to date, durably."""
        # Until all blocks are found, no earlier boot is known to be over.
        old = (boot for boot, _ in fences) if store.scanned.is_set() else self._old_boots
        boots = tuple(boot for boot in old if boot != fences.boot)[-MAX_BOOTS:]
        for volume in store.in_service:
            at = self._at or Seen(volume.identity.incarnation, volume.identity.sequence)
            wanted = msgspec.structs.replace(
                volume.identity,
                cluster=self.cluster,
                sequence=at.sequence,
                rolled_back=self.rolled_back,
                boots=(*boots, fences.boot),
                incarnation=at.incarnation,
            )
            if wanted != volume.identity:
                try:
                    await runtime.in_thread(volume.write_identity, wanted)
                except OSError as error:
                    if error.errno in (*FULL_ERRNOS, *SHORT_ERRNOS):  # the next upkeep tries again
                        log.warning("%s", store.explain(volume, error, "writing its identity"))
                    else:
                        store.fail(volume, f"writing its identity: {error.strerror}")
