"""A master in the test's own process: keeps what workers say, and says what the test wants.

Publishing is done by the test (`publish`, `remove`); verdicts follow from it as rule 15 says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvstore.core.errors import Denied, KvError
from kvstore.core.types import Address, BlockId
from kvstore.pb import master_pb2 as m
from kvstore.pb import master_pb2_grpc
from kvstore.rpc.metadata import Caller
from kvstore.rpc.server import Server, serve, vital

CLUSTER = "cluster-of-tests"


class FakeMaster(master_pb2_grpc.MasterServicer):
    """
    owned, dead      block ids as the master's table has them
    replicas         block → volumes, as reported
    reports          every report taken, in order
    registrations    every registration taken
    beats            the last heartbeat of each node
    changed          notified after each call
    fail             raised by reports while it is set
    refuse           raised by registrations while it is set
    incarnation      of this start; 0 = of before they had one
    rolled_back      what registrations are told
    policies         block → policy, for the verdicts on owned ones
    table, over      what heartbeats are told of policies
    names            block → path, for those that ask; `asked`: who did, in order
    recovered        pages of notes that workers sent; `wants_names`: whether they are taken
    """

    def __init__(self) -> None:
        self.cluster, self.sequence, self.incarnation = CLUSTER, 1, 0
        self.rolled_back = False
        self.owned: set[BlockId] = set()
        self.dead: set[BlockId] = set()
        self.replicas: dict[BlockId, set[int]] = {}
        self.reports: list[m.ReportRequest] = []
        self.registrations: list[m.RegisterRequest] = []
        self.beats: dict[str, m.HeartbeatRequest] = {}
        self.commands: list[m.Command] = []
        self.changed = asyncio.Condition()
        self.fail: KvError | None = None
        self.refuse: KvError | None = None
        self.policies: dict[BlockId, int] = {}
        self.table: m.PolicyTable | None = None
        self.over: list[m.PolicyBytes] = []
        self.names: dict[BlockId, str] = {}
        self.asked: list[BlockId] = []
        self.recovered: list[m.RecoverRequest] = []
        self.wants_names = True
        self.recovers = False
        """What registrations are told, as with `rolled_back`: that is over."""
        self.next_report: dict[str, int] = {}
        self.endpoint = ""

    def publish(self, address: Address) -> None:
        self.owned.add(address.block)

    def remove(self, address: Address) -> None:
        """The entry is gone: the block is dead, whoever reports it shall unlink it."""
        self.owned.discard(address.block)
        self.dead.add(address.block)

    @property
    def fences(self) -> dict[int, int]:
        """Boot → fence of the last report; empty before the first."""
        return {f.boot: f.counter for f in self.reports[-1].fences} if self.reports else {}

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until the workers' calls have made it true."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    @vital
    async def Register(self, request: m.RegisterRequest, caller: Caller) -> m.RegisterReply:
        if request.cluster not in ("", self.cluster):
            raise Denied(f"worker {request.node} belongs to cluster {request.cluster}, this master to {self.cluster}")
        if self.refuse:
            raise self.refuse
        self.registrations.append(request)
        await self._notify()
        return m.RegisterReply(
            cluster=self.cluster,
            sequence=self.sequence,
            next_report=self.next_report.setdefault(request.node, 1),
            tick_s=0.05,
            dead_ticks=5,
            incarnation=self.incarnation,
            rolled_back=self.rolled_back,
            recovered=self.recovers,
        )

    @vital
    async def Heartbeat(self, request: m.HeartbeatRequest, caller: Caller) -> m.HeartbeatReply:
        self.beats[request.node] = request
        commands, self.commands = self.commands, []
        await self._notify()
        reply = m.HeartbeatReply(
            cluster=self.cluster, sequence=self.sequence, commands=commands, incarnation=self.incarnation,
            over=self.over,
        )  # fmt: skip
        if self.table is not None and self.table.version != request.policies_version:
            reply.policies.CopyFrom(self.table)
        return reply

    @vital
    async def Report(self, request: m.ReportRequest, caller: Caller) -> m.ReportReply:
        if self.fail:
            raise self.fail
        expected = self.next_report.get(request.node, 0)
        reply = m.ReportReply(
            cluster=self.cluster, sequence=self.sequence, next_report=expected, incarnation=self.incarnation
        )
        if request.number != expected:
            reply.gap = True
            return reply
        self.next_report[request.node] = reply.next_report = expected + 1
        self._take(request)
        reply.held.extend(self._verdict(b) for b in split(request.held_ids))
        reply.full.extend(self._verdict(b) for b in split(request.full.ids))
        reply.held_policy.extend(self._policy(b) for b in split(request.held_ids))
        reply.full_policy.extend(self._policy(b) for b in split(request.full.ids))
        self._name(request, reply)
        await self._notify()
        return reply

    @vital
    async def Recover(self, request: m.RecoverRequest, caller: Caller) -> m.RecoverReply:
        self.recovered.append(request)
        await self._notify()
        return m.RecoverReply(wanted=self.wants_names)

    def _name(self, request: m.ReportRequest, reply: m.ReportReply) -> None:
        ids = split(request.name_ids)
        self.asked += ids
        reply.names_sequence = self.sequence
        for at, block in enumerate(ids):
            if block in self.owned and block in self.names:
                reply.names.add(index=at, path=self.names[block], mode=0o640, uid=1, gid=2, mtime_ns=3, ctime_ns=4)

    def _take(self, request: m.ReportRequest) -> None:
        before = self.fences
        self.reports.append(request)
        fences = {f.boot: f.counter for f in request.fences}
        # Below the fence an id is forgotten: such a one is never called dead.
        may_die = (b for b in split(request.dead_ids) if b.boot in fences and b.counter >= before.get(b.boot, 0))
        self.dead.update(b for b in may_die if b not in self.owned)
        for block in split(request.nowhere_ids):
            self.replicas.pop(block, None)
        for block, at in zip(split(request.held_ids), request.held_volume, strict=True):
            self.replicas.setdefault(block, set()).add(request.volumes[at])
        if request.HasField("full"):
            self._take_full(request.full, fences)

    def _take_full(self, full: m.FullPiece, fences: dict[int, int]) -> None:
        ids = set(split(full.ids))
        for block, volumes in list(self.replicas.items()):
            is_in_range = (full.first or b"") <= block.pack() <= (full.last or b"\xff" * 16)
            is_newer = block.boot in fences and block.counter >= fences[block.boot]
            if is_in_range and block not in ids and not is_newer:
                volumes.discard(full.volume)
        for block in ids:
            self.replicas.setdefault(block, set()).add(full.volume)

    def _verdict(self, block: BlockId) -> m.Verdict.ValueType:
        return m.DEAD if block in self.dead else m.OWNED if block in self.owned else m.UNKNOWN

    def _policy(self, block: BlockId) -> int:
        return self.policies.get(block, 0) if block in self.owned else 0

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def make() -> FakeMaster:
    """The methods that only clients call are missing on purpose: gRPC answers them with UNIMPLEMENTED."""
    return FakeMaster()  # type: ignore[abstract]


def split(packed: bytes) -> list[BlockId]:
    return [BlockId.unpack(packed, at) for at in range(0, len(packed), 16)]


@asynccontextmanager
async def running(master: FakeMaster, listen: str = "127.0.0.1:0") -> AsyncIterator[Server]:
    """The master on a port; `master.endpoint` says which."""
    server = await serve(listen, [lambda s: master_pb2_grpc.add_MasterServicer_to_server(master, s)])
    master.endpoint = server.endpoint
    try:
        yield server
    finally:
        await server.stop(0)
