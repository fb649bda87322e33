"""A worker whose process does not answer: killed, and started anew by its supervisor."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest

from kvstore import Client
from kvstore.client import sockets
from kvstore.core import sockproto as sp
from kvstore.core.errors import KvError, Overloaded
from kvstore.node import plan
from kvstore.node.child import Child
from kvstore.node.supervisor import Supervisor
from kvstore.node.watch import PATIENCE, Patience
from tests.support.cluster import Cluster

SOON = Patience(interval_s=0.2, deadline_s=1.0, failures=2, again_s=0.5)
RECOVERY_TIMEOUT_S = 20.0
PAUSE_S = 30.0
BACK_S = 2.0
SLACK_S = 3.0
"""For a busy machine."""
ENGINES = 60
VALUE = b"kept" * 1000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("store"), workers=1) as cluster:
        cluster.workers[0].stop()  # a supervisor has it from here on
        yield cluster


@asynccontextmanager
async def supervised(cluster: Cluster, patience: Patience | None = SOON) -> AsyncIterator[Child]:
    """The cluster's worker as a node daemon runs it, ready. Without a patience with the one that users have."""
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


async def test_half_a_minute_ends_no_worker_and_it_goes_on_by_itself(cluster: Cluster) -> None:
    async with supervised(cluster, None) as child:
        await asyncio.to_thread(put, cluster)
        pid = child.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(PAUSE_S)
        os.kill(pid, signal.SIGCONT)
        await asyncio.wait_for(readable(cluster), BACK_S + SLACK_S)
        await asyncio.sleep(PATIENCE.interval_s)  # until it is asked again
        assert (child.pid, child.restarts) == (pid, 0)


async def readable(cluster: Cluster) -> None:
    """Again: it is a miss while its worker does not answer."""
    while True:
        with suppress(KvError):
            assert await asyncio.to_thread(get, cluster) == VALUE
            return
        await asyncio.sleep(0.05)


@pytest.mark.allow_errors("cannot accept")
async def test_a_worker_that_has_no_descriptor_left_says_so_and_is_not_ended(cluster: Cluster) -> None:
    async with supervised(cluster) as child:
        await asyncio.to_thread(put, cluster)
        pid = child.pid
        assert pid is not None
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        few = len(os.listdir(f"/proc/{pid}/fd")) + ENGINES // 2
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, hard))
        with ExitStack() as stack:
            said = [greet(stack, cluster.workers[0].socket, session) for session in range(1, 1 + ENGINES)]
            served = [sock for sock, answer in said if not isinstance(answer, KvError)]
            refused = [answer for _, answer in said if isinstance(answer, Overloaded)]
            assert served
            assert refused
            assert len(served) + len(refused) == ENGINES
            await asyncio.sleep(2 * SOON.longest_s)
            assert (child.pid, child.restarts) == (pid, 0)
            assert not isinstance(ask(served[0], sp.Stat()), KvError), "those who are there are served"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert await asyncio.to_thread(get, cluster) == VALUE


def greet(stack: ExitStack, path: str, session: int) -> tuple[socket.socket, object]:
    """One engine's connection, and what its hello was answered with."""
    sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    sock.settimeout(RECOVERY_TIMEOUT_S)
    sock.connect(path)
    return sock, ask(sock, sp.Hello(sp.PROTOCOL_VERSION, session))


def ask(sock: socket.socket, request: sp.Request) -> object:
    """The error or the raw body."""
    with suppress(BrokenPipeError):  # it has hung up, and said why
        sock.send(sp.encode_request(1, request))
    return sockets.receive(sock, "").body
