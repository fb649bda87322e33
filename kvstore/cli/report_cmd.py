"""``kvstore report``: a cluster at a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.cli.app import ConfigOption, new_app
from kvstore.cli.nodes_cmd import READS, READS_NOTE, in_order, reads, state
from kvstore.cli.output import Column, JsonOption, number_column, print_note, print_object, print_rows, size_column
from kvstore.cli.rates import Tier, share, tiers
from kvstore.cli.store import MasterOption, open_store
from kvstore.client.messages import ClusterMap, Node
from kvstore.config.units import format_size
from kvstore.core.told import WorkerCounters

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
NOTICE = Column("notice", "Notice")
NODE_COLUMNS = [Column("node", "NODE"), Column("state", "STATE"), *READS]
_TIER = [Column("node", "NODE"), Column("tier", "TIER")]
TIER_COLUMNS = [
    *_TIER,
    size_column("capacity_bytes", "CAPACITY"),
    size_column("used_bytes", "USED"),
    number_column("blocks", "BLOCKS"),
    Column("hits", "HITS", justify="right"),
    Column("promoted", "PROMOTED", justify="right"),
    Column("demoted", "DEMOTED", justify="right"),
]
PINNED_COLUMNS = [*_TIER, size_column("pinned_bytes", "PINNED"), size_column("unpinned_bytes", "WITHOUT EFFECT")]
UNLINKED_COLUMNS = [*_TIER, Column("unlinked", "UNLINKED")]
REASONS_A_LINE = 3
"""So that a line with the name of a node has at most 100 characters."""
TIERS_NOTE = "HITS: reads the tier served (share of the node's reads). PROMOTED, DEMOTED: moves into the tier."
LOOKUPS_NOTE = "Look-ups: names asked for since the start of the master."


@app.command()
def report(master: MasterOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Capacity, nodes, entries and hit ratio of a cluster.

    The hit ratio is that of the look-ups: of all names asked for since the master started, those that were there.
    """
    with open_store(master, config, "") as client:
        found = summary(client.cluster_map())
    print_object(found, [*COLUMNS, NOTICE] if "notice" in found else COLUMNS, as_json)
    if not as_json:
        print_note("")
        print_rows(found["reads"], NODE_COLUMNS, with_json=False)
        print_note(READS_NOTE)
        print_tiers(found["tiers"])
        print_note("")
        print_note(LOOKUPS_NOTE)


def print_tiers(rows: Sequence[dict[str, Any]]) -> None:
    """What lies where, and what went; a table of pins only where there are any."""
    print_note("")
    print_rows(map(_tier_cells, rows), TIER_COLUMNS, with_json=False)
    print_note(TIERS_NOTE)
    for columns, wanted in (
        (PINNED_COLUMNS, [row for row in rows if row["pinned_bytes"] or row["unpinned_bytes"]]),
        (UNLINKED_COLUMNS, [line for row in rows for line in _unlinked_lines(row)]),
    ):
        if wanted:
            print_note("")
            print_rows(wanted, columns, with_json=False)


def _tier_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    ratio = "" if row["hit_ratio"] is None else f" ({100 * row['hit_ratio']:.1f} %)"
    return {
        **row,
        "hits": f"{row['hits']:,}{ratio}",
        "promoted": _counted(row["promotions"], row["promoted_bytes"]),
        "demoted": _counted(row["demotions"], row["demoted_bytes"]),
    }


def _unlinked_lines(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The reasons that occurred, a few a line."""
    reasons = [f"{reason} {_counted(u['files'], u['bytes'])}" for reason, u in row["unlinked"].items()]
    lines = [", ".join(reasons[i : i + REASONS_A_LINE]) for i in range(0, len(reasons), REASONS_A_LINE)]
    return [{"node": row["node"], "tier": row["tier"], "unlinked": line} for line in lines]


def _counted(count: int, size_bytes: int) -> str:
    return f"{count:,} ({format_size(size_bytes)})" if count else "0"


def summary(cluster: ClusterMap) -> dict[str, Any]:
    """Sums over the live workers. `hit_ratio` is of names, `local_ratio` of blocks; None before the first one."""
    live = [node for node in cluster.nodes if node.live]
    volumes = [volume for node in live for volume in node.volumes]
    counters = (
        WorkerCounters(*(sum(column) for column in zip(*(n.counters for n in live), strict=True))) if live else None
    )
    asked = cluster.lookups_found + cluster.lookups_not_found
    wanted = counters.hits + counters.fetches + counters.misses if counters else 0
    return {
        "cluster": cluster.cluster,
        "version": cluster.version,
        "sequence": cluster.sequence,
        **({"notice": cluster.notice} if cluster.notice else {}),
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
        "tiers": [tier_row(node, tier) for node in in_order(cluster) if node.live for tier in tiers(node)],
        **(counters._asdict() if counters else {}),
    }


def tier_row(node: Node, tier: Tier) -> dict[str, Any]:
    """`hit_ratio`: of all reads on the node those that this tier served; None before the first one."""
    counters = tier.counters
    return {
        **counters._asdict(),
        "node": node.id,
        "capacity_bytes": tier.capacity_bytes,
        "used_bytes": tier.used_bytes,
        "free_bytes": tier.free_bytes,
        "hit_ratio": share(counters.hits, sum(reads(node).values())),
        "unlinked": {u.reason: {"files": u.files, "bytes": u.bytes} for u in counters.unlinked},
    }
