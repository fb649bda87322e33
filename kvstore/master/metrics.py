"""What the master shows to Prometheus, read when somebody asks. The names: ``deploy/prometheus/metrics.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore import __version__
from kvstore.master.master import Master
from kvstore.master.storage.records import PolicyRow
from kvstore.obs.metrics import Metrics, Sample


class MasterMetrics:
    """`keys` counts names by verb; the rest is read from the master."""

    def __init__(self, master: Master) -> None:
        self.metrics = Metrics("master", __version__)
        self.keys = self.metrics.counter("master_keys", "Names looked up or published", ["verb"])
        self._names(master)
        self._nodes(master)
        self._policies(master)

    def _names(self, master: Master) -> None:
        lookups, watch, count = master.lookups, self.metrics.watch, self.metrics.count
        self.metrics.count_many(
            "master_lookups", "Names looked up, by result", ["result"],
            lambda: [(["found"], lookups.found), (["not_found"], lookups.not_found)],
        )  # fmt: skip
        watch("master_files", "Files, hidden ones too", lambda: master.counters().files)
        watch("master_directories", "Directories without the root", lambda: master.counters().directories - 1)
        watch("master_sequence", "Last change that is durable", lambda: master.committer.durable_sequence)
        watch("master_damaged", "1 after the scan found damage", lambda: master.committer.damage is not None)
        count("master_flushes", "Flushes of the log, each for all who waited", lambda: master.committer.flushes)

    def _nodes(self, master: Master) -> None:
        nodes, watch = master.nodes, self.metrics.watch
        watch("master_nodes", "Known nodes", lambda: sum(1 for _ in nodes))
        watch("master_nodes_live", "Live nodes", lambda: sum(map(nodes.live, nodes)))
        watch("master_nodes_not_collected", "Nodes of which nothing is unlinked", lambda: len(nodes.distrusted))
        watch("master_volumes_live", "Volumes in service on live nodes", lambda: len(nodes.cluster.live))
        watch("master_capacity_bytes", "What all live volumes may take", lambda: nodes.space()[0])
        watch("master_used_bytes", "What they have taken", lambda: nodes.space()[1])
        watch("master_free_bytes", "What they can still give away", lambda: nodes.space()[2])

    def _policies(self, master: Master) -> None:
        def read(what: Callable[[PolicyRow], float]) -> Callable[[], Iterable[Sample]]:
            return lambda: [
                ((f"/{told.path}",), what(told.row)) for told in master.all_policies() if told.row.quota_bytes
            ]

        quotas, used = read(lambda row: row.quota_bytes), read(lambda row: row.used_bytes)
        self.metrics.watch("master_policies", "Quotas, TTLs and pins", lambda: master.counters().policies)
        self.metrics.watch_many("master_quota_bytes", "Quota of a directory", ["path"], quotas)
        self.metrics.watch_many("master_quota_used_bytes", "What is published below it", ["path"], used)
