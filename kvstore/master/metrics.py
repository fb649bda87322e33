"""What the master shows to Prometheus. Gauges are read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvstore import __version__
from kvstore.master.master import Lookups, Master
from kvstore.obs.metrics import NAMESPACE, Metrics


class MasterMetrics:
    """`keys` counts names by verb; the rest is read from the master."""

    def __init__(self, master: Master) -> None:
        self.metrics = Metrics("master", __version__)
        self.keys = self.metrics.counter("master_keys", "Names looked up or published", ["verb"])
        self.metrics.registry.register(_LookupCounter(master.lookups))
        watch = self.metrics.watch
        watch("master_files", "Files, hidden ones too", lambda: master.counters().files)
        watch("master_directories", "Directories without the root", lambda: master.counters().directories - 1)
        watch("master_sequence", "Last change that is durable", lambda: master.committer.durable_sequence)
        watch("master_flushes", "Flushes of the log, each for all who waited", lambda: master.committer.flushes)
        watch("master_nodes", "Known nodes", lambda: sum(1 for _ in master.nodes))
        watch("master_nodes_live", "Live nodes", lambda: sum(1 for n in master.nodes if master.nodes.live(n)))
        watch("master_volumes_live", "Volumes in service on live nodes", lambda: len(master.nodes.cluster.live))
        self.metrics.watch_many(
            "master_space_bytes", "Bytes of all live volumes", ["kind"],
            lambda: [((kind,), size) for kind, size in zip(_KINDS, master.nodes.space(), strict=True)],
        )  # fmt: skip


_KINDS = ("capacity", "used", "free")


class _LookupCounter(Collector):
    """The master's own counts: `kvstore report` shows the same numbers."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups

    def describe(self) -> Iterable[CounterMetricFamily]:
        return [_lookup_family()]

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = _lookup_family()
        family.add_metric(["found"], self._lookups.found)
        family.add_metric(["not_found"], self._lookups.not_found)
        return [family]


def _lookup_family() -> CounterMetricFamily:
    return CounterMetricFamily(f"{NAMESPACE}_master_lookups", "Names looked up, by result", labels=["result"])
