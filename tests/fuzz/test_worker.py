"""Any requests at a real worker, by gRPC and by its Unix socket: replies or typed errors, and its books are right."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc.aio
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import sockproto as sp
from kvstore.core.errors import KvError
from kvstore.core.hashing import hash_block
from kvstore.core.types import Address
from kvstore.pb import common_pb2 as c
from kvstore.pb import worker_pb2 as w
from kvstore.rpc import methods
from kvstore.rpc.entries import address_to_pb
from kvstore.rpc.transport import GrpcTransport
from kvstore.runtime import SystemRuntime
from kvstore.worker.serving.fdsocket import Answer, close_all
from kvstore.worker.serving.service import WorkerService
from kvstore.worker.serving.verbs import Introduction, Verbs
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.volumes.opening import open_volumes
from kvstore.worker.worker import Worker
from tests.fuzz.calls import INTERNAL, Context, Refused, call
from tests.fuzz.hostile import fuzz, mangled, messages, spoiled
from tests.fuzz.test_protocols import REQUESTS, of_kind
from tests.support import worker_kit as kit

DATA: Final = b"0123456789"
SESSION: Final = 5
PATIENCE_S: Final = 15.0
"""More than a put waits for room."""


class Alone(GrpcTransport):
    """Whatever peer is named: nobody is there."""

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        return super().channel(kit.NOBODY)


class Subject:
    """A worker with one block, at `address`."""

    def __init__(self, runner: asyncio.Runner, worker: Worker, address: Address) -> None:
        self._runner, self.worker, self.address = runner, worker, address
        w = worker
        self.service = WorkerService(w.stat, w.policies.describe, w.seals.give_up, w.bulk, lambda: w.membership.cluster)
        self.verbs = Verbs(
            Introduction("a", "h:1"), w.membership, w.store, w.sessions, w.staging, w.sealer, w.seals, w.opener,
            w.background,
        )  # fmt: skip

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(asyncio.wait_for(work, PATIENCE_S))


@contextmanager
def subject(root: Path) -> Iterator[Subject]:
    """Its books are checked at the end, and that no fd is left of what was asked for."""
    with asyncio.Runner() as runner:
        running = _running(root)
        worker, address = runner.run(running.__aenter__())
        before = len(os.listdir("/proc/self/fd"))
        yield Subject(runner, worker, address)
        assert len(os.listdir("/proc/self/fd")) <= before + len(worker.held) + 5
        runner.run(running.__aexit__(None, None, None))


@asynccontextmanager
async def _running(root: Path) -> AsyncIterator[tuple[Worker, Address]]:
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    runtime, disk, settings = SystemRuntime(4), Disk(), kit.settings(root)._replace(session_grace_s=60.0)
    worker = Worker(settings, runtime, await open_volumes(settings, runtime, disk), disk, Alone())
    try:
        await worker.start()
        await worker.store.scanned.wait()
        yield worker, (await kit.put(worker, DATA)).address
        await kit.check_books(worker)
    finally:
        await worker.stop()
        runtime.close()


async def typed(work: Coroutine[Any, Any, Any]) -> None:
    """The call ends, with a reply or with an error that somebody has foreseen."""
    try:
        await work
    except Refused as refused:
        if refused.code == INTERNAL:
            raise


# ---- gRPC

HERE: Final = c.Address(boot=7, counter=1, length_bytes=10, hash=1)
"""Stands for the address of the block that the worker has."""
PEER: Final = w.PeerReplica(volume=1, tier="ssd", node="n1", endpoint="h:1")
READS: Final = [w.ReadRequest(address=HERE), w.ReadRequest(address=HERE, offset_bytes=2, size_bytes=5, replicas=[PEER])]
WRITES: Final = [w.WriteRequest(session=SESSION, length_bytes=len(DATA), hash=hash_block(DATA))]
FRAMES: Final = st.one_of(
    st.sampled_from([[DATA], [DATA[:4], DATA[4:]], [DATA[:4], b"", DATA[4:]], [bytes(1 << 20)] * 2, []]),
    st.lists(st.binary(max_size=8), max_size=5),
)
METADATA: Final = st.sampled_from(
    [(), (("kvstore-session", "7"),), (("kvstore-session", "x"),), (("kvstore-protocol", "9"),)]
)


def requests(honest: list[Message]) -> st.SearchStrategy[bytes]:
    examples = st.sampled_from(honest)
    encoded = st.one_of(examples, spoiled(examples), spoiled(examples), messages(type(honest[0]))).map(_bytes)
    return st.one_of(encoded, encoded, mangled(encoded))


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()


async def _drain(frames: AsyncIterator[bytes]) -> None:
    async for _ in frames:
        pass


async def _stream(frames: list[bytes]) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame


def test_descriptions(tmp_path: Path) -> None:
    with subject(tmp_path) as s:

        @fuzz(150)
        @given(requests([w.DescribeRequest(addresses=[HERE, HERE])]))
        def tried(data: bytes) -> None:
            with suppress(DecodeError):
                s.run(typed(call(s.service, methods.WORKER_DESCRIBE, data)))

        tried()


def test_reads(tmp_path: Path) -> None:
    with subject(tmp_path) as s:
        here = _bytes(address_to_pb(s.address))

        @fuzz(200)
        @given(requests([*READS]), METADATA)
        def tried(data: bytes, metadata: tuple[tuple[str, str], ...]) -> None:
            for request in (data, data.replace(_bytes(HERE), here)):
                s.run(typed(_drain(s.service.read(request, Context(metadata)))))  # type: ignore[arg-type]

        tried()


def test_writes(tmp_path: Path) -> None:
    with subject(tmp_path) as s:

        @fuzz(200)
        @given(requests([*WRITES]), FRAMES, METADATA)
        def tried(data: bytes, frames: list[bytes], metadata: tuple[tuple[str, str], ...]) -> None:
            s.run(typed(s.service.write(_stream([data, *frames]), Context(metadata))))  # type: ignore[arg-type]
            assert not len(s.worker.staging), "what did not become a block is gone"

        tried()
        assert len(s.worker.store) > 1, "some were honest"


# ---- the Unix socket


@st.composite
def socket_requests(draw: st.DrawFn) -> sp.Request:
    """Those that come after the hello."""
    return draw(of_kind(draw(st.sampled_from([kind for kind in REQUESTS if kind is not sp.Hello]))))  # type: ignore[return-value]


def test_requests_of_the_socket(tmp_path: Path) -> None:
    with subject(tmp_path) as s:

        @fuzz(250)
        @given(st.lists(socket_requests(), min_size=1, max_size=5))
        def tried(asked: list[sp.Request]) -> None:
            s.run(_serve_all(s, asked))

        tried()


async def _serve_all(s: Subject, asked: list[sp.Request]) -> None:
    """As the server does, with a real block and a real staging file among those that are named."""
    s.verbs.enter(SESSION)
    staged = await s.verbs.serve(SESSION, sp.Stage(len(DATA)))
    assert isinstance(staged.body, sp.Staged)
    os.pwrite(staged.fds[0], DATA, 0)
    close_all(staged.fds)
    for request in asked:
        await _serve(s, _aimed(request, staged.body.staging, sp.to_wire(s.address)))
    for handle in s.worker.staging.handles(SESSION):
        await s.worker.seals.abort(SESSION, handle)
    s.verbs.leave(SESSION)


def _aimed(request: sp.Request, staging: int, address: sp.WireAddress) -> sp.Request:
    """A small number that stands for a staging file or a block becomes that of the real one."""
    if isinstance(request, sp.Reserve | sp.Seal | sp.SealCopy | sp.Abort) and abs(request.staging) < 2:
        request.staging = staging
    if isinstance(request, sp.Open | sp.Touch):
        request.addresses = [address if abs(wire[0]) < 2 else wire for wire in request.addresses]
    return request


async def _serve(s: Subject, request: sp.Request) -> None:
    answer: Answer | None = None
    with suppress(KvError):
        answer = s.verbs.serve_now(SESSION, request) or await s.verbs.serve(SESSION, request)
    if answer is not None:
        close_all(answer.fds)
        assert sp.encode_reply(1, answer.body)
