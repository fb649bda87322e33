"""A worker whose process does not answer: killed, and started anew by its supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from kvstore import Client
from kvstore.node import plan
from kvstore.node.child import Child
from kvstore.node.supervisor import Supervisor
from kvstore.node.watch import Patience
from tests.support.cluster import Cluster

SOON = Patience(interval_s=0.2, deadline_s=1.0, failures=2, again_s=0.5)
RECOVERY_TIMEOUT_S = 20.0
SLACK_S = 3.0
"""For a busy machine."""
VALUE = b"kept" * 1000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("store"), workers=1) as cluster:
        cluster.workers[0].stop()  # a supervisor has it from here on
        yield cluster


@asynccontextmanager
async def supervised(cluster: Cluster, patience: Patience = SOON) -> AsyncIterator[Child]:
    """The cluster's worker as a node daemon runs it, ready."""
    supervisor, worker = Supervisor(1.0, patience), cluster.workers[0]
    try:
        child = supervisor.launch(plan.worker(str(worker.config), worker.socket))
        await child.wait_ready(RECOVERY_TIMEOUT_S)
        yield child
    finally:
        await supervisor.stop()


async def ended(child: Child, pid: int, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while child.pid == pid and child.is_ready:  # noqa: ASYNC110 - no event tells of its end
            await asyncio.sleep(0.05)


def put(cluster: Cluster) -> None:
    with Client(cluster.url, worker_socket=cluster.workers[0].socket) as client:
        client.put("kept", VALUE, timeout_s=10)


def get(cluster: Cluster) -> bytes:
    with Client(cluster.url, worker_socket=cluster.workers[0].socket) as client:
        return client.get("kept", timeout_s=10)


@pytest.mark.allow_errors("does not answer")
async def test_a_worker_that_was_stopped_is_started_anew_and_has_its_blocks(cluster: Cluster) -> None:
    async with supervised(cluster) as child:
        await asyncio.to_thread(put, cluster)
        stopped = child.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        await ended(child, stopped, SOON.longest_s + SLACK_S)
        await asyncio.wait_for(child.until_ready(), RECOVERY_TIMEOUT_S)
        await asyncio.to_thread(cluster.wait_live, cluster.workers[0].node)
        assert await asyncio.to_thread(get, cluster) == VALUE
        await asyncio.sleep(5 * SOON.interval_s)
        assert child.restarts == 1, "the new one answers"


async def test_a_pause_below_the_deadline_ends_nobody(cluster: Cluster) -> None:
    async with supervised(cluster, SOON._replace(deadline_s=RECOVERY_TIMEOUT_S)) as child:
        pid = child.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2.0)  # several questions would have been due
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(1.0)
        assert (child.pid, child.restarts) == (pid, 0)
