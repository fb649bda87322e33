"""What a mount shows of itself, when it has an HTTP port."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore import __version__
from kvstore.fuse.circuit import Master
from kvstore.fuse.ops import Operations, Parts
from kvstore.obs.http import Route, health_routes
from kvstore.obs.metrics import Metrics, Sample


def routes(operations: Operations, parts: Parts, master: Master) -> dict[str, Route]:
    """``/metrics``, and ``/readyz`` which says whether the master answers."""
    metrics = mount_metrics(operations, parts, master)
    return health_routes(metrics, lambda: None, lambda: "the master does not answer" if master.is_away else None)


def mount_metrics(operations: Operations, parts: Parts, master: Master) -> Metrics:
    """The names: ``deploy/prometheus/metrics.md``."""
    metrics = Metrics("mount", __version__)

    def ended() -> Iterable[Sample]:
        return [(labels, float(count)) for labels, count in operations.counts.items()]

    metrics.count_many("mount_operations", "FUSE operations that ended, by result", ("operation", "result"), ended)
    metrics.watch("mount_open_files", "Open handles of files", lambda: len(parts.files.handles))
    metrics.watch("mount_master_away", "1 while the master does not answer", lambda: float(master.is_away))
    return metrics
