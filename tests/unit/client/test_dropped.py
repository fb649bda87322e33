"""Clients that are dropped without `close` leave nothing behind, also while those that they ask are away."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.client.aio import AsyncClient
from kvstore.client.connection import AsyncConnection
from kvstore.client.local import AsyncLocalWorker, LocalWorker
from kvstore.core.errors import KvError
from tests.support.cluster import wait_until
from tests.support.fake_socket import FakeSocket

CLIENTS = 50
FEW_FDS = 5
"""gRPC's own, which come and go."""
AWHILE_S = 0.05
UNTIL_S = 20.0


@pytest.fixture(params=["refuses", "is silent"])
def master(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of one that is away."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if request.param == "is silent":
            sock.listen(4 * CLIENTS)
        yield f"kvstore://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def silent_worker(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "w.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(4 * CLIENTS)
        yield str(path)


def probes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvstore-probe"]


def fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def collected_fds() -> int:
    """What dropped calls left in cycles (an error knows its frames) goes first."""
    gc.collect()
    return fds()


def ask(master: str) -> None:
    with suppress(KvError):
        Client(master, worker_socket="").stat(timeout_s=AWHILE_S)


async def ask_async(master: str) -> None:
    with suppress(KvError):
        await AsyncClient(master, worker_socket="").stat(timeout_s=AWHILE_S)


def test_threads_and_descriptors_of_dropped_clients_go(master: str) -> None:
    ask(master)
    wait_until(lambda: not gc.collect() and not probes(), "the first one has gone", UNTIL_S)
    before = fds()
    gc.disable()  # until all are there
    try:
        for _ in range(CLIENTS):
            ask(master)
        assert len(probes()) == CLIENTS
    finally:
        gc.enable()
    wait_until(lambda: collected_fds() <= before + FEW_FDS and not probes(), "all have gone", UNTIL_S)


def test_a_client_that_is_kept_goes_on_asking(master: str) -> None:
    with Client(master, worker_socket="") as client:
        with suppress(KvError):
            client.stat(timeout_s=AWHILE_S)
        (probe,) = probes()
        for _ in range(3):
            gc.collect()
            probe.join(0.5)
        assert probe.is_alive()
    probe.join(UNTIL_S)
    assert not probe.is_alive()


async def test_tasks_and_descriptors_of_dropped_clients_go(master: str) -> None:
    await ask_async(master)
    gc.collect()
    await tasks_end()
    before = fds()
    gc.disable()
    try:
        for _ in range(CLIENTS):
            await ask_async(master)
        assert len(asyncio.all_tasks()) > CLIENTS
    finally:
        gc.enable()
    async with asyncio.timeout(UNTIL_S):
        while collected_fds() > before + FEW_FDS:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.1)
    await tasks_end()


async def tasks_end() -> None:
    async with asyncio.timeout(UNTIL_S):
        while len(asyncio.all_tasks()) > 1:
            gc.collect()
            await asyncio.sleep(0.1)


def test_threads_that_ask_a_local_worker_go_with_who_wants_to_know(silent_worker: str) -> None:
    for session in range(1, 4):
        with suppress(KvError):
            LocalWorker(silent_worker, session).stat(timeout_s=1.0)
    wait_until(lambda: not gc.collect() and not probes(), "all have gone", UNTIL_S)


async def test_tasks_that_ask_a_local_worker_go_with_who_wants_to_know(silent_worker: str) -> None:
    async def ask(session: int) -> None:
        with suppress(KvError):
            await AsyncLocalWorker(silent_worker, session).stat(timeout_s=1.0)

    await asyncio.gather(*(ask(session) for session in range(1, 11)))
    assert len(asyncio.all_tasks()) > 1
    await tasks_end()


async def test_the_connection_of_a_dropped_client_to_its_worker_is_closed(tmp_path: Path) -> None:
    with FakeSocket(tmp_path / "w.sock", lambda asked: None) as worker:

        async def meet() -> None:
            client = AsyncClient("kvstore://127.0.0.1:1", worker_socket=worker.path)
            await client.start(known_cluster="cluster")
            assert client.node == "node"

        for _ in range(10):
            await meet()
        async with asyncio.timeout(UNTIL_S):
            while connections():  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.05)


def connections() -> list[AsyncConnection]:
    """Those that anybody holds, be it the loop."""
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, AsyncConnection)]
