"""Messages ⇄ plain values, for `service`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import xxhash

from kvstore.core.errors import InvalidRequest, KvError
from kvstore.core.told import TierCounters, Unlinked, VolumeState, WorkerCounters
from kvstore.core.types import TIERS, Seen
from kvstore.master.namespace import publish, remove
from kvstore.master.namespace.policies import Wanted
from kvstore.master.namespace.quotas import Held
from kvstore.master.namespace.rename import Move
from kvstore.master.namespace.setpolicy import Told
from kvstore.master.recovery import claims
from kvstore.master.storage.journal import Event
from kvstore.master.workers import reports
from kvstore.master.workers.names import BlockName
from kvstore.master.workers.nodes import Node
from kvstore.master.workers.orders import Answer, Orders
from kvstore.master.workers.told import Beat, Registration
from kvstore.pb import common_pb2 as c
from kvstore.pb import master_pb2 as m
from kvstore.rpc import entries
from kvstore.rpc.status import error_to_pb

FIRST_ID, LAST_ID = b"\0" * 16, b"\xff" * 16
_REASON: Final = re.compile(r"[a-z_]{1,16}")
"""Why a worker unlinks; a newer one may have more of them."""
MAX_REASONS: Final = 16


def mode_of(number: int) -> publish.Mode:
    try:
        return publish.Mode(number)
    except ValueError:
        raise InvalidRequest(f"publish mode {number} is not known here") from None


def kind_of(number: int) -> remove.Kind:
    try:
        return remove.Kind(number)
    except ValueError:
        raise InvalidRequest(f"remove kind {number} is not known here") from None


def transactions(messages: Iterable[m.Transaction]) -> list[publish.Transaction]:
    return [publish.Transaction(mode_of(t.mode), [_name(n) for n in t.names], t.parents) for t in messages]


def _name(name: m.PublishName) -> publish.Name:
    address = entries.address_from_pb(name.address) if name.HasField("address") else None
    return publish.Name(
        name.path,
        address,
        name.volume,
        name.mode,
        name.uid,
        name.gid,
        name.mtime_ns,
        name.keep_attributes,
        name.replace_equal,
    )


def transaction_result(result: list[publish.Published] | KvError) -> m.TransactionResult:
    if isinstance(result, KvError):
        return m.TransactionResult(error=error_to_pb(result))
    rows = entries.encode([p.entry for p in result])
    return m.TransactionResult(created=[p.created for p in result], entries=rows)


def errors(results: Iterable[KvError | None]) -> list[c.Error]:
    return [error_to_pb(error) for error in results]


def move(name: m.RenameName) -> Move:
    return Move(name.from_base, name.from_path, name.to_base, name.to_path, name.no_replace, name.inode)


def event(event: Event) -> m.Event:
    sequence, time_ns, kind, path, to_path, inode, address = event
    message = m.Event(sequence=sequence, time_ns=time_ns, kind=kind, path=path, to_path=to_path, inode=inode)
    if address is not None:
        message.address.CopyFrom(entries.address_to_pb(address))
    return message


def volume(message: c.Volume) -> VolumeState:
    return VolumeState(message.id, message.tier, message.capacity_bytes, message.used_bytes, message.free_bytes)


def volume_to_pb(state: VolumeState) -> c.Volume:
    return c.Volume(
        id=state.id, tier=state.tier, capacity_bytes=state.capacity_bytes, used_bytes=state.used_bytes,
        free_bytes=state.free_bytes,
    )  # fmt: skip


def registration(request: m.RegisterRequest) -> Registration:
    return Registration(
        request.node, request.boot, request.endpoint, request.http, request.bulk, request.cluster, request.sequence,
        [volume(v) for v in request.volumes], request.version, fences(request.fences),
        [Seen(s.incarnation, s.sequence) for s in request.seen], request.minted,
    )  # fmt: skip


def fences(messages: Iterable[m.Fence]) -> dict[int, int]:
    return {f.boot: f.counter for f in messages}


def beat(request: m.HeartbeatRequest) -> Beat:
    told = WorkerCounters(*(getattr(request.counters, name) for name in WorkerCounters._fields))
    volumes = [volume(v) for v in request.volumes]
    held = {told.policy: Held(told.bytes, told.heat) for told in request.policy_bytes}
    return Beat(
        request.node, request.boot, volumes, told, request.blocks, request.leaving, _tiers(request.tiers),
        held, request.policies_version,
    )  # fmt: skip


def _tiers(messages: Iterable[m.TierCounters]) -> list[TierCounters]:
    """Only for people to look at: what makes no sense is left out, and the heartbeat counts."""
    tiers = {t.tier: _tier(t) for t in messages if t.tier in TIERS}
    return list(tiers.values())


def _tier(t: m.TierCounters) -> TierCounters:
    numbers = {name: getattr(t, name) for name in TierCounters._fields if name not in ("tier", "unlinked")}
    unlinked = {u.reason: Unlinked(u.reason, u.files, u.bytes) for u in t.unlinked if _REASON.fullmatch(u.reason)}
    return TierCounters(t.tier, **numbers, unlinked=list(unlinked.values())[:MAX_REASONS])


def tier_to_pb(tier: TierCounters) -> m.TierCounters:
    numbers = tier._asdict()
    unlinked = [m.Unlinked(reason=u.reason, files=u.files, bytes=u.bytes) for u in numbers.pop("unlinked")]
    return m.TierCounters(**numbers, unlinked=unlinked)


def report(request: m.ReportRequest) -> reports.Report:
    """Raises InvalidRequest when its columns do not fit each other."""
    held = reports.split_ids(request.held_ids)
    if len(held) != len(request.held_volume):
        raise InvalidRequest(f"{len(held)} held ids, but {len(request.held_volume)} volumes for them")
    if any(at >= len(request.volumes) for at in request.held_volume):
        raise InvalidRequest("a held id names a volume that the report does not list")
    return reports.Report(
        request.node, request.boot, request.number,
        xxhash.xxh3_64_intdigest(request.SerializeToString(deterministic=True)),
        fences(request.fences),
        [(block, request.volumes[at]) for block, at in zip(held, request.held_volume, strict=True)],
        reports.split_ids(request.nowhere_ids),
        reports.split_ids(request.dead_ids),
        _full(request.full) if request.HasField("full") else None,
        reports.split_ids(request.name_ids),
    )  # fmt: skip


def _full(piece: m.FullPiece) -> reports.Full:
    first, last = piece.first or FIRST_ID, piece.last or LAST_ID
    if len(first) != reports.ID_BYTES or len(last) != reports.ID_BYTES or first > last:
        raise InvalidRequest("a full piece goes from a block id to one that is not lower")
    return reports.Full(piece.volume, first, last, reports.split_ids(piece.ids))


def answer(answer: Answer, cluster: str, incarnation: int, sequence: int) -> m.ReportReply:
    return m.ReportReply(
        cluster=cluster, incarnation=incarnation, sequence=sequence, next_report=answer.next_report, gap=answer.gap,
        held=[_VERDICTS[v] for v in answer.held.verdicts], full=[_VERDICTS[v] for v in answer.full.verdicts],
        held_policy=answer.held.policies, full_policy=answer.full.policies,
        commands=commands(answer.orders), names_sequence=answer.names.sequence,
        names=[_block_name(name) for name in answer.names.rows],
    )  # fmt: skip


def _block_name(name: BlockName) -> m.BlockName:
    at, path, mode, uid, gid, mtime_ns, ctime_ns = name
    return m.BlockName(index=at, path=path, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns, ctime_ns=ctime_ns)


def claims_of(request: m.RecoverRequest) -> list[claims.Claim]:
    return [
        claims.Claim(
            entries.address_from_pb(row.address), row.volume, _noted(row) if row.HasField("name") else None
        )
        for row in request.blocks
    ]  # fmt: skip


def _noted(row: m.NotedBlock) -> claims.NotedName:
    name, at = row.name, Seen(row.noted.incarnation, row.noted.sequence)
    return claims.NotedName(name.path, name.mode, name.uid, name.gid, name.mtime_ns, name.ctime_ns, at)


_VERDICTS: Mapping[reports.Verdict, m.Verdict.ValueType] = {
    reports.Verdict.UNKNOWN: m.UNKNOWN,
    reports.Verdict.OWNED: m.OWNED,
    reports.Verdict.DEAD: m.DEAD,
}


def commands(orders: Orders) -> list[m.Command]:
    result = []
    if orders.register:
        result.append(m.Command(register=m.Reregister()))
    if orders.full_report:
        result.append(m.Command(full_report=m.FullReport()))
    if orders.unlink:
        result.append(m.Command(unlink=m.Unlink(block_ids=b"".join(orders.unlink))))
    if orders.send_names:
        result.append(m.Command(send_names=m.SendNames()))
    if orders.report_again:
        result.append(m.Command(report_again=m.ReportAgain(block_ids=b"".join(orders.report_again))))
    return result


def wanted(request: m.SetPolicyRequest) -> Wanted:
    return Wanted(
        request.quota_bytes if request.HasField("quota_bytes") else None,
        request.ttl_s if request.HasField("ttl_s") else None,
        request.pinned if request.HasField("pinned") else None,
    )


def policies(told: Iterable[Told]) -> list[m.Policy]:
    return [
        m.Policy(
            id=id, inode=row.inode, path=f"/{path}", quota_bytes=row.quota_bytes, ttl_s=row.ttl_s, pinned=row.pinned,
            used_bytes=row.used_bytes, files=row.files, counting=counting, parent=row.parent,
        )
        for id, row, path, counting in told
    ]  # fmt: skip


def heartbeat_reply(orders: Orders, cluster: str, sequence: int, incarnation: int) -> m.HeartbeatReply:
    reply = m.HeartbeatReply(
        cluster=cluster, sequence=sequence, commands=commands(orders), incarnation=incarnation,
        over=[m.PolicyBytes(policy=policy, bytes=size, heat=heat) for policy, size, heat in orders.over],
    )  # fmt: skip
    if orders.policies is not None:
        version, rules = orders.policies
        rows = [m.PolicyRule(id=r.id, parent=r.parent, ttl_s=r.ttl_s, pinned=r.pinned) for r in rules]
        reply.policies.CopyFrom(m.PolicyTable(version=version, rules=rows))
    return reply


def node(node: Node, live: bool, now_s: float) -> m.Node:
    row, in_service = node.row, set(node.row.volumes)
    return m.Node(
        id=node.id, endpoint=row.endpoint, http=row.http, live=live, version=row.version, blocks=node.blocks,
        heartbeat_age_s=-1.0 if node.heard_s is None else now_s - node.heard_s,
        volumes=[volume_to_pb(v) for v in node.states.values() if v.id in in_service],
        counters=m.Counters(**node.counters._asdict()), tiers=map(tier_to_pb, node.tiers),
    )  # fmt: skip
