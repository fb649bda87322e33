"""The local worker's socket, with a worker that answers late, wrongly, or not at all: no fd is lost, nothing hangs."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvstore.client.local import AsyncLocalWorker, LocalWorker
from kvstore.client.sockets import ProbedVolume
from kvstore.core import sockproto as sp
from kvstore.core.errors import Denied, InvalidRequest, KvError, NoSpace, Overloaded, Timeout, Unavailable
from kvstore.core.types import Address, BlockId, Replica
from tests.support import fake_socket
from tests.support.cluster import wait_until
from tests.support.fake_socket import Asked, hang_up, open_fds
from tests.support.worker_kit import until

ADDRESS = Address(BlockId(7, 1), 5, 99)
REPLICAS = (Replica(1, "ssd", "elsewhere", "127.0.0.1:9"),)


class FakeSocket(fake_socket.FakeSocket):
    """Clients ping it, and may be gone before its answer."""

    def _serve(self, connection: socket.socket) -> None:
        with suppress(BrokenPipeError):
            super()._serve(connection)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def block(tmp_path: Path) -> Iterator[int]:
    """An fd for the fake worker to hand out."""
    (tmp_path / "block").write_bytes(b"bytes")
    fd = os.open(tmp_path / "block", os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def _no_fd_is_lost(path: Path) -> Iterator[None]:
    before = open_fds()
    yield
    lost = {fd for fd in open_fds() - before if "block" in fd or "memfd" in fd}
    assert not lost


def give(fd: int) -> Callable[[Asked], None]:
    """A script that opens every block that is asked for."""

    def script(asked: Asked) -> None:
        if isinstance(asked.request, sp.Open):
            count = len(asked.request.addresses)
            asked.answer(sp.Opened([0] * count, [], [], [True] * count), [fd] * count)
        elif isinstance(asked.request, sp.Stage):
            asked.answer(sp.Staged(3, 4), [fd])
        else:
            asked.answer(sp.Ok())

    return script


def ints(fds: list[int | KvError]) -> list[int]:
    assert all(isinstance(fd, int) for fd in fds), fds
    return [fd for fd in fds if isinstance(fd, int)]


# ---- asyncio ----


async def test_an_fd_belongs_to_the_caller_and_not_to_its_children(path: Path, block: int) -> None:
    with FakeSocket(path, give(block)):
        worker = AsyncLocalWorker(str(path), 1)
        (fd,) = ints(await worker.open([(ADDRESS, REPLICAS)]))
        assert os.pread(fd, 10, 0) == b"bytes"
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.close(fd)
        worker.close()


async def test_the_hello_tells_session_and_cluster(path: Path, block: int) -> None:
    met: list[sp.HelloReply] = []
    with FakeSocket(path, give(block)) as fake:
        worker = AsyncLocalWorker(str(path), 77, "our cluster", met.append)
        assert (await worker.connect()).node == "node"
        assert fake.seen == [sp.Hello(sp.PROTOCOL_VERSION, 77, "our cluster")]
        assert [hello.node for hello in met] == ["node"]
        worker.close()


async def test_a_worker_of_another_cluster_denies(path: Path, block: int) -> None:
    with FakeSocket(path, give(block), hello=Denied("another cluster")):
        worker = AsyncLocalWorker(str(path), 1)
        with pytest.raises(Denied, match="another cluster"):
            await worker.stage(1)
        worker.close()


async def test_answers_may_come_in_any_order(path: Path, block: int) -> None:
    waiting: list[Asked] = []

    def script(asked: Asked) -> None:
        waiting.append(asked)
        if len(waiting) == 3:
            for one in reversed(waiting):
                assert isinstance(one.request, sp.Reserve)
                one.fail(NoSpace(f"room for {one.request.size_bytes}"))

    with FakeSocket(path, script):
        worker = AsyncLocalWorker(str(path), 1)
        results = await asyncio.gather(*(worker.reserve(1, size) for size in (10, 20, 30)), return_exceptions=True)
        assert [str(r) for r in results] == ["room for 10", "room for 20", "room for 30"]
        worker.close()


async def test_errors_stand_in_the_place_of_their_blocks(path: Path, block: int) -> None:
    def script(asked: Asked) -> None:
        body = sp.Opened([0, Unavailable.code, 0], ["gone"], ["peer"], [True, True])
        asked.answer(body, [block, block])

    with FakeSocket(path, script):
        worker = AsyncLocalWorker(str(path), 1)
        first, error, last = await worker.open([(ADDRESS, ())] * 3)
        assert isinstance(error, Unavailable)
        assert (error.message, error.fault) == ("gone", "peer")
        for fd in ints([first, last]):
            os.close(fd)
        worker.close()


async def test_the_fd_of_an_answer_that_came_too_late_is_closed(path: Path, block: int) -> None:
    late: list[Asked] = []
    connections: set[socket.socket] = set()

    def script(asked: Asked) -> None:
        connections.add(asked.connection)
        if isinstance(asked.request, sp.Open):
            late.append(asked)
        else:
            for one in late:
                one.answer(sp.Opened([0], [], [], [True]), [block])
            asked.answer(sp.Ok())

    with FakeSocket(path, script):
        worker = AsyncLocalWorker(str(path), 1)
        with pytest.raises(Timeout) as caught:
            await worker.open([(ADDRESS, ())], timeout_s=0.05)
        assert caught.value.fault == str(path)
        await worker.touch([ADDRESS])  # answered behind the late one
        assert connections == {late[0].connection}
        worker.close()


async def test_the_fd_of_a_cancelled_caller_is_closed(path: Path, block: int) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def script(asked: Asked) -> None:
        if isinstance(asked.request, sp.Open):
            arrived.set()
            go_on.wait(10)
            asked.answer(sp.Opened([0], [], [], [True]), [block])
        else:
            asked.answer(sp.Ok())

    with FakeSocket(path, script):
        worker = AsyncLocalWorker(str(path), 1)
        task = asyncio.create_task(worker.open([(ADDRESS, ())]))
        await asyncio.to_thread(arrived.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await worker.touch([ADDRESS])
        worker.close()


async def test_the_fd_of_a_caller_cancelled_after_the_answer_came_is_closed(path: Path, block: int) -> None:
    """The answer is in the future, the task has not run yet: the moment that leaks in careless code."""
    with FakeSocket(path, give(block)):
        worker = AsyncLocalWorker(str(path), 1)
        await worker.connect()
        for turns in range(12):  # whichever turn of the loop the answer takes
            task = asyncio.create_task(worker.open([(ADDRESS, ())]))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            try:
                for fd in ints(await task):
                    os.close(fd)
            except asyncio.CancelledError:
                pass
        await worker.touch([ADDRESS])
        worker.close()


async def test_it_connects_again_after_the_worker_restarted(path: Path, block: int) -> None:
    worker = AsyncLocalWorker(str(path), 1)
    with FakeSocket(path, give(block)):
        os.close((await worker.stage(1)).fd)
    with pytest.raises(Unavailable, match="no worker answers"):
        await worker.stage(1)
    with FakeSocket(path, give(block)):
        await until(lambda: worker.breaker.closed)
        os.close((await worker.stage(1)).fd)
        worker.close()


async def test_a_stage_that_may_have_arrived_is_not_repeated_but_an_open_is(path: Path, block: int) -> None:
    calls: list[sp.Request] = []

    def script(asked: Asked) -> None:
        calls.append(asked.request)
        if len(calls) in (1, 2):
            hang_up(asked.connection)
        else:
            give(block)(asked)

    with FakeSocket(path, script):
        worker = AsyncLocalWorker(str(path), 1)
        with pytest.raises(Unavailable):
            await worker.stage(1)
        for fd in ints(await worker.open([(ADDRESS, ())])):
            os.close(fd)
        assert [type(c) for c in calls] == [sp.Stage, sp.Open, sp.Open]
        worker.close()


async def test_nothing_listens(path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        await AsyncLocalWorker(str(path), 1).stage(1)
    assert caught.value.fault == str(path)


async def test_a_worker_that_does_not_say_hello_is_a_timeout(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(8)
        worker = AsyncLocalWorker(str(path), 1)
        with pytest.raises(Timeout):
            await worker.stage(1, timeout_s=0.05)
        worker.close()


async def test_a_full_backlog_is_waited_for(path: Path) -> None:
    """A non-blocking connect says EAGAIN then, and asyncio's own sock_connect would take that for success."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
            first.connect(str(path))
            with pytest.raises(Timeout):
                await AsyncLocalWorker(str(path), 1).stage(1, timeout_s=0.05)


