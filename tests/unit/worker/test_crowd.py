"""64 writers at once on a nearly full worker: no cap is passed, nobody waits for ever, every byte is accounted for."""

from __future__ import annotations

import asyncio
import collections
import os
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvstore.core.errors import NoSpace
from kvstore.core.limits import ROOM_WAIT_S
from kvstore.worker.settings import Settings, VolumeSettings, Watermarks
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.accounting import check_exact, stop_moves, used_on_disk
from tests.support.fake_master import FakeMaster, make, running
from tests.support.worker_kit import KIB, MIB

WRITERS, ROUNDS = 64, 5
SIZES = (4 * KIB, 5 * KIB, 100 * KIB, MIB, MIB + 1, 3 * MIB)
DEADLINE_S = 4 * ROOM_WAIT_S
"""Of one step of a writer: what it may wait for room, and a noisy machine."""


def settings(root: Path, master: str, tiers: Sequence[tuple[str, int]]) -> Settings:
    marks = Watermarks(0.95, 0.9)
    volumes = [VolumeSettings(tier, str(root / f"{tier}{i}"), size, 0, marks) for i, (tier, size) in enumerate(tiers)]
    return kit.settings(root, master=master)._replace(volumes=volumes, session_grace_s=60.0)


@pytest.fixture
async def master() -> AsyncIterator[FakeMaster]:
    fake = make()
    async with running(fake):
        yield fake


class Writer:
    """One session that stores, grows and aborts files, and counts how that ends."""

    def __init__(self, worker: Worker, master: FakeMaster, session: int, ends: collections.Counter[str]) -> None:
        self._worker, self._master, self._session, self._ends = worker, master, session, ends
        self._chance = random.Random(session)
        worker.sessions.enter(session)

    async def run(self) -> None:
        for _ in range(ROUNDS):
            try:
                async with asyncio.timeout(DEADLINE_S):
                    self._ends[await self._round(self._chance.choice(SIZES))] += 1
            except NoSpace:
                self._ends["refused"] += 1

    async def _round(self, size: int) -> str:
        data = self._chance.randbytes(size)
        grows = self._chance.random() < 0.4
        staged, fd = await self._worker.staging.create(self._session, size // 4 if grows else size)
        try:
            if grows:
                await self._worker.staging.reserve(staged, size)
            for at in range(0, size, 256 * KIB):
                await asyncio.to_thread(os.pwrite, fd, data[at : at + 256 * KIB], at)
        except BaseException:
            os.close(fd)
            await self._worker.staging.abort(staged)
            raise
        if self._chance.random() < 0.15:
            await self._worker.staging.abort(staged)  # before its writer closes it
            os.close(fd)
            return "aborted"
        os.close(fd)
        block = await self._worker.sealer.seal(staged, None)
        self._master.publish(block.address)
        return "published"


async def watch(worker: Worker, over: list[str]) -> None:
    """Nothing is given away while this counts, as it does not await: what it sees on the disk is in the books."""
    while True:
        for volume in worker.store.volumes:
            on_disk, books = used_on_disk(volume), volume.books
            if not on_disk <= books.used <= books.capacity:
                over.append(f"{on_disk} bytes on disk; {books.describe()}")
        await asyncio.sleep(0.03)


@pytest.mark.parametrize(
    "tiers",
    [
        [("ssd", 40 * MIB)],
        [("ssd", 24 * MIB), ("hdd", 40 * MIB)],
        [("mem", 8 * MIB), ("ssd", 20 * MIB), ("ssd", 20 * MIB)],
    ],
    ids=lambda tiers: "+".join(tier for tier, _ in tiers),
)
async def test_no_cap_is_passed_and_nobody_waits_for_ever(
    master: FakeMaster, tmp_path: Path, tiers: list[tuple[str, int]]
) -> None:
    async with kit.running(settings(tmp_path, master.endpoint, tiers), joined=True) as worker:
        worker.sessions.enter(1)
        for _ in range(sum(size for tier, size in tiers if tier != "mem") // MIB - 4):
            master.publish((await kit.put(worker, os.urandom(MIB), owned=False)).address)
        await kit.until(lambda: not worker.store.unowned)
        over: list[str] = []
        ends: collections.Counter[str] = collections.Counter()
        watching = asyncio.create_task(watch(worker, over))
        writers = [Writer(worker, master, session, ends) for session in range(2, 2 + WRITERS)]
        async with asyncio.timeout(ROUNDS * DEADLINE_S):
            await asyncio.gather(*(writer.run() for writer in writers))
        watching.cancel()
        assert over == []
        assert sum(ends.values()) == WRITERS * ROUNDS
        assert ends["published"] > WRITERS, ends
        assert worker.counters.evictions > 0
        await kit.until(lambda: not worker.store.unowned)
        await stop_moves(worker)
        assert len(worker.staging) == 0
        await check_exact(worker)
