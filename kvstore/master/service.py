"""The gRPC face of the master: a message in, a verb of `Master`, a message out."""

# ruff: noqa: N802 - the names of the methods are the wire's

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from kvstore import __version__
from kvstore.master import convert
from kvstore.master.master import Master
from kvstore.master.metrics import MasterMetrics
from kvstore.pb import master_pb2 as m
from kvstore.pb import master_pb2_grpc
from kvstore.rpc import entries
from kvstore.rpc.metadata import Caller
from kvstore.rpc.server import Admission, streaming, unary, vital
from kvstore.runtime import Runtime


class MasterService(master_pb2_grpc.MasterServicer):
    def __init__(self, master: Master, runtime: Runtime, metrics: MasterMetrics) -> None:
        self._master, self._runtime, self._metrics = master, runtime, metrics
        self.admission = Admission()

    def add_to(self, server: grpc.aio.Server) -> None:
        master_pb2_grpc.add_MasterServicer_to_server(self, server)

    @unary
    async def Lookup(self, request: m.LookupRequest, caller: Caller) -> m.LookupReply:
        rows = self._master.lookup(request.base, request.paths, caller.node)
        self._metrics.keys.labels("lookup").inc(len(rows))
        return m.LookupReply(entries=entries.encode(rows))

    @unary
    async def Publish(self, request: m.PublishRequest, caller: Caller) -> m.PublishReply:
        results = await self._master.publish(request.base, convert.transactions(request.transactions))
        self._metrics.keys.labels("publish").inc(sum(len(t.names) for t in request.transactions))
        return m.PublishReply(results=[convert.transaction_result(r) for r in results])

    @unary
    async def Mkdir(self, request: m.MkdirRequest, caller: Caller) -> m.MkdirReply:
        r = request
        rows = await self._master.mkdir(r.base, list(r.paths), r.parents, r.mode, r.uid, r.gid)
        return m.MkdirReply(entries=entries.encode(rows))

    @unary
    async def Remove(self, request: m.RemoveRequest, caller: Caller) -> m.RemoveReply:
        names = [(n.path, convert.kind_of(n.kind), n.inode) for n in request.names]
        return m.RemoveReply(errors=convert.errors(await self._master.remove(request.base, names)))

    @unary
    async def Rename(self, request: m.RenameRequest, caller: Caller) -> m.RenameReply:
        moves = [convert.move(n) for n in request.names]
        return m.RenameReply(errors=convert.errors(await self._master.rename(moves)))

    @streaming
    async def List(self, request: m.ListRequest, caller: Caller) -> AsyncIterator[m.ListPage]:
        r = request
        async for names, rows in self._master.list(r.base, r.path, r.after, r.limit, r.names_only):
            yield m.ListPage(names=names, entries=entries.encode(rows))

    @unary
    async def SetAttr(self, request: m.SetAttrRequest, caller: Caller) -> m.SetAttrReply:
        entry = await self._master.set_attributes(
            request.base,
            request.path,
            request.mode if request.HasField("mode") else None,
            request.uid if request.HasField("uid") else None,
            request.gid if request.HasField("gid") else None,
            request.mtime_ns if request.HasField("mtime_ns") else None,
        )
        return m.SetAttrReply(entries=entries.encode([entry]))

    @unary
    async def Statfs(self, request: m.StatfsRequest, caller: Caller) -> m.StatfsReply:
        space = self._master.statfs(request.base, request.path)
        return m.StatfsReply(**space._asdict(), max_block_bytes=self._master.settings.max_block_bytes)

    @unary
    async def SetPolicy(self, request: m.SetPolicyRequest, caller: Caller) -> m.PolicyReply:
        inode, told = await self._master.set_policy(request.base, request.path, convert.wanted(request))
        return m.PolicyReply(inode=inode, policies=convert.policies(told))

    @unary
    async def GetPolicy(self, request: m.GetPolicyRequest, caller: Caller) -> m.PolicyReply:
        inode, told = self._master.policies(request.base, request.path)
        return m.PolicyReply(inode=inode, policies=convert.policies(told))

    @unary
    async def ListPolicies(self, request: m.ListPoliciesRequest, caller: Caller) -> m.ListPoliciesReply:
        return m.ListPoliciesReply(policies=convert.policies(self._master.all_policies()))

    @unary
    async def ClusterMap(self, request: m.ClusterMapRequest, caller: Caller) -> m.ClusterMapReply:
        master, counters, now_s = self._master, self._master.counters(), self._runtime.monotonic_s()
        return m.ClusterMapReply(
            cluster=master.cluster_id, sequence=master.committer.durable_sequence, files=counters.files,
            directories=counters.directories - 1, version=__version__, max_block_bytes=master.settings.max_block_bytes,
            nodes=[convert.node(node, master.nodes.live(node), now_s) for node in master.nodes],
            lookups_found=master.lookups.found, lookups_not_found=master.lookups.not_found, notice=master.notice,
        )  # fmt: skip

    @unary
    async def Events(self, request: m.EventsRequest, caller: Caller) -> m.EventsReply:
        events, first = await self._master.events(request.after, request.limit)
        return m.EventsReply(events=[convert.event(e) for e in events], first_sequence=first)

    @vital
    async def Register(self, request: m.RegisterRequest, caller: Caller) -> m.RegisterReply:
        node = await self._master.register(convert.registration(request))
        settings = self._master.settings
        return m.RegisterReply(
            cluster=self._master.cluster_id, sequence=self._master.committer.durable_sequence,
            next_report=node.row.next_report, tick_s=settings.tick_s, dead_ticks=settings.dead_ticks,
            max_block_bytes=settings.max_block_bytes, incarnation=self._master.incarnations.current,
            rolled_back=not node.row.collects, recovering=self._master.rebuild is not None,
            recovered=node.is_to_hear,
        )  # fmt: skip

    @vital
    async def Heartbeat(self, request: m.HeartbeatRequest, caller: Caller) -> m.HeartbeatReply:
        orders = await self._master.heartbeat(convert.beat(request))
        master = self._master
        return convert.heartbeat_reply(
            orders, master.cluster_id, master.committer.durable_sequence, master.incarnations.current
        )

    @vital
    async def Recover(self, request: m.RecoverRequest, caller: Caller) -> m.RecoverReply:
        page = convert.claims_of(request)
        return m.RecoverReply(wanted=await self._master.recover(request.node, request.boot, page, request.last))

    @vital
    async def Report(self, request: m.ReportRequest, caller: Caller) -> m.ReportReply:
        answer = await self._master.report(convert.report(request))
        master = self._master
        return convert.answer(answer, master.cluster_id, master.incarnations.current, master.committer.durable_sequence)
