"""What a store says of its bytes beside what lies on its disks: never above the caps while it works, equal to the byte
at the end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from kvstore import Client
from kvstore.client.messages import Node
from kvstore.core.types import Address
from kvstore.worker.reports.report import REPORT_INTERVAL_S
from tests.support.cluster import Cluster, Worker, wait_until
from tests.support.repeating import Repeating

SAMPLE_S: Final = 0.1
SETTLE_S: Final = 30.0


class Caps(Repeating):
    """Looks at the files of every volume again and again. `highest`: volume's directory → the most bytes seen."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(self._look, SAMPLE_S, "caps")
        self._volumes = [volume for worker in cluster.workers for volume in (worker.memory, worker.volume)]
        self.highest: dict[str, int] = dict.fromkeys(map(str, self._volumes), 0)
        self.looks = 0

    def _look(self) -> None:
        for volume in self._volumes:
            self.highest[str(volume)] = max(self.highest[str(volume)], sum(files(volume).values()))
        self.looks += 1


class Account(NamedTuple):
    """Of one node at the end. Sums of bytes as the disk counts them."""

    node: str
    on_disk: int
    """Files of its volumes."""
    told: int
    """What the worker says is used."""
    came: int
    """Written by clients and brought from peers, and what names beside blocks took."""
    unlinked: int
    """All reasons together, with the names. Moves between tiers are not among them."""
    strangers: int
    """Files that are no replica of any name."""
    absent: int
    """Replicas that the master names, and no file is there."""

    @property
    def fits(self) -> bool:
        return self.on_disk == self.told == self.came - self.unlinked and not self.strangers and not self.absent


def files(volume: Path) -> dict[int, int]:
    """Inode → bytes on disk, of blocks, staging and quarantine: a file that is renamed meanwhile counts once."""
    found: dict[int, int] = {}
    for part in ("blocks", "staging", "quarantine"):
        for root, _, names in os.walk(volume / part):
            for name in names:
                try:
                    state = os.stat(f"{root}/{name}")
                except FileNotFoundError:
                    continue
                found[state.st_ino] = state.st_blocks * 512
    return found


def settle(cluster: Cluster) -> None:
    """Until nothing moves any more: the same counters and files for as long as three reports take."""
    before: list[object] = []

    def is_still() -> bool:
        threading.Event().wait(3 * REPORT_INTERVAL_S)
        now = [_fingerprint(cluster)]
        same, before[:] = now == before, now
        return same

    wait_until(is_still, "the store comes to rest", SETTLE_S)


def _fingerprint(cluster: Cluster) -> object:
    nodes = {node.id: (node.counters, node.volumes) for node in cluster.map().nodes}
    return nodes, [files(volume) for worker in cluster.workers for volume in (worker.memory, worker.volume)]


def accounts(cluster: Cluster, client: Client, directory: str) -> Iterator[Account]:
    """One per node, when nothing moves any more."""
    nodes = {node.id: node for node in cluster.map().nodes}
    replicas = _replicas(client, directory)
    for worker in cluster.workers:
        yield _account(worker, nodes[worker.node], replicas.get(worker.node, {}))


def _replicas(client: Client, directory: str) -> dict[str, dict[str, int]]:
    """Node → file name of each block that the master says it has → volumes it is in."""
    found: dict[str, dict[str, int]] = {}
    for _, entry in client.list(directory):
        address: Address | None = entry.address
        for replica in entry.replicas if address else ():
            names = found.setdefault(replica.node, {})
            assert address is not None
            names[address.file_name] = names.get(address.file_name, 0) + 1
    return found


def _account(worker: Worker, node: Node, replicas: Mapping[str, int]) -> Account:
    volumes = (worker.memory, worker.volume)
    names = [p.name for volume in volumes for p in volume.glob("blocks/*/*")]
    unlinked = sum(count.bytes for tier in node.tiers for count in tier.unlinked)
    return Account(
        node.id,
        on_disk=sum(sum(files(volume).values()) for volume in volumes),
        told=sum(volume.used_bytes for volume in node.volumes),
        came=node.counters.written_bytes + node.counters.fetched_bytes + node.counters.extra_bytes,
        unlinked=unlinked,
        strangers=sum(1 for name in names if name not in replicas),
        absent=sum(count for name, count in replicas.items() if names.count(name) != count),
    )
