"""What a worker sends to a master that takes names back, and what it does not (rule 22)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.core.types import BlockId
from kvstore.pb import master_pb2 as m
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.fake_master import FakeMaster, make, running


@pytest.fixture
async def master() -> AsyncIterator[FakeMaster]:
    fake = make()
    async with running(fake):
        yield fake


@pytest.fixture
async def worker(master: FakeMaster, tmp_path: Path) -> AsyncIterator[Worker]:
    settings = kit.settings(tmp_path, master=master.endpoint)._replace(session_grace_s=60.0)
    async with kit.running(settings, joined=True) as worker:
        yield worker


def ask(master: FakeMaster) -> None:
    master.recovered.clear()
    master.commands.append(m.Command(send_names=m.SendNames()))


async def told(master: FakeMaster) -> set[BlockId]:
    """All blocks, to the last page."""
    await master.until(lambda: bool(master.recovered) and master.recovered[-1].last)
    return {BlockId(row.address.boot, row.address.counter) for page in master.recovered for row in page.blocks}


async def test_who_does_not_know_all_its_blocks_yet_says_that_it_is_there(worker: Worker, master: FakeMaster) -> None:
    """The master gives up on who sends nothing; and to call this all would lose the names of the rest."""
    block = await kit.put(worker, b"bytes", owned=False)
    worker.store.scanned.clear()
    ask(master)
    await master.until(lambda: bool(master.recovered))
    worker.store.scanned.set()
    [page] = master.recovered
    assert (len(page.blocks), page.last) == (0, False)
    ask(master)
    assert await told(master) == {block.id}


async def test_a_block_that_nobody_will_publish_is_not_told_of(worker: Worker, master: FakeMaster) -> None:
    """It would look like one whose name is lost."""
    wanted, given_up = [await kit.put(worker, data, owned=False) for data in (b"one", b"other")]
    worker.membership.rolled_back = True  # so that it is not collected meanwhile
    given_up.given_up = True
    ask(master)
    assert await told(master) == {wanted.id}
    assert worker.store.get(given_up.id) is given_up
