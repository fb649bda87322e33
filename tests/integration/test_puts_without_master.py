"""Puts while the master is away: nobody could name what they store, so they store nothing, and what was stored when it
went does not stay.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.core.errors import KvError
from kvstore.rpc.breaker import NotAsked
from tests.support.blocking import BlockingClient, LoopThread
from tests.support.cluster import Cluster, wait_until

SIZE_BYTES = 1 << 20
KEPT = 8


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    with contextlib.ExitStack() as stack:
        if request.param == "sync":
            yield Client
            return
        loop = LoopThread()
        stack.callback(loop.close)
        yield functools.partial(BlockingClient, loop)


def refusal(client: Any) -> str:
    """Name of the error of one put; "" when it was stored."""
    try:
        client.put("new", os.urandom(SIZE_BYTES))
    except KvError as error:
        return type(error).__name__
    return ""


def test_they_fill_no_worker_and_push_nothing_out(tmp_path: Path, connect: Callable[..., Any]) -> None:
    with Cluster(tmp_path, workers=1, capacity="32MiB") as cluster:
        worker = cluster.workers[0]
        with connect(cluster.url, worker_socket=worker.socket) as client:
            for i in range(KEPT):
                client.put(f"{i}", os.urandom(SIZE_BYTES))
            cluster.master.kill()
            wait_until(lambda: refusal(client) == NotAsked.__name__, "the client knows that the master is away")
            before = len(worker.block_files)
            assert {refusal(client) for _ in range(40)} == {NotAsked.__name__}
            assert len(worker.block_files) == before
            cluster.master.start()
            wait_until(lambda: refusal(client) == "", "puts work again")
            cluster.wait_live(worker.node)
            assert [client.get(f"{i}") is not None for i in range(KEPT)] == [True] * KEPT


def test_who_would_rather_wait_is_stored_when_it_is_back(tmp_path: Path, connect: Callable[..., Any]) -> None:
    with (
        Cluster(tmp_path, workers=1) as cluster,
        connect(cluster.url, worker_socket=cluster.workers[0].socket) as client,
    ):
        client.put("before", b"x")
        cluster.master.kill()
        wait_until(lambda: refusal(client) == NotAsked.__name__, "the client knows that the master is away")
        cluster.master.start(wait=False)
        client.put("patient", b"waited", timeout_s=20.0)
        assert client.get("patient") == b"waited"


@pytest.mark.parametrize("here", [True, False], ids=["local worker", "remote worker"])
def test_publishes_that_time_out_leave_nothing_behind(tmp_path: Path, connect: Callable[..., Any], here: bool) -> None:
    """While the client lives. One that came through in the end is as good as any."""
    values = {f"late/{i}": os.urandom(SIZE_BYTES) for i in range(KEPT)}
    with Cluster(tmp_path, workers=1) as cluster:
        (worker,) = cluster.workers
        with connect(cluster.url, worker_socket=worker.socket if here else "") as client:
            client.put("before", b"x")
            cluster.master.signal(signal.SIGSTOP)
            errors = [each for each in client.put_many(values, timeout_s=3.0) if isinstance(each, KvError)]
            assert len(errors) == KEPT
            assert len(worker.block_files) > 1, "they were stored: else this shows nothing"
            cluster.master.signal(signal.SIGCONT)
            wait_until(lambda: refusal(client) == "", "puts work again")
            named = 2 + sum(client.exists_many(list(values)))
            wait_until(lambda: len(worker.block_files) == named, "only blocks that have a name are left", 15.0)
            read = client.get_many(list(values))
            assert all(each in (None, values[name]) for name, each in zip(values, read, strict=True))
