"""`AsyncMeta` and `Meta` over a scripted link: batches, retries (rule 21), listings that resume, malformed replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from kvstore.client import messages as msg
from kvstore.client.meta import AsyncMeta, Meta
from kvstore.core.errors import KvError, NotFound, Overloaded, Stale, Timeout, Unavailable
from kvstore.core.limits import MAX_BATCH, MAX_MESSAGE_BYTES
from kvstore.core.told import TierCounters, Unlinked, WorkerCounters
from kvstore.core.types import Address, BlockId, Entry, Replica
from kvstore.pb import master_pb2 as m
from kvstore.rpc import entries
from kvstore.rpc.failover import AsyncFailover, Failover
from kvstore.rpc.methods import Method
from kvstore.rpc.status import error_to_pb

SESSION = 0xABC
ADDRESS = Address(BlockId(9, 8), 7, 6)
FILE = Entry(5, 0o100644, 1, 2, 7, 3, 4, ADDRESS, (Replica(1, "ssd", "n", "n:1"),), 1)

Step = Message | KvError | Sequence[Message | KvError]
"""What a call gets: a reply, an error, or the pages of a stream (that may end in an error)."""


class Script:
    """Both kinds of link at once: hands out the steps in turn and notes the calls."""

    def __init__(self, *steps: Step | Callable[[Any], Message]) -> None:
        self._steps = list(steps)
        self.calls: list[tuple[Method[Any, Any], Any]] = []

    def call(self, method: Method[Any, Any], request: Any, timeout_s: float) -> Message:
        assert timeout_s > 0
        self.calls.append((method, request))
        step = self._steps.pop(0)
        if isinstance(step, KvError):
            raise step
        return cast("Message", step(request) if callable(step) else step)

    def stream(self, method: Method[Any, Any], request: Any, timeout_s: float) -> Generator[Message, None, None]:
        self.calls.append((method, request))
        for page in cast("Sequence[Message | KvError]", self._steps.pop(0)):
            if isinstance(page, KvError):
                raise page
            yield page

    @property
    def requests(self) -> list[Any]:
        return [request for _, request in self.calls]


class AsyncScript:
    def __init__(self, script: Script) -> None:
        self._script = script

    async def call(self, method: Method[Any, Any], request: Any, timeout_s: float) -> Message:
        return self._script.call(method, request, timeout_s)

    async def stream(self, method: Method[Any, Any], request: Any, timeout_s: float) -> AsyncGenerator[Message, None]:
        for page in self._script.stream(method, request, timeout_s):
            yield page


class Blocking:
    """An `AsyncMeta` whose calls are run to their end."""

    def __init__(self, meta: AsyncMeta) -> None:
        self._meta = meta

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: asyncio.run(getattr(self._meta, name)(*args, **kwargs))

    def list(self, *args: Any, **kwargs: Any) -> list[Any]:
        async def collect() -> Any:
            return [row async for row in self._meta.list(*args, **kwargs)]

        return cast("list[Any]", asyncio.run(collect()))


@pytest.fixture(params=["async", "sync"])
def meta_of(request: pytest.FixtureRequest) -> Callable[[Script], Any]:
    if request.param == "sync":
        return lambda script: Meta(cast("Failover", script), SESSION)
    return lambda script: Blocking(AsyncMeta(cast("AsyncFailover", AsyncScript(script)), SESSION))


MetaOf = Callable[[Script], Any]


def looked_up(*rows: Entry | KvError) -> m.LookupReply:
    return m.LookupReply(entries=entries.encode(rows))


def removed(*errors: KvError | None) -> m.RemoveReply:
    return m.RemoveReply(errors=[error_to_pb(e) for e in errors])


def renamed(*errors: KvError | None) -> m.RenameReply:
    return m.RenameReply(errors=[error_to_pb(e) for e in errors])


def page(*names: str) -> m.ListPage:
    return m.ListPage(names=names, entries=entries.encode([FILE] * len(names)))


# ---- lookups ----


def test_rows_stand_in_the_order_of_their_paths(meta_of: MetaOf) -> None:
    script = Script(looked_up(FILE, NotFound("no_name")))
    first, second = meta_of(script).lookup(["a", "b"], base=3)
    assert first == FILE
    assert isinstance(second, NotFound)
    assert script.requests == [m.LookupRequest(base=3, paths=["a", "b"])]


def test_many_paths_go_in_several_messages(meta_of: MetaOf) -> None:
    script = Script(*[lambda request: looked_up(*[FILE] * len(request.paths))] * 2)
    rows = meta_of(script).lookup([f"p{i}" for i in range(MAX_BATCH + 1)])
    assert len(rows) == MAX_BATCH + 1
    assert [len(request.paths) for request in script.requests] == [MAX_BATCH, 1]


def test_long_paths_go_in_messages_that_fit(meta_of: MetaOf) -> None:
    paths = ["\U0001f600" * 1000 + f"/{i}" for i in range(4096)]
    script = Script(*[lambda request: looked_up(*[FILE] * len(request.paths))] * 10)
    assert len(meta_of(script).lookup(paths)) == 4096
    assert [path for request in script.requests for path in request.paths] == paths
    assert all(request.ByteSize() < MAX_MESSAGE_BYTES for request in script.requests)


def test_a_reply_of_another_length_is_malformed(meta_of: MetaOf) -> None:
    with pytest.raises(KvError, match="malformed"):
        meta_of(Script(looked_up(FILE))).lookup(["a", "b"])


def test_nothing_is_asked_for_nothing(meta_of: MetaOf) -> None:
    assert meta_of(Script()).lookup([]) == []


# ---- publishes ----


def test_a_publish_tells_everything(meta_of: MetaOf) -> None:
    reply = m.PublishReply(
        results=[
            m.TransactionResult(created=[True], entries=entries.encode([FILE])),
            m.TransactionResult(error=error_to_pb(Stale("fence"))),
        ]
    )
    script = Script(
        reply, m.PublishReply(results=[m.TransactionResult(created=[False], entries=entries.encode([FILE]))])
    )
    meta = meta_of(script)
    name = msg.PublishName("a", ADDRESS, 4, 0o600, 10, 20, 30, True)
    empty = msg.Publication([msg.PublishName("e")], msg.PublishMode.IF_ABSENT, parents=True)
    good, bad = meta.publish([msg.Publication([name], msg.PublishMode.IF_PRESENT), empty], base=2)
    assert good == msg.PublishResult([FILE], [True])
    assert isinstance(bad, Stale)
    meta.publish([empty])
    first, second = script.requests[0].transactions
    assert (script.requests[0].base, first.session, first.number, second.number) == (2, SESSION, 1, 2)
    assert (first.mode, first.parents, second.mode, second.parents) == (m.IF_PRESENT, False, m.IF_ABSENT, True)
    (sent,) = first.names
    assert entries.address_from_pb(sent.address) == ADDRESS
    assert (sent.path, sent.volume, sent.mode, sent.uid, sent.gid, sent.mtime_ns) == ("a", 4, 0o600, 10, 20, 30)
    assert sent.keep_attributes
    assert not second.names[0].HasField("address")
    assert script.requests[1].transactions[0].number == 3


# ---- removes and renames (rule 21) ----


def test_a_remove_that_names_its_inode_is_repeated_and_already_gone_is_success_then(meta_of: MetaOf) -> None:
    script = Script(Unavailable("lost"), removed(NotFound("gone"), None))
    names = [msg.RemoveName("a", inode=5), msg.RemoveName("b", inode=6)]
    assert meta_of(script).remove(names) == [None, None]
    assert len(script.calls) == 2
    assert script.requests[0] == script.requests[1]


def test_already_gone_is_an_error_at_the_first_attempt(meta_of: MetaOf) -> None:
    (error,) = meta_of(Script(removed(NotFound("gone")))).remove([msg.RemoveName("a", inode=5)])
    assert isinstance(error, NotFound)


def test_a_remove_without_an_inode_is_not_repeated(meta_of: MetaOf) -> None:
    script = Script(Unavailable("lost"))
    with pytest.raises(Unavailable):
        meta_of(script).remove([msg.RemoveName("a", inode=5), msg.RemoveName("b")])
    assert len(script.calls) == 1


@pytest.mark.parametrize("error", [Timeout("slow"), Overloaded("the link gave up"), Stale("base")])
def test_only_a_lost_call_is_repeated(meta_of: MetaOf, error: KvError) -> None:
    script = Script(error)
    with pytest.raises(type(error)):
        meta_of(script).remove([msg.RemoveName("a", inode=5)])
    assert len(script.calls) == 1


def test_repeating_ends_at_the_deadline(meta_of: MetaOf) -> None:
    script = Script(*[Unavailable("lost")] * 100)
    with pytest.raises((Unavailable, Timeout)):
        meta_of(script).remove([msg.RemoveName("a", inode=5)], timeout_s=0.1)
    assert 1 < len(script.calls) < 20


def test_a_repeated_rename_that_finds_its_work_done_is_success(meta_of: MetaOf) -> None:
    script = Script(Unavailable("lost"), renamed(NotFound("gone")), looked_up(FILE))
    name = msg.RenameName(1, "a", 2, "b", inode=FILE.inode)
    assert meta_of(script).rename([name]) == [None]
    assert script.requests[2] == m.LookupRequest(base=2, paths=["b"])


def test_a_repeated_rename_that_finds_another_file_is_an_error(meta_of: MetaOf) -> None:
    script = Script(Unavailable("lost"), renamed(NotFound("gone")), looked_up(FILE._replace(inode=99)))
    (error,) = meta_of(script).rename([msg.RenameName(1, "a", 2, "b", inode=5)])
    assert isinstance(error, NotFound)


def test_a_rename_at_the_first_attempt_believes_the_master(meta_of: MetaOf) -> None:
    script = Script(renamed(NotFound("gone")))
    (error,) = meta_of(script).rename([msg.RenameName(1, "a", 2, "b", True, 5)])
    assert isinstance(error, NotFound)
    (sent,) = script.requests[0].names
    assert (sent.from_base, sent.from_path, sent.to_base, sent.to_path) == (1, "a", 2, "b")
    assert (sent.no_replace, sent.inode) == (True, 5)


def test_mkdir_may_be_repeated_only_with_parents(meta_of: MetaOf) -> None:
    script = Script(*[m.MkdirReply(entries=entries.encode([FILE]))] * 2)
    meta = meta_of(script)
    meta.mkdir(["a"], parents=True)
    meta.mkdir(["a"])
    assert [method.idempotent for method, _ in script.calls] == [True, False]


# ---- listings ----


def test_a_listing_that_breaks_goes_on_behind_its_last_name(meta_of: MetaOf) -> None:
    script = Script([page("a", "b"), Unavailable("lost")], [Unavailable("not back yet")], [page("c"), page("d")])
    names = [name for name, _ in meta_of(script).list("d", base=3, limit=9)]
    assert names == ["a", "b", "c", "d"]
    assert [(r.after, r.limit) for r in script.requests] == [("", 9), ("b", 7), ("b", 7)]


def test_a_listing_that_breaks_at_its_limit_is_done(meta_of: MetaOf) -> None:
    script = Script([page("a", "b"), Timeout("slow consumer")])
    assert [name for name, _ in meta_of(script).list(limit=2)] == ["a", "b"]
    assert len(script.calls) == 1


def test_a_listing_that_brings_nothing_ends_at_its_deadline(meta_of: MetaOf) -> None:
    script = Script(*[[Unavailable("no master")]] * 100)
    with pytest.raises((Unavailable, Timeout)):
        list(meta_of(script).list(timeout_s=0.1))
    assert len(script.calls) > 1


def test_a_listing_of_a_base_that_is_gone_is_stale(meta_of: MetaOf) -> None:
    script = Script([page("a"), Stale("base")])
    with pytest.raises(Stale):
        list(meta_of(script).list())


# ---- the others ----


def test_set_attr_sends_only_what_changes(meta_of: MetaOf) -> None:
    script = Script(m.SetAttrReply(entries=entries.encode([FILE])))
    assert meta_of(script).set_attr("a", base=2, uid=0) == FILE
    (request,) = script.requests
    assert request.HasField("uid")
    assert not any(request.HasField(name) for name in ("mode", "gid", "mtime_ns"))


def test_set_attr_of_what_is_not_there(meta_of: MetaOf) -> None:
    script = Script(m.SetAttrReply(entries=entries.encode([NotFound("no_name")])))
    with pytest.raises(NotFound):
        meta_of(script).set_attr("a", mode=0o600)


def test_events(meta_of: MetaOf) -> None:
    event = m.Event(sequence=4, time_ns=5, kind="publish", path="a", inode=6, address=entries.address_to_pb(ADDRESS))
    script = Script(m.EventsReply(events=[event, m.Event(sequence=5, kind="remove", path="a")]))
    first, second = meta_of(script).events(3, limit=2)
    assert first == msg.Event(4, 5, "publish", "a", "", 6, ADDRESS)
    assert second.address is None
    assert script.requests == [m.EventsRequest(after=3, limit=2)]


def test_the_cluster_map(meta_of: MetaOf) -> None:
    from kvstore.pb import common_pb2 as c

    node = m.Node(
        id="n",
        endpoint="n:1",
        live=True,
        heartbeat_age_s=-1,
        volumes=[c.Volume(id=1, tier="ssd", capacity_bytes=10, used_bytes=4, free_bytes=6)],
        counters=m.Counters(hits=1, corruptions=2),
        blocks=3,
    )
    node.tiers.add(tier="ssd", hits=1, unlinked=[m.Unlinked(reason="ttl", files=2, bytes=3)])
    reply = m.ClusterMapReply(cluster="c", sequence=1, nodes=[node], files=2, directories=3, max_block_bytes=4)
    reply.lookups_found, reply.lookups_not_found = 5, 6
    cluster = meta_of(Script(reply)).cluster_map()
    assert (cluster.cluster, cluster.files, cluster.directories, cluster.max_block_bytes) == ("c", 2, 3, 4)
    assert (cluster.lookups_found, cluster.lookups_not_found) == (5, 6)
    assert cluster.nodes[0].free_bytes == 6
    assert cluster.nodes[0].counters == WorkerCounters(1, 0, 0, 0, 0, 0, 0, 2)
    assert cluster.nodes[0].tiers == (TierCounters("ssd", hits=1, unlinked=(Unlinked("ttl", 2, 3),)),)


def test_statfs(meta_of: MetaOf) -> None:
    reply = m.StatfsReply(capacity_bytes=1, used_bytes=2, free_bytes=3, files=4, directories=5, max_block_bytes=6)
    assert meta_of(Script(reply)).statfs("a") == msg.Statfs(1, 2, 3, 4, 5, 6)
