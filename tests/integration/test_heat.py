"""Heat by real processes: who asks whether a file is there does not keep it; who reads it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from tests.support.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, workers=2) as cluster:
        yield cluster


def heat(client: Client, path: str) -> float:
    (known,) = client.describe(client.stat(path))
    return known.heat


@pytest.mark.parametrize("is_local", [True, False], ids=["by the local worker", "over the network"])
def test_probes_do_not_renew_heat_and_reads_do(cluster: Cluster, is_local: bool) -> None:
    with Client(cluster.url, worker_socket=cluster.workers[0].socket, metadata_ttl_s=0.0) as writer:
        writer.put("d/v", b"data")
    socket = cluster.workers[0].socket if is_local else ""
    with Client(cluster.url, worker_socket=socket, metadata_ttl_s=0.0) as client:
        before = heat(client, "d/v")
        for _ in range(5):
            assert client.exists("d/v")
            assert list(client.exists_many(["d/v", "d/w"])) == [True, False]
            assert client.stat("d/v").length_bytes == 4
            assert [name for name, _ in client.list("d")] == ["v"]
        assert heat(client, "d/v") == before
        assert client.get("d/v") == b"data"
        assert heat(client, "d/v") > before
