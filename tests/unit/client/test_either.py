"""A local worker that falls silent (its socket stays open) costs its callers one wait of about a second, however long
their own deadlines are; nobody waits after that, and it comes back by itself. One that works long is not silent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.client.blocks import AsyncLocalBlocks, AsyncRemoteBlocks
from kvstore.client.either import AsyncEitherBlocks, EitherBlocks
from kvstore.client.local import AsyncLocalWorker, LocalWorker
from kvstore.client.remote import AsyncRemote, Remote
from kvstore.client.sockets import SealedBlock
from kvstore.client.staging import Staging
from kvstore.client.sync_blocks import LocalBlocks, RemoteBlocks
from kvstore.client.threads import Threads
from kvstore.core import sockproto as sp
from kvstore.core.errors import KvError, Timeout
from kvstore.core.limits import METADATA_TIMEOUT_S, PING_TIMEOUT_S, PROBE_TIMEOUT_S, SILENCE_S
from kvstore.core.types import Address, BlockId
from kvstore.rpc.breaker import NotAsked, Silent
from kvstore.runtime import SystemRuntime
from tests.support.fake_socket import HELLO, Asked, FakeSocket, open_fds
from tests.support.worker_kit import until

FOUND_OUT_S = SILENCE_S + PING_TIMEOUT_S
LATE_S = 1.0
"""A busy machine's, on top."""
AT_ONCE_S = 0.6
"""Several calls together, on a busy machine; less than one wait."""
HERE, ELSEWHERE = 4, 3
"""Volumes: of the local worker, of a remote one."""


class Remotes:
    """In the place of the remote workers: they take everything."""

    def __init__(self) -> None:
        self.given_up: list[SealedBlock] = []

    def give_up(self, blocks: Sequence[SealedBlock]) -> None:
        self.given_up += blocks

    def store(self, length_bytes: int, digest: int, frames: object, *, timeout_s: float) -> SealedBlock:
        return SealedBlock(Address(BlockId(1, 1), length_bytes, digest), ELSEWHERE)


class AsyncRemotes(Remotes):
    async def store(self, *args: Any, **kwargs: Any) -> SealedBlock:  # type: ignore[override]
        return super().store(*args, **kwargs)


class Listener(FakeSocket):
    """`deaf`: whether it reads and answers nothing, not even hello."""

    def __init__(self, path: Path, script: Callable[[Asked], None], deaf: Callable[[], bool]) -> None:
        self._deaf = deaf
        super().__init__(path, script)

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):  # the client gave up before the answer
            while data := connection.recv(1 << 17):
                self._take(Asked(connection, *sp.decode_request(data)))

    def _take(self, asked: Asked) -> None:
        self.seen.append(asked.request)
        if not isinstance(asked.request, sp.Hello):
            self._script(asked)
        elif not self._deaf():
            asked.answer(HELLO)

    @property
    def hellos(self) -> int:
        return sum(isinstance(request, sp.Hello) for request in self.seen)


class LocalPart:
    """The fake worker: `silent` is whether it only reads. `late_s`: so long it works on a seal."""

    def __init__(self, path: Path, file: int) -> None:
        self.silent, self.late_s, self._file = False, 0.0, file
        self.socket = Listener(path, self._serve, lambda: self.silent)

    def asked(self, kind: type[sp.Request]) -> int:
        return sum(isinstance(request, kind) for request in self.socket.seen)

    def _serve(self, asked: Asked) -> None:
        if self.silent:
            return
        match asked.request:
            case sp.Stage():
                asked.answer(sp.Staged(3, HERE), [self._file])
            case sp.Seal(size_bytes=size):
                time.sleep(self.late_s)
                asked.answer(sp.Sealed(sp.to_wire(Address(BlockId(7, 1), size, 1)), HERE))
            case sp.Stat():
                asked.answer(sp.StatReply("node", 1, 0, 1, 0))
            case _:
                asked.answer(sp.Ok())


