"""Tiers of real workers: what is used rises to memory, nothing is lost on the way, no cap is passed."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client, NotFound
from tests.support.cluster import Cluster, Worker, wait_until

MIB = 1 << 20
MEMORY, DISK = 16 * MIB, 64 * MIB


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, workers=2, capacity="64MiB", memory="16MiB") as cluster:
        yield cluster


def client_of(cluster: Cluster, worker: Worker) -> Client:
    return Client(cluster.url, worker_socket=worker.socket, metadata_ttl_s=0.0)


def tiers_of(client: Client, path: str) -> set[str]:
    return {replica.tier for replica in client.stat(path).replicas}


def content(key: int, version: int = 0) -> bytes:
    return random.Random(key * 1000 + version).randbytes(MIB)


def used(worker: Worker) -> dict[str, int]:
    """Bytes of all its files, by tier."""
    tiers = {"mem": worker.memory, "ssd": worker.volume}
    return {tier: sum(size_of(p) for p in root.rglob("*") if p.parent != root) for tier, root in tiers.items()}


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def test_what_is_used_rises_and_the_master_knows_where_it_is(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    with client_of(cluster, worker) as client:
        for key in range(8):
            client.put(f"k/{key}", content(key))
        assert tiers_of(client, "k/1") == {"ssd"}, "clients stage on disk"
        for _ in range(2):
            assert client.get("k/1") == content(1)
        wait_until(lambda: tiers_of(client, "k/1") == {"mem"}, "the master knows that it rose")
        assert client.get("k/1") == content(1)
        node = next(n for n in client.cluster_map().nodes if n.id == worker.node)
        wait_until(
            lambda: next(n for n in client.cluster_map().nodes if n.id == worker.node).counters.promotions >= 1,
            "its heartbeat counts it",
        )
        assert {volume.tier for volume in node.volumes} == {"mem", "ssd"}


def test_a_killed_worker_comes_back_with_each_block_once(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    with client_of(cluster, worker) as client:
        for key in range(24):
            client.put(f"k/{key}", content(key))
        for key in range(24):  # moves are under way when it dies
            client.get(f"k/{key}")
        worker.kill()
        worker.start()
        cluster.wait_live(*(w.node for w in cluster.workers))
        for key in range(24):
            wait_until(lambda key=key: client.exists(f"k/{key}"), f"k/{key} is there again")  # type: ignore[misc]
            assert client.get(f"k/{key}") == content(key)
        names = [p.name for root in (worker.memory, worker.volume) for p in root.glob("blocks/*/*")]
        assert len(names) == len(set(names)), "no block lies in two tiers"


def test_more_than_fits_is_a_miss_and_never_an_error(cluster: Cluster) -> None:
    """Two nodes at once, four times the memory and twice the whole: every read is right or a miss, no cap is passed."""
    keys, stop, failures = 150, threading.Event(), list[BaseException]()
    hits, misses = [0], [0]

    def work(worker: Worker, seed: int) -> None:
        chance = random.Random(seed)
        try:
            with client_of(cluster, worker) as client:
                while not stop.is_set():
                    key = min(int(chance.paretovariate(0.8)) - 1, keys - 1)
                    try:
                        assert client.get(f"w/{key}") == content(key)
                        hits[0] += 1
                    except NotFound:
                        misses[0] += 1
                        client.put(f"w/{key}", content(key))
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)

    with client_of(cluster, cluster.workers[0]) as client:
        client.mkdir("w")
    threads = [threading.Thread(target=work, args=(worker, i)) for i, worker in enumerate(cluster.workers * 2)]
    for thread in threads:
        thread.start()
    over: list[str] = []
    for _ in range(60):
        for worker in cluster.workers:
            now = used(worker)
            # A file that is renamed while this counts may be seen twice: two of them.
            if now["mem"] > MEMORY + 2 * MIB or now["ssd"] > DISK + 2 * MIB:
                over.append(f"{worker.node}: {now}")
        stop.wait(0.1)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert over == []
    assert hits[0] > misses[0] > 0
    counters = [n.counters for n in cluster.map().nodes]
    assert sum(c.promotions for c in counters) > 0
    assert os.path.isdir(cluster.workers[0].memory)
