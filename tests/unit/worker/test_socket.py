"""The Unix socket against clients that do not behave."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.client.local import AsyncLocalWorker
from kvstore.core import sockproto as sp
from kvstore.core.errors import Denied, InvalidRequest, KvError, NotFound, Overloaded, TooLarge, Unsupported
from kvstore.core.limits import MAX_BLOCK_BYTES, MAX_SOCKET_MESSAGE_BYTES
from kvstore.core.types import BlockId
from kvstore.worker.serving.door import ACCEPT_PAUSE_S, Door
from kvstore.worker.serving.fdsocket import MAX_OUTSTANDING
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


def door_of(worker: Worker) -> Door:
    assert worker._fd_server is not None
    return worker._fd_server._door


def comer(worker: Worker) -> socket.socket:
    """Connected, and has said hello."""
    sock = kit.connect(worker.settings.socket)
    sock.send(kit.hello(2))
    return sock


@pytest.mark.allow_errors("cannot accept clients")
async def test_who_comes_when_no_descriptor_is_left_is_told_so(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are served, and it is one line in the log however many come."""
    door = door_of(worker)
    accept = door._accept

    def accept_with_the_spare_one() -> socket.socket:
        if door._spare is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept()

    with await greeted(worker) as good:
        with monkeypatch.context() as short:
            short.setattr(door, "_accept", accept_with_the_spare_one)
            for _ in range(20):
                with comer(worker) as sock:
                    refused = await answer(sock)
                    assert isinstance(refused, Overloaded)
                    assert "ulimit" in refused.message
                    assert await answer(sock) is None
            assert not isinstance(await ask(good, sp.encode_request(2, sp.Stat())), KvError)
        with await greeted(worker, 2) as later:
            assert not isinstance(await ask(later, sp.encode_request(2, sp.Stat())), KvError)
    assert len([line for line in caplog.messages if "cannot accept" in line]) == 1


@pytest.mark.allow_errors("cannot accept a client")
async def test_where_somebody_took_the_spare_descriptor_clients_wait_until_there_is_one(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, tries = door_of(worker), list[None]()

    def no_descriptor() -> socket.socket:
        tries.append(None)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    door._spend_spare()
    with monkeypatch.context() as short:
        short.setattr(door, "_keep_spare", lambda: None)
        short.setattr(door, "_accept", no_descriptor)
        sock = comer(worker)
        began_s = time.monotonic()
        await kit.until(lambda: len(tries) == 3)
        assert time.monotonic() - began_s >= 2 * ACCEPT_PAUSE_S * 0.9, "the loop does not spin"
    with sock:
        assert not isinstance(await answer(sock), KvError)
    assert door._spare is not None


async def test_the_socket_has_its_mode(worker: Worker) -> None:
    assert os.stat(worker.settings.socket).st_mode & 0o777 == 0o666


async def written(client: AsyncLocalWorker, data: bytes) -> int:
    """Handle of a staging file with these bytes, closed by its writer."""
    staged = await client.stage(len(data))
    os.pwrite(staged.fd, data, 0)
    os.close(staged.fd)
    return staged.staging


async def test_a_seal_is_answered_again_to_whoever_has_the_session(worker: Worker) -> None:
    first, second, stranger = (AsyncLocalWorker(worker.settings.socket, session=s) for s in (5, 5, 6))
    handle = await written(first, b"data")
    sealed = await first.seal(handle, 4)
    first.close()
    assert await second.seal(handle, 4) == sealed
    with pytest.raises(NotFound):
        await stranger.seal(handle, 4)
    [block] = worker.store.unowned.values()
    worker.store.own(block)
    assert await second.seal(handle, 4) == sealed, "the answer of the publish may be lost as well"
    await worker.evictor.drop([block])
    with pytest.raises(NotFound):
        await second.seal(handle, 4)
    second.close()
    stranger.close()


async def test_seals_of_one_handle_at_the_same_time_are_one(worker: Worker) -> None:
    client = AsyncLocalWorker(worker.settings.socket, session=5)
    handle = await written(client, b"data")
    blocks = await asyncio.gather(*(client.seal(handle, 4) for _ in range(5)))
    assert len(set(blocks)) == len(worker.store) == 1
    client.close()


async def test_a_failed_seal_may_be_tried_again(worker: Worker) -> None:
    client = AsyncLocalWorker(worker.settings.socket, session=5)
    handle = await written(client, b"")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="empty"):
            await client.seal(handle, 0)
    await client.abort(handle)
    client.close()


