"""``kvstore report``: a cluster at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.cli.app import ConfigOption, new_app
from kvstore.cli.nodes_cmd import READS, READS_NOTE, in_order, reads, state
from kvstore.cli.output import Column, JsonOption, number_column, print_note, print_object, print_rows, size_column
from kvstore.cli.store import MasterOption, open_store
from kvstore.client.messages import ClusterMap, Counters

app = new_app()


def _lookups(lookups: Mapping[str, int]) -> str:
    found, not_found = lookups["found"], lookups["not_found"]
    ratio = f" ({100 * found / (found + not_found):.1f} %)" if found + not_found else ""
    return f"{found:,} found, {not_found:,} not found{ratio}"


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
    Column("lookups", "Look-ups", _lookups),
    number_column("evictions", "Evictions"),
    size_column("evicted_bytes", "Evicted"),
    number_column("promotions", "Promotions"),
    size_column("promoted_bytes", "Promoted"),
    number_column("demotions", "Demotions"),
    size_column("demoted_bytes", "Demoted"),
    size_column("read_bytes", "Read"),
    size_column("written_bytes", "Written"),
    number_column("corruptions", "Corrupt blocks"),
]
NODE_COLUMNS = [Column("node", "NODE"), Column("state", "STATE"), *READS]
LOOKUPS_NOTE = "Look-ups: names asked for since the start of the master."


@app.command()
def report(master: MasterOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Capacity, nodes, entries and hit ratio of a cluster.

    The hit ratio is that of the look-ups: of all names asked for since the master started, those that were there.
    """
    with open_store(master, config, "") as client:
        found = summary(client.cluster_map())
    print_object(found, COLUMNS, as_json)
    if not as_json:
        print_note("")
        print_rows(found["reads"], NODE_COLUMNS, with_json=False)
        print_note(READS_NOTE)
        print_note(LOOKUPS_NOTE)


def summary(cluster: ClusterMap) -> dict[str, Any]:
    """Sums over the live workers. `hit_ratio` is of names, `local_ratio` of blocks; None before the first one."""
    live = [node for node in cluster.nodes if node.live]
    volumes = [volume for node in live for volume in node.volumes]
    counters = Counters(*(sum(column) for column in zip(*(n.counters for n in live), strict=True))) if live else None
    asked = cluster.lookups_found + cluster.lookups_not_found
    wanted = counters.hits + counters.fetches + counters.misses if counters else 0
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
        "lookups": {"found": cluster.lookups_found, "not_found": cluster.lookups_not_found},
        "hit_ratio": cluster.lookups_found / asked if asked else None,
        "local_ratio": counters.hits / wanted if counters and wanted else None,
        "reads": [{"node": node.id, "state": state(node), **reads(node)} for node in in_order(cluster)],
        **(counters._asdict() if counters else {}),
    }