@pytest.mark.parametrize("junk", [b"\xc1", b"\x90", b"x" * 70_000], ids=["no msgpack", "no answer", "too long"])
async def test_what_is_no_answer_ends_the_connection(path: Path, block: int, junk: bytes) -> None:
    connections: set[socket.socket] = set()

    def script(asked: Asked) -> None:
        connections.add(asked.connection)
        if isinstance(asked.request, sp.Stage):
            socket.send_fds(asked.connection, [junk], [block])
        else:
            asked.answer(sp.Ok())

    with FakeSocket(path, script):
        worker = AsyncLocalWorker(str(path), 1)
        with pytest.raises(Unavailable):
            await worker.stage(1)
        await worker.touch([ADDRESS])
        assert len(connections) == 2
        worker.close()


@pytest.mark.parametrize("fd_count", [0, 2])
async def test_an_answer_with_another_number_of_fds_is_refused(path: Path, block: int, fd_count: int) -> None:
    def script(asked: Asked) -> None:
        if isinstance(asked.request, sp.Open):
            asked.answer(sp.Opened([0], [], [], [True]), [block] * fd_count)
        else:
            asked.answer(sp.Staged(1, 1), [block] * fd_count)

    with FakeSocket(path, script):
        worker = AsyncLocalWorker(str(path), 1)
        with pytest.raises(KvError, match="malformed"):
            await worker.stage(1)
        with pytest.raises(KvError, match="malformed"):
            await worker.open([(ADDRESS, ())])
        worker.close()


