"""``kvstore nodes``: the workers of a cluster."""

from __future__ import annotations

from typing import Any

from kvstore.cli.app import ConfigOption, new_app
from kvstore.cli.output import Column, JsonOption, number_column, print_note, print_rows, size_column
from kvstore.cli.store import MasterOption, open_store
from kvstore.client.messages import ClusterMap, Node

app = new_app()

READS = [
    number_column("hits", "LOCAL"),
    number_column("fetches", "PEERS"),
    number_column("misses", "MISSED"),
]
READS_NOTE = "LOCAL, from PEERS, MISSED: reads of blocks since the start of each worker."
COLUMNS = [
    Column("node", "NODE"),
    Column("state", "STATE"),
    Column("heartbeat_age_s", "HEARD", "{:.1f} s".format, "right"),
    Column("endpoint", "ENDPOINT"),
    size_column("capacity_bytes", "CAPACITY"),
    size_column("used_bytes", "USED"),
    number_column("blocks", "BLOCKS"),
    *READS,
]
"""What an operator looks for first; the rest is in JSON."""


@app.callback()
def nodes() -> None:
    """Look at the workers of a cluster."""


@app.command("list")
def list_nodes(master: MasterOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """All workers that the master knows, live or not, and how their reads went."""
    with open_store(master, config, "") as client:
        print_rows(map(row, in_order(client.cluster_map())), COLUMNS, as_json)
    if not as_json:
        print_note(READS_NOTE)


def in_order(cluster: ClusterMap) -> list[Node]:
    return sorted(cluster.nodes, key=lambda node: node.id)


def row(node: Node) -> dict[str, Any]:
    return {
        "node": node.id,
        "state": state(node),
        "endpoint": node.endpoint,
        "http": node.http,
        "tiers": sorted({v.tier for v in node.volumes}),
        "capacity_bytes": sum(v.capacity_bytes for v in node.volumes),
        "used_bytes": sum(v.used_bytes for v in node.volumes),
        "free_bytes": node.free_bytes,
        "blocks": node.blocks,
        "heartbeat_age_s": node.heartbeat_age_s if node.heartbeat_age_s >= 0 else None,
        "version": node.version,
        "volumes": [{**v._asdict(), "id": f"{v.id:016x}"} for v in node.volumes],
        "counters": node.counters._asdict(),
        **reads(node),
    }


def reads(node: Node) -> dict[str, int]:
    """Of blocks: found here, brought from a peer, found nowhere."""
    return {"hits": node.counters.hits, "fetches": node.counters.fetches, "misses": node.counters.misses}


def state(node: Node) -> str:
    if not node.live:
        return "dead"
    if not node.volumes:
        return "no volume"  # in service: its log says why
    return "draining" if node.draining else "live"
