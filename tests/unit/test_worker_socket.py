"""The Unix socket against clients that do not behave."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.client.local import AsyncLocalWorker
from kvstore.core import sockproto as sp
from kvstore.core.errors import Denied, InvalidRequest, KvError, NotFound, TooLarge, Unsupported
from kvstore.core.limits import MAX_BLOCK_BYTES, MAX_SOCKET_MESSAGE_BYTES
from kvstore.worker.fdsocket import MAX_OUTSTANDING
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(kit.settings(tmp_path)) as worker:
        yield worker
        await kit.check_books(worker)


async def ask(sock: socket.socket, data: bytes) -> sp.Message | KvError | object:
    await asyncio.to_thread(sock.send, data)
    return await answer(sock)


async def answer(sock: socket.socket) -> object:
    """The error or the raw body; None at the end of the connection."""
    data = await asyncio.to_thread(sock.recv, MAX_SOCKET_MESSAGE_BYTES)
    return sp.decode_reply(data)[1] if data else None


async def greeted(worker: Worker, session: int = 1) -> socket.socket:
    sock = kit.connect(worker.settings.socket)
    assert not isinstance(await ask(sock, kit.hello(session)), KvError)
    return sock


@pytest.mark.parametrize(
    "data", [b"garbage", b"\xc1", b"\x92\x01", kit.hello()[:-3], os.urandom(5000), b"\x92\x01\x91\xa5stage"]
)
async def test_garbage_is_answered_and_ends_only_its_own_connection(worker: Worker, data: bytes) -> None:
    with kit.connect(worker.settings.socket) as bad, await greeted(worker) as good:
        assert isinstance(await ask(bad, data), InvalidRequest)
        assert await answer(bad) is None
        assert not isinstance(await ask(good, sp.encode_request(2, sp.Stat())), KvError)


async def test_a_giant_message_is_refused(worker: Worker) -> None:
    with await greeted(worker) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        error = await ask(sock, bytes(MAX_SOCKET_MESSAGE_BYTES + 1))
        assert isinstance(error, InvalidRequest)
        assert await answer(sock) is None


async def test_fds_sent_to_the_worker_are_closed(worker: Worker) -> None:
    read, write = os.pipe()
    with await greeted(worker) as sock:
        socket.send_fds(sock, [sp.encode_request(2, sp.Stat())], [write] * 3)
        os.close(write)
        await answer(sock)
        assert os.read(read, 1) == b"", "nobody holds the other end any more"
    os.close(read)


async def test_hello_comes_first_and_once(worker: Worker) -> None:
    with kit.connect(worker.settings.socket) as sock:
        assert isinstance(await ask(sock, sp.encode_request(1, sp.Stat())), Denied)
        assert await answer(sock) is None
    with await greeted(worker) as sock:
        assert isinstance(await ask(sock, kit.hello()), InvalidRequest)


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        (sp.Hello(99, 1), Unsupported),
        (sp.Hello(sp.PROTOCOL_VERSION, 0), InvalidRequest),
        (sp.Hello(sp.PROTOCOL_VERSION, -5), InvalidRequest),
        (sp.Hello(sp.PROTOCOL_VERSION, 1, "another"), Denied),
    ],
)
async def test_who_is_not_welcome_is_told_why(worker: Worker, hello: sp.Hello, error: type[KvError]) -> None:
    worker.membership.cluster = "mine"
    with kit.connect(worker.settings.socket) as sock:
        assert isinstance(await ask(sock, sp.encode_request(1, hello)), error)
        assert await answer(sock) is None


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (sp.Stage(-1), InvalidRequest),
        (sp.Stage(MAX_BLOCK_BYTES + 1), TooLarge),
        (sp.Reserve(5, 10), NotFound),
        (sp.Seal(-1, 1), NotFound),
        (sp.SealCopy(2**64 - 1), NotFound),
        (sp.Abort(1), NotFound),
        (sp.Open([(1, 1, 1, 1)], [], 1.0), InvalidRequest),
        (sp.Open([(1, 1, 1, 1)] * 65, [[]] * 65, 1.0), InvalidRequest),
        (sp.Open([(-1, 1, 1, 1)], [[]], 1.0), InvalidRequest),
        (sp.Open([(1, 1, 2**64 - 1, 1)], [[]], 1.0), InvalidRequest),
        (sp.Open([(1, 1, 1, 1)], [[]], float("nan")), InvalidRequest),
        (sp.Open([(1, 1, 1, 1)], [[]], -1.0), InvalidRequest),
        (sp.Touch([(1, -1, 1, 1)]), InvalidRequest),
    ],
)
async def test_bad_requests_get_their_typed_error(worker: Worker, request_: sp.Request, error: type[KvError]) -> None:
    with await greeted(worker) as sock:
        assert isinstance(await ask(sock, sp.encode_request(2, request_)), error)
        assert not isinstance(await ask(sock, sp.encode_request(3, sp.Stat())), KvError), "the connection lives on"


async def test_a_client_that_does_not_read_blocks_nobody(worker: Worker) -> None:
    block = await kit.put(worker, b"data")
    request = sp.encode_request(7, sp.Open([sp.to_wire(block.address)], [[]], 5.0))
    lazy = await greeted(worker)
    lazy.setblocking(False)
    sent = 0
    with await greeted(worker, session=2) as other:
        try:
            while sent < 20 * MAX_OUTSTANDING:
                lazy.send(request)
                sent += 1
                await asyncio.sleep(0)
        except BlockingIOError:
            pass
        assert not isinstance(await ask(other, sp.encode_request(2, sp.Stat())), KvError)
        held = len(os.listdir("/proc/self/fd"))
        assert held < sent + 3 * MAX_OUTSTANDING, "answers queue only so far"
        lazy.setblocking(True)
        for _ in range(sent):
            data, fds, _, _ = await asyncio.to_thread(socket.recv_fds, lazy, 4096, 4)
            assert len(fds) == 1, sp.decode_reply(data)
            os.close(fds[0])
    lazy.close()


async def test_staging_belongs_to_its_session_not_to_its_connection(worker: Worker) -> None:
    first = AsyncLocalWorker(worker.settings.socket, session=5)
    staged = await first.stage(4)
    os.pwrite(staged.fd, b"data", 0)
    os.close(staged.fd)
    first.close()
    stranger = AsyncLocalWorker(worker.settings.socket, session=6)
    with pytest.raises(NotFound):
        await stranger.seal(staged.staging, 4)
    again = AsyncLocalWorker(worker.settings.socket, session=5)
    sealed = await again.seal(staged.staging, 4)
    [fd] = await again.open([(sealed.address, ())])
    assert isinstance(fd, int)
    assert os.pread(fd, 10, 0) == b"data"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    os.close(fd)
    stranger.close()
    again.close()


async def test_the_worker_keeps_no_fd_of_what_it_sent(worker: Worker) -> None:
    client = AsyncLocalWorker(worker.settings.socket, session=5)
    block = await kit.put(worker, b"data")
    await client.connect()
    before = len(os.listdir("/proc/self/fd"))
    [fd] = await client.open([(block.address, ())])
    assert isinstance(fd, int)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    os.close(fd)
    client.close()


async def test_one_bad_block_of_many_gets_its_own_error(worker: Worker) -> None:
    client = AsyncLocalWorker(worker.settings.socket, session=5)
    good = await kit.put(worker, b"data")
    results = await client.open([(good.address, ()), (good.address._replace(hash=1), ()), (good.address, ())])
    assert [type(r).__name__ for r in results] == ["int", "Stale", "int"]
    for fd in results:
        if isinstance(fd, int):
            os.close(fd)
    client.close()


async def test_the_socket_of_a_newer_worker_is_left_alone(tmp_path: Path) -> None:
    settings = kit.settings(tmp_path)
    other = kit.settings(tmp_path, "b")._replace(socket=settings.socket)
    async with kit.running(settings), kit.running(other) as newer:
        pass
    assert not os.path.exists(newer.settings.socket)
    async with kit.running(other):
        async with kit.running(settings):
            pass
        assert not os.path.exists(settings.socket)


async def test_the_socket_has_its_mode(worker: Worker) -> None:
    assert os.stat(worker.settings.socket).st_mode & 0o777 == 0o666