@contextmanager
def free_fds(count: int, fd: int) -> Iterator[None]:
    """So many descriptors are left to this process; the others are duplicates of `fd`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(number) for number in os.listdir("/proc/self/fd"))
    filler = [os.dup(fd) for _ in range(highest + 1 - len(os.listdir("/proc/self/fd")) + 3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(filler) + 1 + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in filler:
            os.close(number)


async def test_a_process_without_free_fds_is_told_so(path: Path, block: int) -> None:
    """The kernel then delivers the message without (all of) its fds and sets MSG_CTRUNC."""
    with FakeSocket(path, give(block)) as fake:
        worker = AsyncLocalWorker(str(path), 1)
        await worker.connect()
        with free_fds(1, block), pytest.raises(Overloaded, match="RLIMIT_NOFILE"):
            await worker.open([(ADDRESS, ())] * 8)
        for fd in ints(await worker.open([(ADDRESS, ())])):
            os.close(fd)
        assert sum(isinstance(request, sp.Hello) for request in fake.seen) == 1
        worker.close()


async def test_nor_can_it_connect_and_that_is_not_the_workers_fault(path: Path, block: int) -> None:
    with FakeSocket(path, give(block)):
        worker, threads = AsyncLocalWorker(str(path), 1), LocalWorker(str(path), 1)
        with free_fds(0, block):
            with pytest.raises(Overloaded, match="RLIMIT_NOFILE"):
                await worker.open([(ADDRESS, ())])
            with pytest.raises(Overloaded, match="RLIMIT_NOFILE"):
                threads.open([(ADDRESS, ())])
        assert worker.breaker.closed
        assert threads.breaker.closed
        for fd in (*ints(await worker.open([(ADDRESS, ())])), *ints(threads.open([(ADDRESS, ())]))):
            os.close(fd)
        worker.close()
        threads.close()


async def test_many_blocks_are_asked_for_in_messages_that_fit(path: Path, block: int) -> None:
    replicas = [Replica(2**63 + i, "ssd", "n" * 64, "h" * 200 + ":7080") for i in range(20)]
    with FakeSocket(path, give(block)) as fake:
        worker = AsyncLocalWorker(str(path), 1)
        fds = ints(await worker.open([(ADDRESS, replicas)] * 100))
        assert len(set(fds)) == 100
        for fd in fds:
            os.close(fd)
        opens = [request for request in fake.seen if isinstance(request, sp.Open)]
        assert sum(len(request.addresses) for request in opens) == 100
        assert all(len(request.addresses) <= 64 for request in opens)
        worker.close()


async def test_fds_of_earlier_messages_are_closed_when_a_later_one_fails(path: Path, block: int) -> None:
    opens = []

    def script(asked: Asked) -> None:
        opens.append(asked)
        if len(opens) == 2:
            asked.fail(Overloaded("enough"))
        else:
            give(block)(asked)

    with FakeSocket(path, script):
        worker = AsyncLocalWorker(str(path), 1)
        with pytest.raises(Overloaded):
            await worker.open([(ADDRESS, ())] * 100)
        worker.close()


async def test_a_closed_worker_link_stays_closed(path: Path, block: int) -> None:
    with FakeSocket(path, give(block)):
        worker = AsyncLocalWorker(str(path), 1)
        await worker.connect()
        worker.close()
        with pytest.raises(Unavailable, match="closed"):
            await worker.stage(1)


@pytest.mark.parametrize("fd_count", [1, 2, 3])
async def test_a_probe_names_the_volume_of_each_fd(path: Path, block: int, fd_count: int) -> None:
    with FakeSocket(path, lambda asked: asked.answer(sp.Probed([7, 8], ["mem", "ssd"]), [block] * fd_count)):
        worker, blocking = AsyncLocalWorker(str(path), 1), LocalWorker(str(path), 1)
        asks: list[Callable[[], Awaitable[list[ProbedVolume]]]] = [
            worker.probe, lambda: asyncio.to_thread(blocking.probe)
        ]  # fmt: skip
        for ask in asks:
            if fd_count != 2:
                with pytest.raises(KvError, match="malformed"):
                    await ask()
                continue
            volumes = await ask()
            assert [(v.volume, v.tier) for v in volumes] == [(7, "mem"), (8, "ssd")]
            for volume in volumes:
                assert os.pread(volume.fd, 10, 0) == b"bytes"
                os.close(volume.fd)
        worker.close()
        blocking.close()


# ---- threads ----


def test_blocking_open_stage_and_touch(path: Path, block: int) -> None:
    with FakeSocket(path, give(block)) as fake:
        worker = LocalWorker(str(path), 5)
        (fd,) = ints(worker.open([(ADDRESS, REPLICAS)]))
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.close(fd)
        staged = worker.stage(10)
        assert (staged.staging, staged.volume) == (3, 4)
        os.close(staged.fd)
        worker.touch([ADDRESS])
        assert sum(isinstance(request, sp.Hello) for request in fake.seen) == 1
        worker.close()


def test_blocking_timeout_gives_up_the_connection(path: Path, block: int) -> None:
    late: list[Asked] = []
    connections: set[socket.socket] = set()

    def script(asked: Asked) -> None:
        connections.add(asked.connection)
        if isinstance(asked.request, sp.Open):
            late.append(asked)
        else:
            asked.answer(sp.Ok())

    with FakeSocket(path, script):
        worker = LocalWorker(str(path), 1)
        with pytest.raises(Timeout):
            worker.open([(ADDRESS, ())], timeout_s=0.05)
        with pytest.raises(OSError, match=r"pipe|reset"):
            late[0].answer(sp.Opened([0], [], [], [True]), [block])
        worker.touch([ADDRESS])
        assert len(connections) == 2
        worker.close()


def test_blocking_reconnect(path: Path, block: int) -> None:
    worker = LocalWorker(str(path), 1)
    with FakeSocket(path, give(block)):
        os.close(worker.stage(1).fd)
    with pytest.raises(Unavailable, match="no worker answers"):
        worker.stage(1)
    with FakeSocket(path, give(block)):
        wait_until(lambda: worker.breaker.closed, "it is known to be back")
        os.close(worker.stage(1).fd)
        worker.close()


def test_blocking_stage_that_may_have_arrived_is_not_repeated_but_an_open_is(path: Path, block: int) -> None:
    calls: list[sp.Request] = []

    def script(asked: Asked) -> None:
        calls.append(asked.request)
        if len(calls) in (2, 4):
            hang_up(asked.connection)
        else:
            give(block)(asked)

    with FakeSocket(path, script):
        worker = LocalWorker(str(path), 1)
        worker.touch([ADDRESS])
        with pytest.raises(Unavailable):
            worker.stage(1)
        worker.touch([ADDRESS])
        for fd in ints(worker.open([(ADDRESS, ())])):
            os.close(fd)
        assert [type(c) for c in calls] == [sp.Touch, sp.Stage, sp.Touch, sp.Open, sp.Open]
        worker.close()


def test_a_touch_of_any_length_is_sent_in_order(path: Path, block: int) -> None:
    addresses = [Address(BlockId(2**64 - 1, 2**64 - 1 - i), 2**63 - 1, 2**64 - 1) for i in range(2500)]
    with FakeSocket(path, give(block)) as fake:
        worker = LocalWorker(str(path), 1)
        worker.touch(addresses)
        touched = [a for request in fake.seen if isinstance(request, sp.Touch) for a in request.addresses]
        assert touched == [sp.to_wire(a) for a in addresses]
        worker.close()


def test_threads_get_connections_of_their_own_and_few_are_kept(path: Path, block: int) -> None:
    barrier = threading.Barrier(12)

    def script(asked: Asked) -> None:
        barrier.wait(10)
        asked.answer(sp.Ok())

    with FakeSocket(path, script) as fake:
        worker = LocalWorker(str(path), 1)
        threads = [threading.Thread(target=worker.touch, args=([ADDRESS],)) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(isinstance(request, sp.Hello) for request in fake.seen) == 12
        assert repr(worker).endswith(" 8 idle>")
        worker.close()


def test_a_message_that_is_too_long_is_refused_here(path: Path, block: int) -> None:
    with FakeSocket(path, give(block)):
        worker = LocalWorker(str(path), 1)
        with pytest.raises(InvalidRequest, match="too long"):
            worker.open([(ADDRESS, [Replica(1, "ssd", "n" * 70_000, "e")])])
        worker.touch([ADDRESS])
        worker.close()
