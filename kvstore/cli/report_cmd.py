"""``kvstore report``: a cluster at a glance."""

from __future__ import annotations

from typing import Any

from kvstore.cli.app import ConfigOption, new_app
from kvstore.cli.output import Column, JsonOption, number_column, print_object, size_column
from kvstore.cli.store import MasterOption, open_store
from kvstore.client.messages import ClusterMap, Counters

app = new_app()

COLUMNS = [
    Column("cluster", "Cluster"),
    Column("version", "Version"),
    Column("nodes", "Nodes"),
    size_column("capacity_bytes", "Capacity"),
    size_column("used_bytes", "Used"),
    size_column("free_bytes", "Free"),
    number_column("files", "Files"),
    number_column("directories", "Directories"),
    number_column("blocks", "Blocks"),
    Column("hit_ratio", "Hit ratio", "{:.1%}".format),
    Column("local_ratio", "Local hits", "{:.1%}".format),
    number_column("evictions", "Evictions"),
    size_column("evicted_bytes", "Evicted"),
    size_column("read_bytes", "Read"),
    size_column("written_bytes", "Written"),
    number_column("corruptions", "Corrupt blocks"),
]


@app.command()
def report(master: MasterOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Capacity, nodes, entries and hit ratio of a cluster."""
    with open_store(master, config, "") as client:
        print_object(summary(client.cluster_map()), COLUMNS, as_json)


def summary(cluster: ClusterMap) -> dict[str, Any]:
    """Sums over the live workers; counters are since each worker's start. Ratios are None before the first read."""
    live = [node for node in cluster.nodes if node.live]
    volumes = [volume for node in live for volume in node.volumes]
    counters = Counters(*(sum(column) for column in zip(*(n.counters for n in live), strict=True))) if live else None
    served = counters.hits + counters.fetches if counters else 0
    asked = served + (counters.misses if counters else 0)
    return {
        "cluster": cluster.cluster,
        "version": cluster.version,
        "sequence": cluster.sequence,
        "nodes": f"{len(live)} live of {len(cluster.nodes)}",
        "live_nodes": len(live),
        "known_nodes": len(cluster.nodes),
        "capacity_bytes": sum(v.capacity_bytes for v in volumes),
        "used_bytes": sum(v.used_bytes for v in volumes),
        "free_bytes": sum(v.free_bytes for v in volumes),
        "files": cluster.files,
        "directories": cluster.directories,
        "blocks": sum(n.blocks for n in live),
        "hit_ratio": served / asked if asked else None,
        "local_ratio": counters.hits / asked if counters and asked else None,
        **(counters._asdict() if counters else {}),
    }
