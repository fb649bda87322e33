"""What makes a block hotter, and what does not."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.core import sockproto as sp
from kvstore.core.types import Address
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.entries import address_to_pb
from kvstore.rpc.link import AsyncLink
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import WORKER_DESCRIBE, WORKER_STAT
from kvstore.worker.blocks.block import Block
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.worker_kit import MIB


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(kit.settings(tmp_path)._replace(session_grace_s=60.0)) as worker:
        yield worker


@pytest.fixture
async def block(worker: Worker) -> Block:
    return await kit.put(worker, os.urandom(MIB))


@pytest.fixture
async def link(worker: Worker) -> AsyncIterator[AsyncLink]:
    link = AsyncLink(worker.endpoint, Caller(session=7))
    yield link
    await link.close()


def heat(worker: Worker, block: Block) -> tuple[float, int]:
    return worker.store.heat.of(block).score, block.touches


def open_request(address: Address) -> sp.Open:
    return sp.Open([sp.to_wire(address)], [[]], 5.0)


async def ask(worker: Worker, request: sp.Request, session: int = 1) -> None:
    """As `fdsocket` does for a client."""
    assert worker._fd_server is not None
    verbs = worker._fd_server.handler
    answer = verbs.serve_now(session, request) or await verbs.serve(session, request)
    for fd in answer.fds:
        os.close(fd)


@pytest.mark.parametrize("use", ["open", "touch", "open after the pages have gone", "read over the network"])
async def test_opens_and_reads_renew_it(worker: Worker, link: AsyncLink, block: Block, use: str) -> None:
    score, touches = heat(worker, block)
    match use:
        case "open":
            await ask(worker, open_request(block.address))
        case "touch":
            await ask(worker, sp.Touch([sp.to_wire(block.address)]))
        case "open after the pages have gone":
            block.stamp = None
            await ask(worker, open_request(block.address))
        case _:
            request = w.ReadRequest(address=address_to_pb(block.address))
            assert [frame async for frame in link.read_frames(request, 10)]
    assert heat(worker, block)[0] > score
    assert heat(worker, block)[1] == touches + 1
    assert block.proven


async def test_probes_do_not(worker: Worker, link: AsyncLink, block: Block) -> None:
    before = heat(worker, block)
    for request in (sp.Stat(), sp.Unfinished(), sp.Probe()):
        await ask(worker, request)
    await link.call(WORKER_STAT, w.WorkerStatRequest(), 5.0)
    reply = await link.call(WORKER_DESCRIBE, w.DescribeRequest(addresses=[address_to_pb(block.address)]), 5.0)
    assert reply.blocks[0].here
    await worker.verifier.verify(block)
    await worker.staging.look(block.volume)
    wrong = sp.to_wire(block.address._replace(hash=1))
    await ask(worker, sp.Touch([wrong]))
    await ask(worker, sp.Open([wrong], [[]], 5.0))
    assert heat(worker, block) == before
    assert not block.proven