async def test_seals_are_forgotten_with_their_session_and_beyond_a_bound(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.worker.writes.seals.MAX_REMEMBERED", 2)
    client = AsyncLocalWorker(worker.settings.socket, session=5)
    handles = [await written(client, bytes([i])) for i in range(3)]
    sealed = [await client.seal(handle, 1) for handle in handles]
    with pytest.raises(NotFound):
        await client.seal(handles[0], 1)
    assert [await client.seal(handle, 1) for handle in handles[1:]] == sealed[1:]
    now = worker.runtime.monotonic_s()
    worker.seals.forget_over(worker.sessions, now + 2 * worker.sessions.grace_s)
    assert await client.seal(handles[1], 1) == sealed[1], "it has a connection"
    client.close()
    await kit.until(lambda: not len(worker.sessions))
    worker.seals.forget_over(worker.sessions, now + 2 * worker.sessions.grace_s)
    again = AsyncLocalWorker(worker.settings.socket, session=5)
    with pytest.raises(NotFound):
        await again.seal(handles[1], 1)
    again.close()


async def test_an_abort_after_the_seal_gives_the_block_up_unless_it_is_published(worker: Worker) -> None:
    client = AsyncLocalWorker(worker.settings.socket, session=5)
    unwanted, published = await written(client, b"one"), await written(client, b"two")
    await client.seal(unwanted, 3)
    sealed = await client.seal(published, 3)
    block = worker.store.find(sealed.address)
    assert block is not None
    worker.store.own(block)
    await client.abort(unwanted)
    for handle in (unwanted, published, 77):
        with pytest.raises(NotFound):
            await client.abort(handle)
    with pytest.raises(NotFound):
        await client.seal(unwanted, 3)
    assert [b.given_up for b in worker.store.unowned.values()] == [True]
    assert not block.given_up
    client.close()


async def test_a_session_gives_up_its_own_blocks_unless_they_are_published(worker: Worker) -> None:
    client, other = (AsyncLocalWorker(worker.settings.socket, session=s) for s in (5, 6))
    unwanted, published = [await client.seal(await written(client, data), 3) for data in (b"one", b"two")]
    strange = await other.seal(await written(other, b"six"), 3)
    blocks = [worker.store.get(sealed.address.block) for sealed in (unwanted, published, strange)]
    assert blocks[1] is not None
    worker.store.own(blocks[1])
    unknown = strange.address._replace(block=BlockId(1, 1))
    stale = unwanted.address._replace(hash=0)
    await client.give_up([stale, unknown])
    assert [block.given_up for block in blocks if block] == [False, False, False]
    await client.give_up([unwanted.address, published.address, strange.address])
    assert [block.given_up for block in blocks if block] == [True, False, False]
    client.close()
    other.close()


async def test_an_abort_during_the_seal_comes_after_it(worker: Worker) -> None:
    client = AsyncLocalWorker(worker.settings.socket, session=5)
    handle = await written(client, b"data")
    sealed, _ = await asyncio.gather(client.seal(handle, 4), client.abort(handle))
    [block] = worker.store.unowned.values()
    assert (block.address, block.given_up) == (sealed.address, True)
    client.close()


@pytest.mark.parametrize("has_tmpfile", [True, False])
async def test_a_probe_brings_a_file_of_each_volume(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, has_tmpfile: bool
) -> None:
    real = os.open

    def no_tmpfile(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode)

    if not has_tmpfile:
        monkeypatch.setattr(os, "open", no_tmpfile)
    client = AsyncLocalWorker(worker.settings.socket, session=5)
    [probed] = await client.probe()
    volume = worker.store.volumes[0]
    assert (probed.volume, probed.tier) == (volume.id, "ssd")
    status = os.fstat(probed.fd)
    assert (status.st_size, status.st_nlink) == (0, 0)
    assert status.st_dev == os.stat(volume.path).st_dev
    assert fcntl.fcntl(probed.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    os.close(probed.fd)
    assert kit.files(worker, "staging") == []
    client.close()


@pytest.mark.allow_errors("out of service")
async def test_a_volume_that_fails_is_left_out_of_a_probe(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(worker.disk, "create_unnamed", broken)
    client = AsyncLocalWorker(worker.settings.socket, session=5)
    assert await client.probe() == []
    assert not worker.store.in_service
    client.close()
