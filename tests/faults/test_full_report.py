"""A full report is made of pieces, and blocks move between them: the master never believes that one is nowhere. It did,
once: the entry fell, and the block with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from kvstore.pb import master_pb2 as m
from kvstore.worker.blocks.block import Block
from kvstore.worker.reports import report
from kvstore.worker.settings import VolumeSettings, Watermarks
from kvstore.worker.worker import Worker
from tests.support import fake_master
from tests.support import worker_kit as kit
from tests.support.fake_master import FakeMaster
from tests.support.worker_kit import MIB

TOUCHES: Final = 3
"""That make a block hot enough for the faster tier."""


class Mover(FakeMaster):
    """Moves the block between the first piece of the next full report and the second one."""

    worker: Worker | None = None
    block: Block
    pieces = 0
    was_nowhere = False

    def _take(self, request: m.ReportRequest) -> None:
        super()._take(request)
        if self.worker is not None:
            self.pieces += request.HasField("full")
            self.was_nowhere = self.was_nowhere or not self.replicas.get(self.block.id)

    async def _notify(self) -> None:
        if self.worker is not None and self.pieces == 1 and self.block.volume.tier == "ssd":
            await promote(self.worker, self.block)
        await super()._notify()


async def promote(worker: Worker, block: Block) -> None:
    for _ in range(TOUCHES):
        worker.store.touch(block, 1)
    await worker.mover.step()


@pytest.fixture
async def master(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mover]:
    monkeypatch.setattr(report, "REPORT_INTERVAL_S", 0.02)
    master = Mover()  # type: ignore[abstract]
    async with fake_master.running(master):
        yield master


@pytest.fixture
async def worker(master: Mover, tmp_path: Path) -> AsyncIterator[Worker]:
    """With one block, in the slower of two tiers."""
    volumes = [VolumeSettings(t, str(tmp_path / t), 32 * MIB, 0, Watermarks(0.95, 0.9)) for t in ("mem", "ssd")]
    settings = kit.settings(tmp_path, master=master.endpoint)._replace(volumes=volumes, session_grace_s=60.0)
    async with kit.running(settings, joined=True) as worker:
        master.block = block = await kit.put(worker, b"x" * 5000, owned=False)
        master.publish(block.address)
        await kit.until(lambda: block.owned)
        yield worker


async def test_a_block_that_moves_during_a_full_report_is_somewhere_all_the_time(master: Mover, worker: Worker) -> None:
    master.worker = worker
    worker.master_sync._reporter.tell_all()
    await master.until(lambda: master.pieces >= 2 and worker.store.volumes[0].id in master.replicas[master.block.id])
    assert master.block.volume.tier == "mem"
    assert not master.was_nowhere


async def test_a_block_that_moved_just_before_a_full_report_is_somewhere_all_the_time(
    master: Mover, worker: Worker
) -> None:
    block, (mem, ssd) = master.block, worker.store.volumes
    await promote(worker, block)
    await master.until(lambda: mem.id in master.replicas[block.id])
    master.replicas[block.id] = {mem.id}  # as a master has it that replaces what it knew
    master.worker = worker
    await worker.mover.demote(mem, block.used_bytes)
    worker.master_sync._reporter.tell_all()
    await master.until(lambda: master.pieces >= 2 and ssd.id in master.replicas[block.id])
    assert not master.was_nowhere
