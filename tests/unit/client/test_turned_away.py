"""A worker that has no place for one more connection says so: nobody waits for it, nobody thinks that it is dead."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client import connection, sync_local
from kvstore.client.deadline import Deadline
from kvstore.client.local import AsyncLocalWorker, LocalWorker
from kvstore.core import sockproto as sp
from kvstore.core.errors import Overloaded, Unavailable
from kvstore.node.workercheck import WatchedWorker
from kvstore.rpc.breaker import Broken
from kvstore.worker.serving.door import refuse

WAIT_S = 10.0
REASON = "no place"


def after_the_hello(client: socket.socket) -> None:
    client.recv(1, socket.MSG_PEEK)
    refuse(client, REASON)


def without_reading_it(client: socket.socket) -> None:
    client.recv(1, socket.MSG_PEEK)
    client.send(sp.encode_error(0, Overloaded(REASON)))
    client.close()


def before_the_hello(client: socket.socket) -> None:
    client.setblocking(False)
    refuse(client, REASON)


@pytest.fixture(params=[after_the_hello, without_reading_it, before_the_hello])
def full(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Path of a socket on which all are turned away, at that moment."""
    path = str(tmp_path / "w.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(8)
        thread = threading.Thread(target=turn_away, args=(listener, request.param))
        thread.start()
        if request.param is before_the_hello:
            for module in (connection, sync_local):
                monkeypatch.setattr(module, "connect_now", connect_late)
        yield path
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)


def turn_away(listener: socket.socket, how: Callable[[socket.socket], None]) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        how(client)


def connect_late(sock: socket.socket, path: str) -> bool:
    """The other end has hung up before the hello is sent."""
    sock.connect(path)
    poll = select.poll()
    poll.register(sock, select.POLLHUP)
    assert poll.poll(1000 * WAIT_S)
    return True


async def test_a_caller_is_sent_elsewhere_at_once_and_each_time(full: str) -> None:
    worker = AsyncLocalWorker(full, 1)
    for _ in range(3):
        with pytest.raises(Broken, match=REASON) as caught:
            await worker.stat(timeout_s=WAIT_S)
        assert isinstance(caught.value, Unavailable)
        assert caught.value.fault == full
        assert worker.breaker.closed
    worker.close()


async def test_a_ping_is_answered(full: str) -> None:
    with pytest.raises(Overloaded, match=REASON):
        await AsyncLocalWorker(full, 1).ping(WAIT_S)
    assert await WatchedWorker("worker", full).ask(WAIT_S) == ""


def test_so_it_is_for_threads(full: str) -> None:
    worker = LocalWorker(full, 1)
    for _ in range(3):
        with pytest.raises(Broken, match=REASON):
            worker.stat(timeout_s=WAIT_S)
        assert worker.breaker.closed
    with pytest.raises(Overloaded, match=REASON):
        worker.ping(WAIT_S)
    worker.close()


async def test_whoever_waits_on_another_connection_is_not_told_of_silence(full: str) -> None:
    assert await connection._lives(AsyncLocalWorker(full, 1).ping)
    assert await asyncio.to_thread(lambda: LocalWorker(full, 1)._lives(Deadline(WAIT_S)))
