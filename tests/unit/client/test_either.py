"""A local worker that falls silent (its socket stays open) costs its callers one deadline, not one a call; and comes
back by itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import kvstore.client.local as local_module
from kvstore.client.blocks import AsyncLocalBlocks, AsyncRemoteBlocks
from kvstore.client.breaker import Breakers
from kvstore.client.either import PROBE_TIMEOUT_S, AsyncEitherBlocks, EitherBlocks
from kvstore.client.local import AsyncLocalWorker, LocalWorker
from kvstore.client.remote import AsyncRemote, Remote
from kvstore.client.sockets import SealedBlock
from kvstore.client.staging import Staging
from kvstore.client.sync_blocks import LocalBlocks, RemoteBlocks
from kvstore.client.threads import Threads
from kvstore.core import sockproto as sp
from kvstore.core.breaker import FIRST_PAUSE_S
from kvstore.core.errors import KvError, Timeout, Unavailable
from kvstore.core.types import Address, BlockId
from kvstore.runtime import SystemRuntime
from tests.support.fake_socket import Asked, FakeSocket, open_fds
from tests.support.worker_kit import until

OWN_S = 0.4
"""Deadline of the calls that find out; longer than a breaker's patience."""
AT_ONCE_S = 0.15
HERE, ELSEWHERE = 4, 3
"""Volumes: of the local worker, of a remote one."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Remotes:
    """In the place of the remote workers: they take everything."""

    def store(self, length_bytes: int, digest: int, frames: object, *, timeout_s: float) -> SealedBlock:
        return SealedBlock(Address(BlockId(1, 1), length_bytes, digest), ELSEWHERE)


class AsyncRemotes(Remotes):
    async def store(self, *args: Any, **kwargs: Any) -> SealedBlock:  # type: ignore[override]
        return super().store(*args, **kwargs)


class Listener(FakeSocket):
    def _serve(self, connection: socket.socket) -> None:
        try:
            super()._serve(connection)
        except BrokenPipeError:
            pass  # the client gave up before the answer


class LocalPart:
    """The fake worker: `silent` is whether it only reads. `late_s`: so long it works on a seal."""

    def __init__(self, path: Path, file: int) -> None:
        self.silent, self.late_s, self._file = False, 0.0, file
        self.socket = Listener(path, self._serve)

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
        self.clock, self._in_loop = Clock(), in_loop
        self.breakers = Breakers(self.clock)
        self.link: AsyncLocalWorker | LocalWorker
        self.blocks: AsyncEitherBlocks | EitherBlocks
        if in_loop:
            self.link = AsyncLocalWorker(path, 5)
            remote = AsyncRemoteBlocks(cast("AsyncRemote", AsyncRemotes()), runtime)
            self.blocks = AsyncEitherBlocks(AsyncLocalBlocks(self.link, runtime), remote, path, self.breakers)
        else:
            self.link, threads = LocalWorker(path, 5), Threads()
            here = RemoteBlocks(cast("Remote", Remotes()), threads)
            self.blocks = EitherBlocks(LocalBlocks(self.link, threads), here, path, self.breakers)

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        function: Callable[..., Any] = getattr(self.blocks, verb)
        return await function(*args, **kwargs) if self._in_loop else await asyncio.to_thread(function, *args, **kwargs)

    async def volume(self) -> int:
        """Where a value goes."""
        return cast("SealedBlock", await self.call("store", memoryview(b"value"))).volume

    async def find_out(self) -> None:
        await self.stage_in_vain()
        assert not self.breakers.closed(self.link.path)

    async def stage_in_vain(self) -> None:
        staging: Staging = await self.call("stage", 10, timeout_s=OWN_S)
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


async def test_after_one_deadline_nobody_waits(local: LocalPart, world: World) -> None:
    first: Staging = await world.call("stage", 10)
    second: Staging = await world.call("stage", 10)
    local.silent = True
    await world.find_out()
    begin = time.monotonic()
    assert await world.volume() == ELSEWHERE
    await world.stage_in_vain()
    with pytest.raises(Unavailable) as caught:
        await world.call("seal", first, 10)
    assert caught.value.fault == world.link.path
    assert first.fd == -1
    for abandoned in (first, second):
        with pytest.raises(KvError):
            await world.call("abort", abandoned)
        assert abandoned.fd == -1
    assert time.monotonic() - begin < AT_ONCE_S
    assert local.asked(sp.Seal) == 0


async def test_the_first_silent_seal_is_the_one_that_waits(local: LocalPart, world: World) -> None:
    staging: Staging = await world.call("stage", 10)
    local.silent = True
    with pytest.raises(Timeout):
        await world.call("seal", staging, 10, timeout_s=OWN_S)
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


async def test_many_at_once_wait_together_and_count_as_one(local: LocalPart, world: World) -> None:
    await world.volume()
    local.silent = True
    begin = time.monotonic()
    await asyncio.gather(*(world.stage_in_vain() for _ in range(4)))
    assert OWN_S * 0.9 < time.monotonic() - begin < 2 * OWN_S
    local.silent = False
    world.clock.now_s += FIRST_PAUSE_S
    assert await world.volume() == HERE, "four failures are no reason for a longer pause"


async def test_one_probes_for_a_moment_and_the_rest_go_elsewhere(local: LocalPart, world: World) -> None:
    await world.volume()
    local.silent = True
    await world.find_out()
    world.clock.now_s += FIRST_PAUSE_S
    begin = time.monotonic()
    assert await asyncio.gather(*(world.volume() for _ in range(6))) == [ELSEWHERE] * 6
    assert time.monotonic() - begin < PROBE_TIMEOUT_S + AT_ONCE_S
    assert local.asked(sp.Stat) == 1


async def test_a_probe_without_an_answer_is_no_timeout_of_the_call(local: LocalPart, world: World) -> None:
    """What was asked for was not begun, so that the mount may stage the bytes elsewhere."""
    staging: Staging = await world.call("stage", 10)
    local.silent = True
    await world.find_out()
    world.clock.now_s += FIRST_PAUSE_S
    with pytest.raises(Unavailable):
        await world.call("seal", staging, 10)


async def test_it_is_used_again_when_it_answers(local: LocalPart, world: World) -> None:
    staging: Staging = await world.call("stage", 10)
    local.silent = True
    await world.find_out()
    local.silent = False
    assert await world.volume() == ELSEWHERE, "not asked so soon"
    world.clock.now_s += FIRST_PAUSE_S
    sealed: SealedBlock = await world.call("seal", staging, 10)
    assert sealed.volume == HERE
    assert world.breakers.closed(world.link.path)


async def test_who_works_long_is_not_silent(local: LocalPart, world: World) -> None:
    staging: Staging = await world.call("stage", 10)
    local.late_s = 2 * OWN_S
    sealing = asyncio.create_task(world.call("seal", staging, 10))
    await asyncio.sleep(OWN_S)
    assert world.breakers.closed(world.link.path)
    assert cast("SealedBlock", await sealing).volume == HERE
    assert world.breakers.closed(world.link.path)


@pytest.mark.parametrize("backlog", [0, 8], ids=["backlog full", "no hello"])
async def test_a_worker_that_takes_no_connection(
    path: Path, world: World, backlog: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "CONNECT_TIMEOUT_S", OWN_S)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first,
    ):
        listener.bind(str(path))
        listener.listen(backlog)
        first.connect(str(path))
        begin = time.monotonic()
        assert await asyncio.gather(*(world.volume() for _ in range(4))) == [ELSEWHERE] * 4
        assert not world.breakers.closed(str(path))
        assert await world.volume() == ELSEWHERE
        assert time.monotonic() - begin < 2 * OWN_S, "one wait for a connection"
