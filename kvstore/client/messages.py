"""Core values ⇄ protobuf of the master's calls. Pure, and shared by the asynchronous and the synchronous client."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from kvstore.core.errors import KvError
from kvstore.core.told import TierCounters, Unlinked, VolumeState, WorkerCounters
from kvstore.core.types import Address, Entry
from kvstore.pb import common_pb2 as c
from kvstore.pb import master_pb2 as m
from kvstore.rpc import entries
from kvstore.rpc.status import error_from_pb

T = TypeVar("T")


class PublishMode(enum.IntEnum):
    REPLACE = m.REPLACE
    """Whatever file was there."""
    IF_ABSENT = m.IF_ABSENT
    """An existing entry is returned, no error."""
    IF_PRESENT = m.IF_PRESENT
    """The close of a file that was open: Stale when the name was removed meanwhile."""

    @property
    def wire(self) -> m.PublishMode.ValueType:
        return m.PublishMode.ValueType(self.value)


class RemoveKind(enum.IntEnum):
    ANY = m.ANY
    FILE = m.FILE
    DIRECTORY = m.DIRECTORY

    @property
    def wire(self) -> m.RemoveKind.ValueType:
        return m.RemoveKind.ValueType(self.value)


class PublishName(NamedTuple):
    """One name of a transaction. `address` None makes an empty file; `mode` 0 is 0644, `mtime_ns` 0 is now."""

    path: str
    address: Address | None = None
    volume: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    keep_attributes: bool = False
    """With an existing file: its mode, uid and gid stay."""
    replace_equal: bool = False
    """Replace even equal content, which else stays: whoever says so could not read what is there."""


class Publication(NamedTuple):
    """A transaction: all of its names or none."""

    names: Sequence[PublishName]
    mode: PublishMode = PublishMode.REPLACE
    parents: bool = False
    """Make missing directories (0755)."""


class PublishResult(NamedTuple):
    """Per name of the transaction: the entry as it is now, and whether this publish made it."""

    entries: list[Entry]
    created: list[bool]


class RemoveName(NamedTuple):
    path: str
    kind: RemoveKind = RemoveKind.ANY
    inode: int = 0
    """The one that is meant, 0 = whatever is there. Only with it is a remove retried after an ambiguous failure (rule
    21).
    """


class RenameName(NamedTuple):
    from_base: int
    from_path: str
    to_base: int
    to_path: str
    no_replace: bool = False
    inode: int = 0
    """The one that is meant at `from`, 0 = whatever is there. See `RemoveName.inode`."""


class Node(NamedTuple):
    id: str
    endpoint: str
    http: str
    live: bool
    heartbeat_age_s: float
    """Negative: none since the master started."""
    volumes: tuple[VolumeState, ...]
    counters: WorkerCounters
    blocks: int
    draining: bool
    version: str
    tiers: tuple[TierCounters, ...] = ()
    """None before its first heartbeat, or from a worker that does not tell."""

    @property
    def free_bytes(self) -> int:
        return sum(v.free_bytes for v in self.volumes)


class ClusterMap(NamedTuple):
    cluster: str
    sequence: int
    nodes: tuple[Node, ...]
    files: int
    directories: int
    """Without the root."""
    version: str
    max_block_bytes: int
    lookups_found: int = 0
    """Names looked up since the master started, and found."""
    lookups_not_found: int = 0
    """... that were not there, or had no live replica."""
    notice: str = ""
    """What people should know of the master now."""


class Statfs(NamedTuple):
    """Capacity of all live volumes, and what a path holds."""

    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    files: int
    directories: int
    max_block_bytes: int


class Event(NamedTuple):
    """One change from the journal. `kind`: publish, mkdir, remove, rename, setattr, evict, node."""

    sequence: int
    time_ns: int
    kind: str
    path: str
    to_path: str
    inode: int
    address: Address | None


def publish_request(
    base: int, session: int, first_number: int, publications: Sequence[Publication]
) -> m.PublishRequest:
    """Transactions are numbered from `first_number` on within the session."""
    return m.PublishRequest(
        base=base,
        transactions=[
            m.Transaction(
                mode=p.mode.wire,
                names=[_publish_name(n) for n in p.names],
                session=session,
                number=first_number + i,
                parents=p.parents,
            )
            for i, p in enumerate(publications)
        ],
    )


def _publish_name(name: PublishName) -> m.PublishName:
    out = m.PublishName(
        path=name.path,
        volume=name.volume,
        mode=name.mode,
        uid=name.uid,
        gid=name.gid,
        mtime_ns=name.mtime_ns,
        keep_attributes=name.keep_attributes,
        replace_equal=name.replace_equal,
    )
    if name.address is not None:
        out.address.CopyFrom(entries.address_to_pb(name.address))
    return out


def publish_results(reply: m.PublishReply, count: int) -> list[PublishResult | KvError]:
    return [_publish_result(r) for r in of_length(reply.results, count)]


def _publish_result(result: m.TransactionResult) -> PublishResult | KvError:
    error = error_from_pb(result.error)
    if error is not None:
        return error
    return PublishResult([whole(row) for row in entries.decode(result.entries)], list(result.created))


def remove_request(base: int, names: Iterable[RemoveName]) -> m.RemoveRequest:
    return m.RemoveRequest(
        base=base,
        names=[m.RemoveName(path=n.path, kind=n.kind.wire, inode=n.inode) for n in names],
    )


def rename_request(names: Iterable[RenameName]) -> m.RenameRequest:
    return m.RenameRequest(names=[m.RenameName(**n._asdict()) for n in names])


def errors_of(errors: Sequence[c.Error], count: int) -> list[KvError | None]:
    return [error_from_pb(e) for e in of_length(errors, count)]


def rows_of(message: c.Entries, count: int) -> list[Entry | KvError]:
    return list(of_length(entries.decode(message), count))


def page_rows(page: m.ListPage) -> list[tuple[str, Entry]]:
    return [(name, whole(row)) for name, row in zip(page.names, rows_of(page.entries, len(page.names)), strict=True)]


def whole(row: Entry | KvError) -> Entry:
    """A row that stands alone: its error is raised."""
    if isinstance(row, KvError):
        raise row
    return row


def cluster_map(reply: m.ClusterMapReply) -> ClusterMap:
    return ClusterMap(
        reply.cluster,
        reply.sequence,
        tuple(_node(n) for n in reply.nodes),
        reply.files,
        reply.directories,
        reply.version,
        reply.max_block_bytes,
        reply.lookups_found,
        reply.lookups_not_found,
        reply.notice,
    )


def _node(node: m.Node) -> Node:
    volumes = tuple(VolumeState(v.id, v.tier, v.capacity_bytes, v.used_bytes, v.free_bytes) for v in node.volumes)
    counters = WorkerCounters(*(getattr(node.counters, name) for name in WorkerCounters._fields))
    return Node(
        node.id,
        node.endpoint,
        node.http,
        node.live,
        node.heartbeat_age_s,
        volumes,
        counters,
        node.blocks,
        node.draining,
        node.version,
        tuple(map(_tier, node.tiers)),
    )


def _tier(tier: m.TierCounters) -> TierCounters:
    numbers = {name: getattr(tier, name) for name in TierCounters._fields if name != "unlinked"}
    return TierCounters(**numbers, unlinked=tuple(Unlinked(u.reason, u.files, u.bytes) for u in tier.unlinked))


def statfs(reply: m.StatfsReply) -> Statfs:
    r = reply
    return Statfs(r.capacity_bytes, r.used_bytes, r.free_bytes, r.files, r.directories, r.max_block_bytes)


def events(reply: m.EventsReply) -> list[Event]:
    return [_event(e) for e in reply.events]


def _event(e: m.Event) -> Event:
    address = entries.address_from_pb(e.address) if e.HasField("address") else None
    return Event(e.sequence, e.time_ns, e.kind, e.path, e.to_path, e.inode, address)


def of_length(items: Sequence[T], count: int) -> Sequence[T]:
    """A reply must answer every item of its request."""
    if len(items) != count:
        raise KvError(f"the master's reply is malformed: {len(items)} results for {count} requests")
    return items
