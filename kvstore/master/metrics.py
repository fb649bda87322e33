"""What the master shows to Prometheus. Gauges are read when somebody asks."""

from __future__ import annotations

from kvstore import __version__
from kvstore.master.master import Master
from kvstore.obs.metrics import Metrics


class MasterMetrics:
    """`keys` counts names by verb; the rest is read from the master."""

    def __init__(self, master: Master) -> None:
        self.metrics = Metrics("master", __version__)
        self.keys = self.metrics.counter("master_keys", "Names looked up or published", ["verb"])
        watch = self.metrics.watch
        watch("master_files", "Files, hidden ones too", lambda: master.counters().files)
        watch("master_directories", "Directories", lambda: master.counters().directories)
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
