"""Which workers there are, where, what they have in service, and whether they live (rules 4, 15, 16, 17)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from kvstore.core.errors import AlreadyExists, Denied, InvalidRequest
from kvstore.core.told import TierCounters, VolumeState, WorkerCounters
from kvstore.core.types import U63_MAX, Replica, Seen
from kvstore.master.namespace.cluster import Cluster
from kvstore.master.namespace.quotas import Held
from kvstore.master.storage import journal
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, Reader
from kvstore.master.storage.records import NODE, VOLUME, NodeRow, VolumeRow, dump, pack_u64, unpack_u64
from kvstore.master.workers.incarnations import Incarnations
from kvstore.master.workers.told import MAX_VOLUMES_PER_NODE, Beat, Registration, check_registration

log = logging.getLogger(__name__)

MAX_NODES = 10_000
CLOSED = U63_MAX
"""A fence that no counter reaches: nothing of its boot is published any more."""
MAX_OVER = 64
"""Boots that are over and are remembered, of each node: 9 bytes each in a row that every report writes."""


class Node:
    """A known worker.

    `row`     what is stored;  `missed`  ticks since its last heartbeat (or since this master started);
    `heard_s` monotonic time of its last heartbeat, None before the first one;
    `spoke`   whether it registered or sent a heartbeat since this master started: until then it only counts as live;
    `states`  its volumes as it told them last;  `counters`, `blocks`, `tiers`, `policies`  likewise;
    `relabelled`  blocks on it that have another name or policy than it knows: it is asked to report them again
              until it has;
    `is_to_register`  its next heartbeat is answered with the order to register anew;
    `is_to_hear`  by its last registration it does not know yet that it is collected from again.
    """

    def __init__(self, id: str, row: NodeRow) -> None:
        self.id = id
        self.row = row
        self.missed = 0
        self.heard_s: float | None = None
        self.spoke = False
        self.states: dict[int, VolumeState] = {}
        self.counters = WorkerCounters()
        self.blocks = 0
        self.tiers: Sequence[TierCounters] = ()
        self.policies: Mapping[int, Held] = {}
        self.relabelled: dict[bytes, None] = {}
        self.is_to_register = self.is_to_hear = False

    @property
    def has_to_register(self) -> bool:
        """Likewise as long as it has not shown by a registration that it knows that it is collected from again: the
        order may be lost, or followed by a registration from before it.
        """
        return self.is_to_register or self.is_to_hear

    def __repr__(self) -> str:
        return f"<Node {self.id} at {self.row.endpoint}, missed {self.missed}>"


class Nodes:
    """All of them, in memory (there are few) and in the database.

    The methods that take a `Change` check first, then change memory and the change alike: the change is written in
    the same step of the loop, and if that fails the process ends.
    """

    def __init__(self, reader: Reader, incarnations: Incarnations, dead_ticks: int, max_block_bytes: int) -> None:
        self._incarnations = incarnations
        self.dead_ticks = dead_ticks
        self._max_block_bytes = max_block_bytes
        self._hidden: Mapping[int, int] = {}
        self.strangers: dict[str, str] = {}
        """Worker → the other cluster for which it was refused, since this master started."""
        self.volumes = {unpack_u64(k): VOLUME.load(v) for k, v in _all(reader, Cf.VOLUMES)}
        self._nodes = {k.decode(): Node(k.decode(), NODE.load(v)) for k, v in _all(reader, Cf.NODES)}
        self.cluster = self._view()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, node: str) -> Node | None:
        return self._nodes.get(node)

    def live(self, node: Node) -> bool:
        return node.missed < self.dead_ticks

    def registered(self, node: str, boot: int) -> Node | None:
        """The node if this start of it is the registered one."""
        known = self._nodes.get(node)
        return known if known is not None and known.row.boot == boot else None

    def seen_by(self, node: str) -> Mapping[int, Replica]:
        """Live volumes as a caller on `node` counts them: its own node's count even when that is not live (rule 14)."""
        own = self._nodes.get(node)
        if own is None or self.live(own):
            return self.cluster.live
        return {**self.cluster.live, **self._replicas(own)}

    @property
    def distrusted(self) -> list[str]:
        """Workers that nothing is collected from, in order."""
        return sorted(node.id for node in self._nodes.values() if not node.row.collects)

    def space(self) -> tuple[int, int, int]:
        """(capacity, used, free) bytes of all live volumes."""
        homes, live = self.cluster.homes, self.cluster.live
        states = [
            v
            for node in self._nodes.values()
            for v in node.states.values()
            if v.id in live and homes.get(v.id) == node.id  # a volume may have gone to another node id
        ]
        return (
            sum(v.capacity_bytes for v in states),
            sum(v.used_bytes for v in states),
            sum(v.free_bytes for v in states),
        )

    def register(
        self, change: Change, new: Registration, cluster_id: str, sequence: int, *, is_mended: bool = False
    ) -> Node:
        """`is_mended`: what the worker has seen beyond this database is about to be taken in, or discarded. Raises
        InvalidRequest, Denied for a worker of another cluster, AlreadyExists for ids that live elsewhere."""
        check_registration(new)
        if new.cluster and new.cluster != cluster_id:
            raise self._strange(new, cluster_id)
        self._check_addresses(new)
        self._supersede(change, new)
        self.strangers.pop(new.node, None)
        old = self._nodes.get(new.node)
        if old is None and len(self._nodes) >= MAX_NODES:
            raise InvalidRequest(f"there are {MAX_NODES} nodes already; remove old ones first")
        node = Node(new.node, self._registered_row(old, new, sequence, is_mended=is_mended))
        node.is_to_hear = node.row.collects and any(seen in node.row.recovered for seen in new.seen)
        node.states = {v.id: v for v in new.volumes}
        node.spoke = True
        self._nodes[new.node] = node
        for volume in new.volumes:
            self.put_volume(change, volume.id, VolumeRow(new.node, volume.tier))
        self.put(change, node, node.row)
        journal.append(change, "node", 0, new.node, 0)
        return node

    def heartbeat(self, change: Change, beat: Beat, now_s: float) -> Node | None:
        """Note that a worker lives and what it has in service. None: it must register (again)."""
        node = self.registered(beat.node, beat.boot)
        ids = [v.id for v in beat.volumes]
        if node is None or not set(ids) <= set(node.row.volumes):
            return None
        was_live = self.live(node)
        node.missed, node.heard_s, node.spoke = self.dead_ticks if beat.leaving else 0, now_s, True
        node.states = {v.id: v for v in beat.volumes}
        node.counters, node.blocks, node.tiers = beat.counters, beat.blocks, beat.tiers
        node.policies = beat.policies
        if set(ids) != set(node.row.volumes):
            log.warning(
                "node %s: volumes out of service: %s; what is on them is a miss. Its own log says why: mend or empty "
                "them, and restart that worker", node.id, _hex(set(node.row.volumes) - set(ids)),
            )  # fmt: skip
            self.put(change, node, msgspec.structs.replace(node.row, volumes=ids))
        elif was_live != self.live(node):
            log.info("node %s %s", node.id, "stopped" if was_live else "lives again")
            self.cluster = self._view()
        return node

    def take_report(self, change: Change, node: Node, number: int, digest: int, fences: Mapping[int, int]) -> None:
        """Number and fences of a report, committed with its effect."""
        own = {node.row.boot: 0}  # the start that speaks is not over, even if it forgets to say so
        merged = self._merge_fences(node.id, node.row, own | dict(fences))
        row = msgspec.structs.replace(
            node.row, next_report=number + 1, last_report=digest, fences=merged, over=_over(node.row, merged)
        )
        self.put(change, node, row)

    def tick(self) -> None:
        """One tick of the master's clock, late or not (rule 17)."""
        died = []
        for node in self._nodes.values():
            node.missed += 1
            if node.missed == self.dead_ticks:
                died.append(node.id)
        if died:
            log.warning("no heartbeat for %d ticks: %s", self.dead_ticks, ", ".join(died))
            self.cluster = self._view()

    def hide(self, hidden: Mapping[int, int]) -> None:
        """Policy → published bytes of it that no live worker holds."""
        self._hidden = hidden
        self.cluster = self.cluster._replace(hidden=hidden)

    def relabel(self, relabelled: Iterable[tuple[bytes, Iterable[int]]]) -> None:
        """Blocks, with the volumes that hold them, which have another name or count for another policy by now."""
        for block, volumes in relabelled:
            for home in {self.cluster.homes.get(volume) for volume in volumes}:
                if home is not None and (node := self._nodes.get(home)) is not None:
                    node.relabelled[block] = None

    def lacks(self, seen: Seen, sequence: int) -> bool:
        """Whether the database, at `sequence` now, does not have this point of the cluster's history (rule 16)."""
        return self._incarnations.is_ahead(seen, sequence)

    def trust(self, change: Change, node: Node, recovered: Sequence[Seen]) -> None:
        """A worker is collected from (again): what it has seen of other histories was taken in, or discarded."""
        self.put(change, node, msgspec.structs.replace(node.row, collects=True, recovered=list(recovered)))

    def put(self, change: Change, node: Node, row: NodeRow) -> None:
        node.row = row
        change.put(Cf.NODES, node.id.encode(), dump(row))
        self.cluster = self._view()

    def put_volume(self, change: Change, volume: int, row: VolumeRow) -> None:
        if self.volumes.get(volume) != row:
            self.volumes[volume] = row
            change.put(Cf.VOLUMES, pack_u64(volume), dump(row))

    def drop_volume(self, change: Change, volume: int) -> None:
        del self.volumes[volume]
        change.delete(Cf.VOLUMES, pack_u64(volume))
        self.cluster = self._view()

    def drop(self, change: Change, node: Node) -> None:
        del self._nodes[node.id]
        change.delete(Cf.NODES, node.id.encode())
        journal.append(change, "node", 0, node.id, 0)
        self.cluster = self._view()

    def _strange(self, new: Registration, cluster_id: str) -> Denied:
        """Each worker of another cluster is logged once: it comes again and again."""
        error = Denied(
            f"worker {new.node} belongs to cluster {new.cluster}, this master to {cluster_id or 'none yet'}: "
            "point it at its own master; if this one has lost its disk, move its data directory away and start it on "
            "an empty directory with --rebuild (the names come back) or --discard (they are forgotten)"
        )
        if self.strangers.get(new.node) != new.cluster and len(self.strangers) < MAX_NODES:
            self.strangers[new.node] = new.cluster
            log.warning("refused: %s", error)
        return error

    def _check_addresses(self, new: Registration) -> None:
        """Ids that live elsewhere are refused. A node that only counts as live after the master's restart is no
        evidence: the whole rack may have come back with new addresses.
        """
        known = self._nodes.get(new.node)
        if known is not None and self._is_heard(known) and known.row.endpoint != new.endpoint:
            raise AlreadyExists(
                f"node {new.node} lives at {known.row.endpoint}: give this worker another id, or stop the other one"
            )
        for volume in new.volumes:
            replica = self.cluster.live.get(volume.id)
            if replica is None or replica.endpoint == new.endpoint:
                continue
            if self._is_heard(self._nodes[replica.node]):
                raise AlreadyExists(
                    f"volume {volume.id:016x} lives on node {replica.node} at {replica.endpoint}: "
                    "was its directory copied? Empty the copy"
                )

    def _is_heard(self, node: Node) -> bool:
        return self.live(node) and node.spoke

    def _supersede(self, change: Change, new: Registration) -> None:
        """The same address under another node id: who was there is gone. A volume is in service on one node."""
        ids = {v.id for v in new.volumes}
        for node in self._nodes.values():
            if node.id == new.node:
                continue
            if node.row.endpoint == new.endpoint:
                node.missed = max(node.missed, self.dead_ticks)
            if ids & set(node.row.volumes):
                rest = [v for v in node.row.volumes if v not in ids]
                self.put(change, node, msgspec.structs.replace(node.row, volumes=rest))

    def _registered_row(self, old: Node | None, new: Registration, sequence: int, *, is_mended: bool) -> NodeRow:
        recovered = old.row.recovered if old else []  # for ever: its disks may tell of it again
        ahead = self._is_ahead(new, sequence, recovered)
        if ahead:
            _say_ahead(new, sequence, is_mended=is_mended)
        fences = _closed(new) if ahead else dict(new.fences)
        fences.setdefault(new.boot, 0)
        merged = self._merge_fences(new.node, old.row if old else None, fences)
        return NodeRow(
            new.endpoint, new.http, new.bulk, new.version, new.boot,
            next_report=old.row.next_report if old else 1,
            last_report=old.row.last_report if old else 0,
            fences=merged,
            volumes=[v.id for v in new.volumes],
            # A worker whose operator accepted the rollback comes with 0.
            collects=not ahead and (old is None or old.row.collects or new.sequence == 0),
            recovered=list(recovered),
            over=_over(old.row, merged) if old else [],
        )  # fmt: skip

    def _is_ahead(self, new: Registration, sequence: int, recovered: Sequence[Seen]) -> bool:
        """Rule 16. A worker that knows of no incarnation is judged by its sequence alone."""
        return new.sequence > sequence or any(self.lacks(seen, sequence) for seen in new.seen if seen not in recovered)

    def _merge_fences(self, node: str, row: NodeRow | None, told: Mapping[int, int]) -> dict[int, int]:
        """Fences only rise; a boot that is not told is over, for ever; one of another node is none of this one's."""
        old, over = (row.fences, row.over) if row is not None else ({}, [])
        boots = self.cluster.boots
        return {b: max(c, old.get(b, 0)) for b, c in told.items() if boots.get(b, node) == node and b not in over}

    def _replicas(self, node: Node) -> dict[int, Replica]:
        return {v: Replica(v, self.volumes[v].tier, node.id, node.row.endpoint) for v in node.row.volumes}

    def _view(self) -> Cluster:
        live: dict[int, Replica] = {}
        fences: dict[int, int] = {}
        boots: dict[int, str] = {}
        for node in self._nodes.values():
            if self.live(node):
                live.update(self._replicas(node))
            fences.update(node.row.fences)
            boots.update(dict.fromkeys(node.row.fences, node.id))
        homes = {v: row.node for v, row in self.volumes.items()}
        return Cluster(live, homes, fences, boots, self._max_block_bytes, self._hidden)


def _say_ahead(new: Registration, sequence: int, *, is_mended: bool) -> None:
    if is_mended:
        log.info("worker %s has seen sequence %d, this database is at %d", new.node, new.sequence, sequence)
    else:
        log.error(
            "worker %s has seen sequence %d of a history that is not this database's (at %d now): rolled back? "
            "Nothing of it is collected until this master is started with --rebuild or --discard",
            new.node, new.sequence, sequence,
        )  # fmt: skip


def _closed(new: Registration) -> dict[int, int]:
    """Of a worker that has seen what is lost here: any id that it had by now may have been published, or be dead
    (rule 10)."""
    return dict.fromkeys(new.fences, CLOSED) | {new.boot: max(new.minted, new.fences.get(new.boot, 0))}


def _all(reader: Reader, cf: Cf) -> list[tuple[bytes, bytes]]:
    return reader.scan(cf, b"", None, MAX_NODES * MAX_VOLUMES_PER_NODE)


def _hex(volumes: Iterable[int]) -> str:
    return ", ".join(f"{v:016x}" for v in sorted(volumes))


def _over(row: NodeRow, fences: Mapping[int, int]) -> list[int]:
    return [*row.over, *(boot for boot in row.fences if boot not in fences)][-MAX_OVER:]
