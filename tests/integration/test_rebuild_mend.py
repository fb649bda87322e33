"""Damage in what the master's log had last: the names that it had acknowledged come back by themselves. Real
processes."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client, Unavailable
from kvstore.core.errors import KvError
from kvstore.master.main import DATABASE_DIRECTORY
from kvstore.master.storage import logformat, mark
from kvstore.worker.reports import note as notes
from tests.integration.test_rebuild import (
    _copies,
    _path,
    _shorten_grace,
    blocks_of,
    check_all,
    client_of,
    data_of,
    lines,
    notice,
    put_all,
    start_master,
    values,
    wait_complete,
    wait_noted,
)
from tests.support import damage
from tests.support.cluster import Cluster, wait_until


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, workers=1) as cluster:
        yield cluster


def damage_from(cluster: Cluster, name: str) -> None:
    """Other bits in all that the log has from the record on that brought this name; what said how far it was synced is
    gone, as after a power cut."""
    database = data_of(cluster) / DATABASE_DIRECTORY
    (database / mark.NAME).unlink()
    log = damage.logs(database)[-1]
    data = log.read_bytes()
    at = data.index(name.encode())
    begin = max(record.end for record in logformat.records(data, len(data)) if record.end <= at)
    damage.overwrite(log, begin, bytes(byte ^ 0xFF for byte in data[begin:]))


def ready(cluster: Cluster) -> tuple[int, str]:
    """(status, text) of the master's /readyz."""
    try:
        with urllib.request.urlopen(f"http://{cluster.master.facts['HTTP']}/readyz", timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_what_the_damage_took_comes_back_and_what_nothing_names_goes(cluster: Cluster) -> None:
    """Until then clients read what is there, and change nothing."""
    [worker] = cluster.workers
    with client_of(cluster, worker) as client:
        put_all(client, kept := values("before", 5))
        wait_noted(cluster, *kept)
        client.put("lost and noted", noted := os.urandom(9000))
        client.put("lost and bare", bare := os.urandom(8000))
        wait_noted(cluster, "lost and noted", "lost and bare")
    cluster.master.kill()
    worker.stop()
    _shorten_grace(cluster)
    os.removexattr(_copies(worker, bare)[0], notes.ATTRIBUTE)
    damage_from(cluster, "lost and noted")

    start_master(cluster, "--http", "127.0.0.1:0")
    assert lines(cluster.master, "were damaged and are cut off"), cluster.master.log_tail()
    with Client(cluster.url, metadata_ttl_s=0.0, timeout_s=1) as client:
        assert client.stat("before/0").address is not None, "readers go on"
        with pytest.raises(Unavailable, match="takes back what its log has lost"):
            client.mkdir("changes wait")
    status, why = ready(cluster)
    assert (status, "takes back what its log has lost" in why, worker.node in why) == (503, True, True)
    worker.start()
    wait_complete(cluster)
    assert ready(cluster)[0] == 200
    assert "1 blocks (7.81 KiB) have no name: they go" in notice(cluster)
    assert "--discard" not in notice(cluster)
    check_all(cluster, kept | {"lost and noted": noted})
    wait_until(lambda: not _copies(worker, bare), "nobody can tell what it was", timeout_s=40)
    check_all(cluster, kept | {"lost and noted": noted})


def test_a_put_that_was_under_way_leaves_nothing_for_an_operator(cluster: Cluster) -> None:
    [worker] = cluster.workers
    with client_of(cluster, worker) as client:
        put_all(client, kept := values("before", 5))
        client.put("lost", lost := os.urandom(9000))
        wait_noted(cluster, *kept, "lost")
        cluster.master.kill()
        with pytest.raises(KvError):
            client.put("in flight", in_flight := os.urandom(7000), timeout_s=0.5)
        damage_from(cluster, "lost")
        cluster.master.start()
        wait_complete(cluster)
        wait_until(lambda: "nothing is collected" not in notice(cluster), "the worker is collected from again")
        assert "--discard" not in notice(cluster)
        wait_until(lambda: not _copies(worker, in_flight), "its bytes go", timeout_s=40)
        client.put("in flight", in_flight)
    check_all(cluster, kept | {"lost": lost, "in flight": in_flight})


def test_a_mend_is_over_by_itself(cluster: Cluster) -> None:
    """The worker lives through it, and is collected from afterwards."""
    [worker] = cluster.workers
    with client_of(cluster, worker) as client:
        put_all(client, kept := values("before", 5))
        put_all(client, lost := values("lost", 5))
        wait_noted(cluster, *kept, *lost)
    cluster.master.kill()
    damage_from(cluster, "lost")
    cluster.master.start()
    wait_complete(cluster)
    check_all(cluster, kept | lost)
    assert "--discard" not in notice(cluster)
    with client_of(cluster, worker) as client:
        client.remove("lost/0")
        put_all(client, new := values("new", 3))
    del lost["lost/0"]
    wait_noted(cluster, *new)
    wait_until(lambda: {_path(p) for p in blocks_of(worker)} == {*kept, *lost, *new}, "it is collected again")
    cluster.master.restart()
    cluster.wait_live(worker.node)
    assert notice(cluster) == ""
    check_all(cluster, kept | lost | new)
