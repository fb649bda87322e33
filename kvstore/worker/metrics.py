"""What a worker shows of itself to Prometheus, read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.obs.metrics import Metrics, Sample
from kvstore.worker.counters import Counters
from kvstore.worker.sessions import Sessions
from kvstore.worker.staging import Staging
from kvstore.worker.store import Store


def watch(metrics: Metrics, store: Store, counters: Counters, staging: Staging, sessions: Sessions) -> None:
    """Register everything; counters are gauges here because they are counted elsewhere."""

    def volumes() -> Iterable[Sample]:
        for volume in store.volumes:
            for what in ("capacity", "used", "free", "blocks", "staging", "held", "quarantine"):
                yield (f"{volume.id:016x}", volume.tier, what), float(getattr(volume.books, what))

    def events() -> Iterable[Sample]:
        for name in counters.__slots__:
            yield (name,), float(getattr(counters, name))

    def in_service() -> Iterable[Sample]:
        for volume in store.volumes:
            yield (f"{volume.id:016x}", volume.tier, volume.path), float(volume.in_service)

    metrics.watch_many("worker_volume_bytes", "Bytes of a volume by use", ("volume", "tier", "use"), volumes)
    metrics.watch_many("worker_volume_in_service", "1 while it serves", ("volume", "tier", "path"), in_service)
    metrics.watch_many("worker_events", "Counts since the start", ("event",), events)
    metrics.watch("worker_blocks", "Blocks on this worker", lambda: len(store))
    metrics.watch("worker_unowned_blocks", "Blocks nobody published yet", lambda: len(store.unowned))
    metrics.watch("worker_staging_files", "Files being written", lambda: len(staging))
    metrics.watch("worker_sessions", "Sessions with a connection", lambda: len(sessions))
