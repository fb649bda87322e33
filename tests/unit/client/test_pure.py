"""The deciding parts of the SDK: addresses, deadlines, the metadata cache, breakers, the choice of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import url
from kvstore.client.cache import MetadataCache
from kvstore.client.cluster import candidates, in_order, pick
from kvstore.client.deadline import Deadline, seconds
from kvstore.client.elsewhere import DISTRUST_S, LocalWrites, is_elsewhere
from kvstore.client.lost import LostNames
from kvstore.client.messages import ClusterMap, Node
from kvstore.core.errors import Corrupt, Denied, InvalidRequest, KvError, NoSpace, NotFound, Timeout, Unavailable
from kvstore.core.limits import MAX_TIMEOUT_S
from kvstore.core.told import VolumeState, WorkerCounters
from kvstore.core.types import Entry, Replica
from kvstore.rpc.breaker import blames


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def entry(inode: int) -> Entry:
    return Entry(inode, 0o100644, 0, 0, 0, 0, 0, None)


# ---- addresses ----


@pytest.mark.parametrize(
    ("text", "endpoints", "root"),
    [
        ("kvstore://h", ("h:7070",), ""),
        ("kvstore://h:1/", ("h:1",), ""),
        ("kvstore://a:1,b:2, c", ("a:1", "b:2", "c:7070"), ""),
        ("kvstore://[::1]:9/x//y/", ("[::1]:9",), "x/y"),
        ("kvstore://[::1]", ("[::1]:7070",), ""),
    ],
)
def test_urls(text: str, endpoints: tuple[str, ...], root: str) -> None:
    assert url.parse(text) == url.Target(endpoints, root)


@pytest.mark.parametrize(
    "text", ["", "h:1", "http://h:1", "kvstore://", "kvstore://h:", "kvstore://h:x", "kvstore://h:0", "kvstore://h:65536",
             "kvstore://a,,b", "kvstore://::1:7", "kvstore://h/../x"],
)  # fmt: skip
def test_wrong_urls(text: str) -> None:
    with pytest.raises(InvalidRequest):
        url.parse(text)


def test_paths_begin_at_the_root() -> None:
    target = url.parse("kvstore://h/r/s")
    assert target.path("/a/b/") == "r/s/a/b"
    assert target.path("") == "r/s"
    with pytest.raises(InvalidRequest):
        target.path("../../etc")


# ---- deadlines ----


def test_a_deadline_that_passed_is_a_timeout() -> None:
    deadline = Deadline(0)
    assert deadline.passed
    with pytest.raises(Timeout, match="0 s"):
        deadline.check()


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e12, 10**400, MAX_TIMEOUT_S + 1])
def test_a_timeout_beyond_the_limit_is_cut_to_it(timeout_s: float) -> None:
    assert seconds(timeout_s) == MAX_TIMEOUT_S
    assert Deadline(timeout_s).left_s <= MAX_TIMEOUT_S


@pytest.mark.parametrize("timeout_s", [float("nan"), -1, -0.001, float("-inf"), "5", None, [1], b"1"])
def test_what_is_no_timeout_is_refused(timeout_s: Any) -> None:
    with pytest.raises(InvalidRequest, match="seconds"):
        seconds(timeout_s)
    with pytest.raises(InvalidRequest):
        Deadline(timeout_s)


def test_only_a_default_may_be_extended() -> None:
    given, default = Deadline.of(0, 5), Deadline.of(None, 5)
    given.allow(100)
    default.allow(100)
    assert given.passed
    assert 100 < default.left_s < 105
    assert default.at_most(2) == 2


# ---- the metadata cache ----


def test_an_entry_is_believed_until_its_ttl_counted_from_the_asking() -> None:
    clock = Clock()
    cache = MetadataCache(1.0, clock=clock)
    token = cache.token()
    clock.now_s += 0.6  # the lookup took that long
    cache.put(token, "a", entry(5))
    clock.now_s += 0.39
    assert cache.get("a") == entry(5)
    clock.now_s += 0.01
    assert cache.get("a") is None
    assert len(cache) == 0


def test_without_a_ttl_nothing_is_believed() -> None:
    cache = MetadataCache(0.0, clock=Clock())
    cache.put(cache.token(), "a", entry(5))
    assert cache.get("a") is None


def test_the_least_recently_used_goes_first() -> None:
    cache = MetadataCache(1.0, max_entries=2, clock=Clock())
    for name in ("a", "b"):
        cache.put(cache.token(), name, entry(1))
    assert cache.get("a")
    cache.put(cache.token(), "c", entry(1))
    assert [cache.get(n) is not None for n in "abc"] == [True, False, True]


def test_a_lookup_that_was_under_way_during_an_own_change_is_not_believed() -> None:
    cache = MetadataCache(1.0, clock=Clock())
    before = cache.token()
    cache.changed("d/a")
    cache.put(before, "d/a", entry(1))
    cache.put(before, "d/b", entry(2))
    assert cache.get("d/a") is None
    assert cache.get("d/b") == entry(2)
    cache.put(cache.token(), "d/a", entry(3))
    assert cache.get("d/a") == entry(3)


def test_a_change_of_a_directory_changes_all_below() -> None:
    cache = MetadataCache(1.0, clock=Clock())
    before = cache.token()
    for name in ("d", "d/a", "d/b/c", "dx"):
        cache.put(before, name, entry(1))
    cache.changed("d", tree=True)
    assert [cache.get(n) is not None for n in ("d", "d/a", "d/b/c", "dx")] == [False, False, False, True]
    cache.put(before, "d/b/c", entry(1))
    assert cache.get("d/b/c") is None


def test_changes_beyond_the_bound_refuse_all_older_lookups() -> None:
    cache = MetadataCache(1.0, max_changes=2, clock=Clock())
    before = cache.token()
    for name in ("a", "b", "c"):
        cache.changed(name)
    cache.put(before, "a", entry(1))
    assert cache.get("a") is None, "its change is no longer remembered by name"
    cache.put(cache.token(), "a", entry(1))
    assert cache.get("a")


@given(st.lists(st.tuples(st.sampled_from(["token", "put", "change", "tree"]), st.sampled_from(["a", "a/b", "c"]))))
def test_the_cache_never_holds_what_an_own_change_made_old(steps: Sequence[tuple[str, str]]) -> None:
    """The model: a version per path, raised by a change of the path or of a directory above it."""
    cache, version = MetadataCache(1.0, max_changes=2, clock=Clock()), {"a": 0, "a/b": 0, "c": 0}
    token, seen = cache.token(), dict(version)
    for step, name in steps:
        if step == "token":
            token, seen = cache.token(), dict(version)
        elif step == "put":
            cache.put(token, name, entry(seen[name]))
        else:
            cache.changed(name, tree=step == "tree")
            for path in version:
                if path == name or (step == "tree" and path.startswith(name + "/")):
                    version[path] += 1
        for path, now in version.items():
            believed = cache.get(path)
            assert believed is None or believed.inode == now


# ---- names that could not be read ----


def test_a_name_is_lost_for_a_while() -> None:
    clock = Clock()
    lost = LostNames(60.0, clock=clock)
    lost.failed("a", Corrupt("bad"))
    clock.now_s += 59.9
    assert "a" in lost
    clock.now_s += 0.1
    assert "a" not in lost


def test_only_what_says_something_of_the_block_counts() -> None:
    lost = LostNames(clock=Clock())
    lost.failed("own time", Timeout("not done within 0 s"))
    lost.failed("denied", Denied("no"))
    lost.failed("hangs", Timeout("no answer", fault="w:1"))
    lost.looked_up(["there", "none", "dead"], [entry(1), NotFound("x"), NotFound("x", reason="no_replica")])
    assert [n for n in ("own time", "denied", "hangs", "there", "none", "dead") if n in lost] == ["hangs", "dead"]


def test_the_oldest_lost_name_goes_first_and_a_put_ends_it() -> None:
    lost = LostNames(max_names=2, clock=Clock())
    for name in ("a", "b", "a", "c"):
        lost.failed(name, Corrupt("bad"))
    assert [n in lost for n in "abc"] == [True, False, True]
    lost.forget("a")
    assert "a" not in lost
    assert len(lost) == 1


# ---- where new blocks go after a failure ----


def test_what_another_worker_may_do_better() -> None:
    assert all(map(is_elsewhere, [NotFound("staging"), Unavailable("disk"), NoSpace("full"), KvError("bug")]))
    assert not any(map(is_elsewhere, [InvalidRequest("length"), Denied("cluster")]))


@pytest.mark.parametrize(
    ("error", "works"),
    [
        (Unavailable("No such file"), False),
        (NotFound("no staging file"), False),
        (Corrupt("disk"), False),
        (Unavailable("closed the connection", fault="/s"), True),
        (Timeout("own time"), True),
        (NoSpace("full"), True),
        (InvalidRequest("length"), True),
    ],
)
def test_a_local_worker_whose_disk_fails_is_passed_over_for_a_while(error: KvError, works: bool) -> None:
    clock = Clock()
    writes = LocalWrites("/s", clock)
    with pytest.raises(type(error)), writes.watched():
        raise error
    assert writes.work is works
    clock.now_s += DISTRUST_S
    assert writes.work


# ---- breakers ----


def test_blame() -> None:
    assert blames(Unavailable("", fault="e"), "e")
    assert not blames(NotFound("", fault="e"), "e")
    assert not blames(ValueError(), "e")


# ---- the choice of workers ----


def node(name: str, *, free: int = 100, live: bool = True, draining: bool = False) -> Node:
    volume = VolumeState(1, "ssd", 1000, 1000 - free, free)
    return Node(name, f"{name}:1", "", live, 0.1, (volume,), WorkerCounters(0, 0, 0, 0, 0, 0, 0, 0), 0, draining, "1")


def cluster(*nodes: Node) -> ClusterMap:
    return ClusterMap("c", 1, nodes, 0, 0, "1", 1 << 30)


def works(_: str) -> bool:
    return True


def test_new_blocks_go_to_live_workers_that_stay() -> None:
    nodes = cluster(node("a", live=False), node("b", draining=True), node("c"))
    assert [c.node for c in candidates(nodes, works, set())] == ["c"]
    assert pick(nodes, works, 10, set()) == "c:1"


def test_workers_behind_an_open_breaker_come_last() -> None:
    nodes = cluster(node("a"), node("b"))
    assert pick(nodes, lambda e: e == "b:1", 10, set()) == "b:1"
    assert pick(nodes, lambda e: e == "b:1", 10, {"b:1"}) == "a:1"


def test_no_worker_is_left() -> None:
    with pytest.raises(Unavailable, match="no live worker"):
        pick(cluster(node("a")), works, 10, {"a:1"})


def replica(name: str, tier: str = "ssd", volume: int = 1) -> Replica:
    return Replica(volume, tier, name, f"{name}:1")


@given(st.integers(0, 2**64 - 1))
def test_replicas_that_work_come_first_then_fast_tiers(turn: int) -> None:
    replicas = [replica("a", "hdd"), replica("b", "mem"), replica("c", "ssd"), replica("dead", "mem")]
    order = in_order(replicas, lambda e: e != "dead:1", turn)
    assert [r.node for r in order] == ["b", "c", "a", "dead"]


def test_equal_replicas_take_turns_and_a_worker_is_asked_once() -> None:
    replicas = [replica("a"), replica("b"), replica("a", volume=2)]
    firsts = {in_order(replicas, works, turn)[0].node for turn in range(3)}
    assert firsts == {"a", "b"}
    assert all(sorted(r.node for r in in_order(replicas, works, turn)) == ["a", "b"] for turn in range(3))
    assert in_order([], works, 7) == []
