"""``kvstore nodes``: the workers of a cluster."""

from __future__ import annotations

from typing import Any

from kvstore.cli.app import ConfigOption, new_app
from kvstore.cli.output import Column, JsonOption, number_column, print_rows, size_column
from kvstore.cli.store import MasterOption, open_store
from kvstore.client.messages import Node

app = new_app()

COLUMNS = [
    Column("node", "NODE"),
    Column("state", "STATE"),
    Column("endpoint", "ENDPOINT"),
    Column("tiers", "TIERS", ", ".join),
    size_column("capacity_bytes", "CAPACITY"),
    size_column("used_bytes", "USED"),
    size_column("free_bytes", "FREE"),
    number_column("blocks", "BLOCKS"),
    Column("heartbeat_age_s", "LAST HEARD", "{:.1f} s ago".format, "right"),
    Column("version", "VERSION"),
]


@app.callback()
def nodes() -> None:
    """Look at the workers of a cluster."""


@app.command("list")
def list_nodes(master: MasterOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """All workers that the master knows, live or not."""
    with open_store(master, config, "") as client:
        print_rows([row(node) for node in client.cluster_map().nodes], COLUMNS, as_json)


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
    }


def state(node: Node) -> str:
    if not node.live:
        return "dead"
    return "draining" if node.draining else "live"
