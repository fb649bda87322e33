"""Any requests at the real handlers of a master: replies or typed errors, and its columns still say the same thing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from kvstore.master.master import Master
from kvstore.master.metrics import MasterMetrics
from kvstore.master.service import MasterService
from kvstore.pb import common_pb2 as c
from kvstore.pb import master_pb2 as m
from kvstore.rpc import methods
from kvstore.rpc.methods import Method
from tests.fuzz.calls import call
from tests.fuzz.hostile import fuzz, mangled, messages, spoiled
from tests.unit.master.world import DEFAULT, World, address, running

Request = tuple[Method[Any, Any], bytes]
METHODS: Final[list[Method[Any, Any]]] = [
    each for each in vars(methods).values() if isinstance(each, Method) and each.path.startswith("/kvstore.pb.Master/")
]


def _id(counter: int, boot: int = 7) -> bytes:
    return address(counter, boot).block.pack()


def _address(counter: int, boot: int = 7) -> c.Address:
    return c.Address(boot=boot, counter=counter, length_bytes=10, hash=counter)


def _volume(id: int) -> c.Volume:
    return c.Volume(id=id, tier="ssd", capacity_bytes=1 << 30, free_bytes=1 << 30)


def _publish(*names: m.PublishName, mode: Any = m.REPLACE) -> m.PublishRequest:
    return m.PublishRequest(transactions=[m.Transaction(names=names, parents=True, mode=mode)])


HONEST: Final[dict[str, list[Message]]] = {
    "Lookup": [m.LookupRequest(paths=["a", "d/e", "gone"])],
    "Publish": [
        _publish(m.PublishName(path="a", address=_address(5), volume=1, mode=0o600)),
        _publish(m.PublishName(path="d/f", address=_address(6), volume=1), m.PublishName(path="x/y")),
        _publish(m.PublishName(path="b", address=_address(5, 14), volume=2), mode=m.IF_ABSENT),
        _publish(m.PublishName(path="d/e", address=_address(7), volume=1, keep_attributes=True), mode=m.IF_PRESENT),
    ],
    "Mkdir": [m.MkdirRequest(paths=["new", "d/g/h"], parents=True)],
    "Remove": [m.RemoveRequest(names=[m.RemoveName(path="a"), m.RemoveName(path="d/e", kind=m.FILE)])],
    "Rename": [
        m.RenameRequest(names=[m.RenameName(from_path="a", to_path="z"), m.RenameName(from_path="d", to_path="q")]),
        m.RenameRequest(names=[m.RenameName(from_path="d/e", to_path="b")]),
    ],
    "List": [m.ListRequest(path="d", after="a", limit=1), m.ListRequest(names_only=True)],
    "SetAttr": [m.SetAttrRequest(path="d/e", mode=0o600, uid=1, gid=1, mtime_ns=1)],
    "Statfs": [m.StatfsRequest(path="d")],
    "ClusterMap": [m.ClusterMapRequest()],
    "Events": [m.EventsRequest(after=1, limit=10)],
    "SetPolicy": [m.SetPolicyRequest(path="d", quota_bytes=5), m.SetPolicyRequest(path="d/e", pinned=True)],
    "GetPolicy": [m.GetPolicyRequest(path="d/e")],
    "ListPolicies": [m.ListPoliciesRequest()],
    "Register": [
        m.RegisterRequest(
            node=f"n{i}", boot=boot, endpoint=f"h{i}:1", http="h:2", bulk="", volumes=[_volume(i)], version="0",
            fences=[m.Fence(boot=boot, counter=3)], minted=9, sequence=1,
        )
        for i, boot in ((1, 7), (2, 14), (3, 21), (1, 8))
    ],
    "Heartbeat": [
        m.HeartbeatRequest(
            node="n1", boot=7, volumes=[_volume(1)], counters=m.Counters(hits=1), blocks=3,
            tiers=[m.TierCounters(tier="ssd", hits=1, unlinked=[m.Unlinked(reason="ttl", files=1, bytes=1)])],
            policy_bytes=[m.PolicyBytes(policy=1, bytes=1 << 21, heat=0.5)],
        )
    ],
    "Report": [
        m.ReportRequest(
            node="n1", boot=7, number=1, fences=[m.Fence(boot=7, counter=1)], held_ids=_id(1) + _id(9),
            held_volume=[0, 0], volumes=[1], nowhere_ids=_id(2), dead_ids=_id(8), name_ids=_id(1),
        ),
        m.ReportRequest(node="n1", boot=7, number=1, full=m.FullPiece(volume=1, ids=_id(1))),
    ],
    "Recover": [
        m.RecoverRequest(
            node="n1", boot=7, last=True,
            blocks=[
                m.NotedBlock(
                    address=_address(30), volume=1, noted=m.Seen(incarnation=99, sequence=40),
                    name=m.BlockName(path="r/s", mode=0o644, mtime_ns=1, ctime_ns=1),
                )
            ],
        )
    ],
}  # fmt: skip


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()


def _of(method: Method[Any, Any]) -> st.SearchStrategy[bytes]:
    honest = st.sampled_from(HONEST[method.path.rpartition("/")[2]])
    return st.one_of(honest, spoiled(honest), spoiled(honest), messages(method.request)).map(_bytes)


REQUESTS: Final = st.one_of([st.tuples(st.just(method), _of(method)) for method in METHODS])
MANGLED: Final = st.one_of([st.tuples(st.just(method), mangled(_of(method))) for method in METHODS])


def test_every_call_of_the_service_is_among_those_tried() -> None:
    service = m.DESCRIPTOR.services_by_name["Master"]
    assert {method.path.rpartition("/")[2] for method in METHODS} == {each.name for each in service.methods}
    assert HONEST.keys() == {each.name for each in service.methods}


async def test_the_honest_requests_are_served() -> None:
    for method in METHODS:
        for message in HONEST[method.path.rpartition("/")[2]]:
            async with running() as world:
                await settle(world)
                assert await call(serving(world), method, _bytes(message)) is not None, message


@pytest.mark.allow_errors("rolled back")
@fuzz(400)
@given(st.lists(REQUESTS, min_size=1, max_size=8))
def test_any_requests_get_replies_or_typed_errors(requests: list[Request]) -> None:
    asyncio.run(try_all(requests))


@pytest.mark.allow_errors("rolled back")
@fuzz(100)
@given(st.lists(MANGLED, min_size=1, max_size=4))
def test_mangled_requests_are_refused_or_mean_something_else(requests: list[Request]) -> None:
    asyncio.run(try_all(requests))


async def try_all(requests: Sequence[Request]) -> None:
    async with running() as world:
        await settle(world)
        service = serving(world)
        for method, data in requests:
            try:
                await asyncio.wait_for(call(service, method, data), timeout=5)
            except DecodeError:
                continue  # gRPC answers this one before there is a handler
        MasterMetrics(world.master).metrics.render()
        world.recount()
        world.die()
        again = Master(world.db, world.committer, world.runtime, DEFAULT)
        assert again.stat(0, "").inode == 1, "what was stored can be read by the next start"


async def settle(world: World) -> None:
    """Two workers, a file of each, an empty one, a directory with a policy and a file in it."""
    await world.join(1)
    await world.join(2)
    await world.put("a", address(1))
    await world.put("b", address(1, boot=14), volume=2)
    await world.put("d/e", address(2), parents=True)
    await world.put("d/empty", None)
    await world.policy("d", quota_bytes=1 << 20, ttl_s=60.0)


def serving(world: World) -> MasterService:
    return MasterService(world.master, world.runtime, MasterMetrics(world.master))
