"""How a worker is asked whether it answers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.errors import Denied, KvError, Overloaded
from kvstore.core.sockproto import HelloReply
from kvstore.node.workercheck import WatchedWorker
from tests.support.fake_socket import HELLO, FakeSocket

LONG_S = 10.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w.sock"


@pytest.fixture
def silent(path: Path) -> Iterator[None]:
    """Somebody listens, as the kernel does for a process that is stopped, and nobody accepts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(8)
        yield


@pytest.mark.parametrize("answer", [HELLO, Overloaded("full"), Denied("another cluster's")], ids=str)
async def test_any_answer_is_one(path: Path, answer: HelloReply | KvError) -> None:
    with FakeSocket(path, lambda asked: None, answer):
        assert await WatchedWorker("worker", str(path)).ask(LONG_S) == ""


@pytest.mark.usefixtures("silent")
async def test_silence_is_told_by_the_deadline(path: Path) -> None:
    began_s = time.monotonic()
    complaint = await WatchedWorker("worker", str(path)).ask(0.3)
    assert "0.3 s" in complaint
    assert time.monotonic() - began_s < 5


async def test_who_is_not_there_yet_or_any_more_has_until_the_deadline(path: Path) -> None:
    worker = WatchedWorker("worker", str(path))
    began_s = time.monotonic()
    assert "is it running?" in await worker.ask(0.3)
    assert time.monotonic() - began_s >= 0.3
    question = asyncio.create_task(worker.ask(LONG_S))
    await asyncio.sleep(0.3)
    with FakeSocket(path, lambda asked: None):
        assert await question == ""


@pytest.mark.usefixtures("silent")
async def test_a_question_leaves_no_connection_behind(path: Path) -> None:
    worker = WatchedWorker("worker", str(path))
    before = _fds()
    for _ in range(5):
        await worker.ask(0.05)
    assert _fds() == before


def _fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