class World:
    """Blocks of either kind, whose calls are awaited whichever it is."""

    def __init__(self, path: str, in_loop: bool, runtime: SystemRuntime) -> None:
        self._in_loop = in_loop
        self.link: AsyncLocalWorker | LocalWorker
        self.blocks: AsyncEitherBlocks | EitherBlocks
        if in_loop:
            self.link = AsyncLocalWorker(path, 5)
            self.remotes: Remotes = AsyncRemotes()
            remote = AsyncRemoteBlocks(cast("AsyncRemote", self.remotes), runtime)
            self.blocks = AsyncEitherBlocks(AsyncLocalBlocks(self.link, runtime), remote, path)
        else:
            self.link, threads = LocalWorker(path, 5), Threads()
            self.remotes = Remotes()
            here = RemoteBlocks(cast("Remote", self.remotes), threads)
            self.blocks = EitherBlocks(LocalBlocks(self.link, threads), here, path)

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        function: Callable[..., Any] = getattr(self.blocks, verb)
        return await function(*args, **kwargs) if self._in_loop else await asyncio.to_thread(function, *args, **kwargs)

    async def volume(self) -> int:
        """Where a value goes."""
        return cast("SealedBlock", await self.call("store", memoryview(b"value"))).volume

    async def find_out(self) -> None:
        """One call that waits in vain, and the worker is known not to answer."""
        begin = time.monotonic()
        await self.stage_in_vain()
        assert FOUND_OUT_S * 0.9 < time.monotonic() - begin < FOUND_OUT_S + LATE_S
        assert not self.link.breaker.closed

    async def stage_in_vain(self, timeout_s: float | None = None) -> None:
        staging: Staging = await self.call("stage", 10, timeout_s=timeout_s)
        assert staging.handle == 0, "a temporary file"
        staging.drop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def local(path: Path, tmp_path: Path) -> Iterator[LocalPart]:
    file = os.open(tmp_path / "block", os.O_RDWR | os.O_CREAT)
    part = LocalPart(path, file)
    yield part
    part.socket.close()
    os.close(file)
    assert not {fd for fd in open_fds() if str(tmp_path / "block") in fd}


