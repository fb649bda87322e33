"""Damage in what the master's log had last: what was acknowledged by it is not collected, and its names come back by
themselves. Real processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvstore.master.main import DATABASE_DIRECTORY
from kvstore.master.storage import mark, wal
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

LONG_PAST_THE_GRACE_S: Final = 3.0


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
    begin = max(record.end for record in wal._records(data, len(data)) if record.end <= at)
    damage.overwrite(log, begin, bytes(byte ^ 0xFF for byte in data[begin:]))


def test_what_the_damage_took_comes_back_and_nothing_of_it_is_collected(cluster: Cluster) -> None:
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

    cluster.master.start()
    assert lines(cluster.master, "were damaged and are cut off"), cluster.master.log_tail()
    with client_of(cluster) as client:
        client.mkdir("clients go on")
    worker.start()
    wait_complete(cluster)
    check_all(cluster, kept | {"lost and noted": noted})
    wait_until(lambda: "1 blocks" in notice(cluster), "the operator hears of the one without a name")
    assert "--discard" in notice(cluster)
    time.sleep(LONG_PAST_THE_GRACE_S)
    assert _copies(worker, bare)
    worker.restart()
    cluster.master.restart()
    cluster.wait_live(worker.node)
    assert "nothing is collected on 1 workers" in notice(cluster)
    time.sleep(LONG_PAST_THE_GRACE_S)
    assert _copies(worker, bare)

    cluster.master.stop()
    start_master(cluster, "--discard", "--rebuild-workers", "1")
    wait_complete(cluster)
    wait_until(lambda: not _copies(worker, bare), "now it goes", timeout_s=40)
    check_all(cluster, kept | {"lost and noted": noted})


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
