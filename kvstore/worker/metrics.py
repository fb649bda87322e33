"""What a worker shows of itself to Prometheus, read when somebody asks. The names: ``deploy/prometheus/metrics.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kvstore.obs.metrics import Metrics, Sample
from kvstore.pb import master_pb2 as m
from kvstore.worker.blocks.counters import TierCounters, Unlinked
from kvstore.worker.reports import told
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.worker import Worker

Read = Callable[[], Iterable[Sample]]
USES: Final = ("blocks", "staging", "held", "quarantine")
"""Of the bytes of a volume; their sum is what is used."""


def watch(metrics: Metrics, worker: Worker) -> None:
    """Register everything."""
    _watch_volumes(metrics, worker)
    _count_reads(metrics, worker)
    _count_tiers(metrics, worker)
    _count_scrubs(metrics, worker)
    store, staging, sessions = worker.store, worker.staging, worker.sessions
    metrics.watch("worker_unowned_blocks", "Blocks nobody published yet", lambda: len(store.unowned))
    metrics.watch("worker_staging_files", "Files being written", lambda: len(staging))
    _count_names(metrics, worker)
    metrics.watch("worker_sessions", "Sessions with a connection", lambda: len(sessions))


def _watch_volumes(metrics: Metrics, worker: Worker) -> None:
    store = worker.store

    def each(read: Callable[[Volume], float]) -> Read:
        return lambda: [((f"{v.id:016x}", v.tier), float(read(v))) for v in store.volumes]

    def used() -> Iterable[Sample]:
        for volume in store.volumes:
            for use in USES:
                yield (f"{volume.id:016x}", volume.tier, use), float(getattr(volume.books, use))

    def in_service() -> Iterable[Sample]:
        for volume in store.volumes:
            yield (f"{volume.id:016x}", volume.tier, volume.path), float(volume.in_service)

    labels = ("volume", "tier")
    capacity, free = each(lambda v: v.books.capacity), each(lambda v: v.books.free)
    metrics.watch_many("worker_volume_capacity_bytes", "What a volume may take", labels, capacity)
    metrics.watch_many("worker_volume_free_bytes", "What it can still give away", labels, free)
    metrics.watch_many("worker_volume_used_bytes", "Bytes of a volume by use", (*labels, "use"), used)
    metrics.watch_many("worker_volume_in_service", "1 while it serves", (*labels, "path"), in_service)
    metrics.watch_many("worker_blocks", "Blocks of a volume", labels, each(store.count))


def _count_reads(metrics: Metrics, worker: Worker) -> None:
    def hits() -> Iterable[Sample]:
        return [((tier,), float(count.hits)) for tier, count in _tiers(worker)]

    counters = worker.counters
    metrics.count_many("worker_hits", "Opens and reads of a block that was here", ("tier",), hits)
    metrics.count("worker_fetches", "Opens and reads that a peer's copy served", lambda: counters.fetches)
    metrics.count("worker_misses", "Opens and reads of a block that was nowhere", lambda: counters.misses)
    metrics.count("worker_read_bytes", "Bytes of blocks handed out", lambda: counters.read_bytes)
    metrics.count("worker_written_bytes", "Bytes of blocks that clients wrote", lambda: counters.written_bytes)
    metrics.count("worker_fetched_bytes", "Bytes of peers' blocks that were kept", lambda: counters.fetched_bytes)
    metrics.count("worker_corrupt_blocks", "Blocks found damaged", lambda: counters.corruptions)


def _count_tiers(metrics: Metrics, worker: Worker) -> None:
    """Moves, unlinks and pins. Every series is there from the start, so that its first event shows in a rate."""

    def moved(up: Callable[[TierCounters], int], down: Callable[[TierCounters], int]) -> Read:
        directions = (("promotion", up), ("demotion", down))
        return lambda: [((tier, name), float(read(t))) for tier, t in _tiers(worker) for name, read in directions]

    def unlinked(read: Callable[[Unlinked], int]) -> Read:
        return lambda: [((tier, why), float(read(u))) for tier, t in _tiers(worker) for why, u in t.unlinked.items()]

    def now(read: Callable[[m.TierCounters], int]) -> Read:
        return lambda: [((tier.tier,), float(read(tier))) for tier in told.tiers(worker.store)]

    moves = moved(lambda t: t.promotions, lambda t: t.demotions)
    moved_bytes = moved(lambda t: t.promoted_bytes, lambda t: t.demoted_bytes)
    metrics.count_many("worker_moves", "Blocks moved into a tier", ("tier", "direction"), moves)
    metrics.count_many("worker_moved_bytes", "Bytes moved into a tier", ("tier", "direction"), moved_bytes)
    files, sizes = unlinked(lambda u: u.files), unlinked(lambda u: u.bytes)
    metrics.count_many("worker_unlinked_files", "Files unlinked", ("tier", "reason"), files)
    metrics.count_many("worker_unlinked_bytes", "Bytes on the disk that were unlinked", ("tier", "reason"), sizes)
    pinned, without = now(lambda t: t.pinned_bytes), now(lambda t: t.unpinned_bytes)
    metrics.watch_many("worker_pinned_bytes", "Bytes of blocks that are never evicted", ("tier",), pinned)
    metrics.watch_many("worker_unpinned_bytes", "Bytes of blocks whose pin has no effect", ("tier",), without)


def _count_names(metrics: Metrics, worker: Worker) -> None:
    names = worker.names

    def outcomes() -> Iterable[Sample]:
        return [((outcome,), float(n)) for outcome, n in (("noted", names.noted), *names.failed.items())]

    metrics.count_many("worker_names", "Names noted beside blocks, or why not", ("outcome",), outcomes)


def _count_scrubs(metrics: Metrics, worker: Worker) -> None:
    counters, age = worker.counters, lambda: worker.scrubber.oldest_age_s
    metrics.count("worker_scrubbed_blocks", "Blocks read again to find damage", lambda: counters.scrubbed_blocks)
    metrics.count("worker_scrubbed_bytes", "Bytes of blocks read so", lambda: counters.scrubbed_bytes)
    metrics.count("worker_scrub_corrupt_blocks", "Damage found so", lambda: counters.scrub_corruptions)
    metrics.watch("worker_scrub_oldest_age_seconds", "Since all blocks were read so, at most", age)


def _tiers(worker: Worker) -> list[tuple[str, TierCounters]]:
    """Of the tiers that have a volume here."""
    here = {volume.tier for volume in worker.store.volumes}
    return [(tier, count) for tier, count in worker.counters.tiers.items() if tier in here]