@pytest.fixture(params=["async", "sync"])
async def world(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[World]:
    runtime = SystemRuntime(2)
    world = World(str(path), request.param == "async", runtime)
    yield world
    world.link.close()
    runtime.close()


async def test_after_one_wait_nobody_waits(local: LocalPart, world: World) -> None:
    first: Staging = await world.call("stage", 10)
    second: Staging = await world.call("stage", 10)
    local.silent = True
    await world.find_out()
    begin = time.monotonic()
    assert await world.volume() == ELSEWHERE
    await world.stage_in_vain()
    with pytest.raises(NotAsked) as caught:
        await world.call("seal", first, 10)
    assert caught.value.fault == world.link.path
    assert first.fd == -1
    for abandoned in (first, second):
        with pytest.raises(KvError):
            await world.call("abort", abandoned)
        assert abandoned.fd == -1
    assert time.monotonic() - begin < AT_ONCE_S
    assert local.asked(sp.Seal) == 0


async def test_a_silent_seal_ends_long_before_its_deadline(local: LocalPart, world: World) -> None:
    staging: Staging = await world.call("stage", 10)
    local.silent = True
    begin = time.monotonic()
    with pytest.raises(Silent):
        await world.call("seal", staging, 10, timeout_s=60.0)
    assert time.monotonic() - begin < FOUND_OUT_S + LATE_S
    begin = time.monotonic()
    with pytest.raises(KvError):
        await world.call("abort", staging)
    assert await world.volume() == ELSEWHERE
    assert time.monotonic() - begin < AT_ONCE_S


async def test_an_abort_is_sent_all_the_same(local: LocalPart, world: World) -> None:
    """A worker that only slept reads it when it goes on: the file must not lie there as long as the session lasts."""
    staging: Staging = await world.call("stage", 10)
    local.late_s = 0.1  # so that they overlap, and blocking clients have another connection for the abort
    await asyncio.gather(*(world.volume() for _ in range(3)))
    local.silent = True
    await world.find_out()
    with pytest.raises(KvError):
        await world.call("abort", staging)
    await until(lambda: local.asked(sp.Abort) == 1)


async def test_many_at_once_wait_together_and_ask_once(local: LocalPart, world: World) -> None:
    local.late_s = 0.1
    await asyncio.gather(*(world.volume() for _ in range(4)))  # each thread has its connection
    local.silent, hellos = True, local.socket.hellos
    begin = time.monotonic()
    await asyncio.gather(*(world.stage_in_vain() for _ in range(4)))
    assert time.monotonic() - begin < FOUND_OUT_S + LATE_S
    assert local.socket.hellos - hellos <= 3, "one for all, and a probe or two since"


async def test_nobody_is_the_one_who_probes(local: LocalPart, world: World) -> None:
    await world.volume()
    local.silent = True
    await world.find_out()
    hellos = local.socket.hellos
    end, slowest_s = time.monotonic() + 3 * PROBE_TIMEOUT_S, 0.0
    while time.monotonic() < end:
        begin = time.monotonic()
        assert await world.volume() == ELSEWHERE
        slowest_s = max(slowest_s, time.monotonic() - begin)
        await asyncio.sleep(0.01)
    assert slowest_s < AT_ONCE_S
    assert 2 <= local.socket.hellos - hellos <= 5, "one probe after the other, each with its time"


async def test_it_is_used_again_when_it_answers(local: LocalPart, world: World) -> None:
    staging: Staging = await world.call("stage", 10)
    local.silent = True
    await world.find_out()
    local.silent = False
    await until(lambda: world.link.breaker.closed)
    sealed: SealedBlock = await world.call("seal", staging, 10)
    assert sealed.volume == HERE


async def test_blocks_are_given_up_where_they_lie(local: LocalPart, world: World) -> None:
    here = SealedBlock(Address(BlockId(7, 1), 10, 1), HERE)
    elsewhere = SealedBlock(Address(BlockId(8, 1), 10, 1), ELSEWHERE, "b:1")
    await world.call("give_up", [here, elsewhere])
    await until(lambda: world.remotes.given_up == [elsewhere])
    assert [r for r in local.socket.seen if isinstance(r, sp.GiveUp)] == [sp.GiveUp([sp.to_wire(here.address)])]


async def test_a_silent_worker_is_told_what_is_given_up_and_not_waited_for(local: LocalPart, world: World) -> None:
    local.silent = True
    await world.find_out()
    begin = time.monotonic()
    with pytest.raises(Timeout):
        await world.call("give_up", [SealedBlock(Address(BlockId(7, 1), 10, 1), HERE)])
    assert time.monotonic() - begin < AT_ONCE_S


async def test_who_works_long_is_not_silent(local: LocalPart, world: World) -> None:
    staging: Staging = await world.call("stage", 10)
    local.late_s = 2 * FOUND_OUT_S
    sealing = asyncio.create_task(world.call("seal", staging, 10))
    await asyncio.sleep(1.5 * FOUND_OUT_S)
    assert world.link.breaker.closed
    assert cast("SealedBlock", await sealing).volume == HERE
    assert world.link.breaker.closed


async def test_a_caller_in_a_hurry_proves_nothing(local: LocalPart, world: World) -> None:
    """A worker that lives, and works longer than its caller waits."""
    staging: Staging = await world.call("stage", 10)
    local.late_s = FOUND_OUT_S
    with pytest.raises(Timeout):
        await world.call("seal", staging, 10, timeout_s=0.05)
    until_s = time.monotonic() + FOUND_OUT_S
    while time.monotonic() < until_s:
        assert world.link.breaker.closed
        await asyncio.sleep(0.02)
    assert await world.volume() == HERE


async def test_callers_in_a_hurry_find_out_all_the_same(local: LocalPart, world: World) -> None:
    """None of them waits long enough to tell; a probe in the background does."""
    await world.volume()
    local.silent = True
    await world.stage_in_vain(timeout_s=0.05)
    await until(lambda: not world.link.breaker.closed)
    assert await world.volume() == ELSEWHERE


@pytest.mark.parametrize("backlog", [0, 8], ids=["backlog full", "no hello"])
async def test_a_worker_that_takes_no_connection(path: Path, world: World, backlog: int) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first,
    ):
        listener.bind(str(path))
        listener.listen(backlog)
        first.connect(str(path))
        begin = time.monotonic()
        assert await asyncio.gather(*(world.volume() for _ in range(4))) == [ELSEWHERE] * 4
        assert not world.link.breaker.closed
        assert await world.volume() == ELSEWHERE
        assert time.monotonic() - begin < METADATA_TIMEOUT_S + LATE_S, "one wait for a connection"
