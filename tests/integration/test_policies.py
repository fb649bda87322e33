"""Quota, TTL and pin with real processes: said by a client, judged by the workers, kept over restarts."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client, NoSpace, NotFound, OtherPolicy
from kvstore.core.told import TierCounters
from tests.support.cluster import Cluster, wait_until

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("store"), workers=2, capacity="64MiB") as cluster:
        yield cluster


@pytest.fixture
def clients(cluster: Cluster) -> Iterator[list[Client]]:
    """One on each node."""
    made = [Client(cluster.url, worker_socket=worker.socket, metadata_ttl_s=0.0) for worker in cluster.workers]
    yield made
    for client in made:
        client.close()


def content(key: object, size: int = MIB) -> bytes:
    return random.Random(f"{key}").randbytes(size)


def left(client: Client, directory: str) -> set[str]:
    return {name for name, _ in client.list(directory)}


def unlinked(cluster: Cluster, reason: str) -> int:
    tiers = [tier for node in cluster.map().nodes for tier in node.tiers]
    return sum(u.files for tier in tiers for u in tier.unlinked if u.reason == reason)


def used_bytes(client: Client, path: str) -> int:
    return client.policies(path).policies[0].used_bytes


def put_when_there_is_room(client: Client, path: str, data: bytes) -> None:
    """As a cache does: what is refused is tried again later."""
    end = time.monotonic() + 20
    while True:
        try:
            client.put(path, data)
            return
        except NoSpace:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_directory_over_its_quota_gives_up_its_own_coldest_blocks(cluster: Cluster, clients: list[Client]) -> None:
    a, b = clients
    for name in ("q/tenant", "q/other"):
        a.mkdir(name, parents=True)
    a.set_policy("q/tenant", quota_bytes=8 * MIB)
    for key in range(6):
        b.put(f"q/other/{key}", content(key))
    for key in range(4):
        a.put(f"q/tenant/hot{key}", content(("hot", key)))
    for key in range(30):
        for hot in range(4):
            assert a.get(f"q/tenant/hot{hot}") == content(("hot", hot))
        put_when_there_is_room(clients[key % 2], f"q/tenant/{key}", content(("tenant", key)))
        assert used_bytes(a, "q/tenant") <= 8.8 * MIB, "110 % are never passed"
    wait_until(lambda: used_bytes(a, "q/tenant") <= 8 * MIB, "it comes down to its quota")
    assert len(left(a, "q/other")) == 6, "nobody else paid for it"
    assert {f"hot{key}" for key in range(4)} <= left(a, "q/tenant"), "what is used stays"
    wait_until(lambda: unlinked(cluster, "quota") >= 24, "the workers count why")
    assert a.statfs("q/tenant").capacity_bytes == 8 * MIB
    assert a.statfs("q").capacity_bytes > 64 * MIB


def test_far_above_the_quota_a_put_is_refused_and_nothing_is_left_of_it(clients: list[Client]) -> None:
    a, _ = clients
    a.mkdir("full")
    a.set_policy("full", quota_bytes=MIB)
    with pytest.raises(NoSpace, match="/full has a quota"):
        a.put("full/x", content("x", 2 * MIB))
    assert left(a, "full") == set()
    assert used_bytes(a, "full") == 0
    a.set_policy("full", quota_bytes=0)
    a.put("full/x", content("x", 2 * MIB))


def test_unused_blocks_go_after_their_ttl_and_used_ones_stay(cluster: Cluster, clients: list[Client]) -> None:
    a, b = clients
    a.mkdir("ttl")
    a.set_policy("ttl", ttl_s=5.0)
    before = unlinked(cluster, "ttl")
    for name in ("used", "read-elsewhere", "idle", "only-asked-for"):
        a.put(f"ttl/{name}", content(name))
    end = time.monotonic() + 10
    while time.monotonic() < end:
        assert a.get("ttl/used") == content("used")
        assert b.get("ttl/read-elsewhere") == content("read-elsewhere")
        a.exists("ttl/only-asked-for")
        list(a.list("ttl"))
        time.sleep(0.3)
    wait_until(lambda: left(a, "ttl") == {"used", "read-elsewhere"}, "probes are no use of a block")
    wait_until(lambda: unlinked(cluster, "ttl") >= before + 2, "counted by its reason")
    wait_until(lambda: left(a, "ttl") == set(), "all of it, once nobody reads")
    with pytest.raises(NotFound):
        a.get("ttl/used")


def test_what_is_pinned_outlives_everything_else(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=1, capacity="32MiB") as cluster:
        (worker,) = cluster.workers
        with Client(cluster.url, worker_socket=worker.socket, metadata_ttl_s=0.0) as client:
            for key in range(4):
                client.put(f"prompts/{key}", content(("pin", key)))
            client.put("single", content("single"))
            client.set_policy("prompts", pinned=True)
            client.set_policy("single", pinned=True)
            entry = client.stat("prompts/0")
            wait_until(lambda: all(d.pinned for d in client.describe(entry)), "the worker knows")
            push_through(client, 80)
            for _ in range(2):  # the master forgets nothing, nor does the worker
                cluster.master.restart()
                worker.restart()
                cluster.wait_live(worker.node)
                wait_until(lambda: client.exists("single"), "it is back")
                push_through(client, 80)
            for key in range(4):
                assert client.get(f"prompts/{key}") == content(("pin", key))
            assert client.get("single") == content("single")
            client.set_policy("prompts", pinned=False)
            wait_until(lambda: not any(d.pinned for d in client.describe(entry)), "it is over")
            end = time.monotonic() + 60
            while left(client, "prompts"):
                push_through(client, 16)
                assert time.monotonic() < end, "what is not pinned any more gets cold and goes"
            assert client.exists("single")


def push_through(client: Client, count: int) -> None:
    """More than the worker holds, each with contents never seen before."""
    for _ in range(count):
        client.put(f"noise/{os.urandom(4).hex()}", os.urandom(MIB))


def test_pins_have_a_bounded_share(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=1, capacity="32MiB") as cluster:
        (worker,) = cluster.workers
        with Client(cluster.url, worker_socket=worker.socket, metadata_ttl_s=0.0) as client:
            client.mkdir("all")
            client.set_policy("all", pinned=True)
            for key in range(60):
                put_when_there_is_room(client, f"all/{key}", content(key))
            client.put("elsewhere", content("elsewhere"))
            tiers = {t.tier: t for node in cluster.map().nodes for t in node.tiers}
            assert 0 < tiers["ssd"].pinned_bytes <= 16 * MIB
            wait_until(lambda: pin_of(cluster).unpinned_bytes > 0, "the pins without effect are told")


def pin_of(cluster: Cluster) -> TierCounters:
    return next(tier for node in cluster.map().nodes for tier in node.tiers if tier.tier == "ssd")


def test_a_directory_does_not_move_across_policies_and_a_file_does(clients: list[Client]) -> None:
    a, _ = clients
    a.put("from/d/x", content("move"))
    a.mkdir("to")
    a.set_policy("to", quota_bytes=8 * MIB)
    with pytest.raises(OtherPolicy):
        a.rename("from/d", "to/d")
    a.rename("from/d/x", "to/x")
    assert a.get("to/x") == content("move")
    assert used_bytes(a, "to") == MIB


def test_policies_and_their_books_survive_the_master(cluster: Cluster, clients: list[Client]) -> None:
    a, _ = clients
    a.put("kept/a/x", content("kept"))
    a.set_policy("kept", quota_bytes=10 * MIB, ttl_s=3600.0)
    a.set_policy("kept/a", pinned=True)
    wait_until(lambda: not any(p.counting for p in a.all_policies()), "what lay there is counted")
    before = a.all_policies()
    cluster.master.restart()
    wait_until(lambda: a.exists("kept/a/x"), "the workers are back")
    after = a.all_policies()
    assert [p for p in after if p.path.startswith("/kept")] == [p for p in before if p.path.startswith("/kept")]
    holding = a.policies("kept/a/x")
    assert (holding.pin is not None, holding.ttl is not None, [q.used_bytes for q in holding.quotas]) == (
        True,
        True,
        [MIB],
    )
