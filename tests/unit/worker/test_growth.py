"""Staging files that are written without asking: what fits is granted, what does not is cut, and never published."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvstore.core.errors import KvError, NoSpace, TooLarge
from kvstore.core.types import BlockId
from kvstore.filecut import cut_path, is_cut
from kvstore.worker.worker import Worker
from kvstore.worker.writes import growth, seal
from kvstore.worker.writes.seal import Claim
from kvstore.worker.writes.staging import Staged
from tests.support import worker_kit as kit
from tests.support.worker_kit import KIB, MIB

CAPACITY = 64 * MIB


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(kit.settings(tmp_path, capacity=CAPACITY)) as worker:
        worker.sessions.enter(1)
        yield worker
        await kit.check_books(worker)


@pytest.fixture
def by_hand(worker: Worker) -> Worker:
    """Nothing is looked at but where the test says so."""
    (task,) = (t for t in worker._tasks if "Growth.run" in repr(t.get_coro()))
    task.cancel()
    return worker


class Writer:
    """A client that writes into a staging file as it likes."""

    def __init__(self, staged: Staged, fd: int) -> None:
        self.staged, self.fd, self.at = staged, fd, 0

    @classmethod
    async def new(cls, worker: Worker, reserved: int = 0) -> Writer:
        return cls(*await worker.staging.create(1, reserved))

    def write(self, size: int) -> None:
        os.pwrite(self.fd, b"x" * size, self.at)
        self.at += size

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        os.close(self.fd)


async def cut_one(worker: Worker, size: int = 100 * MIB) -> Writer:
    writer = await Writer.new(worker)
    writer.write(size)
    await emptied(worker, writer)
    return writer


async def emptied(worker: Worker, writer: Writer) -> None:
    """Look until it is, and the books have heard of it (one that is being emptied is left alone)."""
    async with asyncio.timeout(10):
        while writer.size or writer.staged.counted:
            await worker.growth.look()


async def all_free(worker: Worker) -> None:
    """Probe until nothing is used any more."""
    async with asyncio.timeout(10):
        while worker.store.volumes[0].books.used:
            await worker.held.probe()


async def test_what_fits_is_granted(by_hand: Worker) -> None:
    writer = await Writer.new(by_hand)
    writer.write(20 * MIB)
    await by_hand.growth.look()
    assert writer.staged.granted == writer.staged.counted == 20 * MIB
    assert by_hand.staging.overgrown_bytes(writer.staged.volume) == 0
    assert writer.staged.volume.books.free == CAPACITY - 20 * MIB
    writer.close()
    await by_hand.sealer.seal(writer.staged, None)
    assert writer.staged.volume.books.used == 20 * MIB


async def test_blocks_go_for_what_was_written(by_hand: Worker) -> None:
    blocks = [await kit.put(by_hand, os.urandom(4 * MIB)) for _ in range(15)]
    writer = await Writer.new(by_hand)
    writer.write(16 * MIB)
    await by_hand.growth.look()
    await kit.until(lambda: writer.staged.granted == 16 * MIB)
    assert len(by_hand.store) == len(blocks) - 3, "60 MiB and 16 are 12 too many"
    assert writer.size == 16 * MIB
    writer.close()


async def test_one_file_does_not_cost_the_whole_cache(by_hand: Worker) -> None:
    """It may never fit at all: for more than three quarters of the volume nothing is evicted."""
    blocks = [await kit.put(by_hand, os.urandom(4 * MIB)) for _ in range(15)]
    writer = await Writer.new(by_hand)
    writer.write(49 * MIB)
    await emptied(by_hand, writer)
    assert is_cut(writer.fd)
    assert len(by_hand.store) == len(blocks)
    writer.close()


async def test_what_does_not_fit_is_cut_and_cannot_be_sealed(by_hand: Worker) -> None:
    writer = await cut_one(by_hand)
    staged = writer.staged
    assert is_cut(writer.fd)
    assert staged.volume.books.used == 0
    with pytest.raises(NoSpace, match=r"emptied.*no room for it.*abort it"):
        await by_hand.staging.reserve(staged, KIB)
    with pytest.raises(NoSpace):
        await by_hand.staging.reserve(staged, 0)
    with pytest.raises(NoSpace):
        await by_hand.sealer.seal_copy(staged)
    writer.close()
    with pytest.raises(NoSpace):
        await by_hand.seals.seal(1, staged.handle, None)
    await by_hand.seals.abort(1, staged.handle)
    assert kit.files(by_hand, "staging") == []
    assert staged.volume.books.used == 0


async def test_the_hash_of_what_it_was_does_not_help_it(by_hand: Worker) -> None:
    """Its writer hashed it, and then it was cut; size and mtime may even be made to look the same."""
    writer = await Writer.new(by_hand)
    writer.write(100 * MIB)
    before = os.fstat(writer.fd)
    await emptied(by_hand, writer)
    os.ftruncate(writer.fd, before.st_size)
    os.utime(writer.fd, ns=(before.st_mtime_ns, before.st_mtime_ns))
    writer.close()
    with pytest.raises(NoSpace):
        await by_hand.sealer.seal(writer.staged, Claim(1, before.st_size, before.st_mtime_ns))
    assert len(by_hand.store) == 0
    await by_hand.staging.abort(writer.staged)


async def test_what_is_written_on_is_cut_again_and_counts_nowhere(by_hand: Worker) -> None:
    writer = await cut_one(by_hand)
    for _ in range(3):
        writer.write(5 * MIB)  # behind a hole
        await emptied(by_hand, writer)
        await by_hand.staging.look(writer.staged.volume)
        assert writer.staged.volume.books.used == 0
    writer.close()


async def test_the_file_that_took_most_goes_first(by_hand: Worker) -> None:
    large, small = await Writer.new(by_hand), await Writer.new(by_hand)
    large.write(60 * MIB)
    small.write(14 * MIB)
    await by_hand.growth.look()
    await emptied(by_hand, large)
    await kit.until(lambda: small.staged.granted == 14 * MIB)
    assert large.staged.cut
    assert (large.size, small.size) == (0, 14 * MIB)
    large.close()
    small.close()
    await by_hand.sealer.seal(small.staged, None)


async def test_what_was_granted_is_never_cut(by_hand: Worker) -> None:
    asked, other = await Writer.new(by_hand, 60 * MIB), await Writer.new(by_hand)
    asked.write(60 * MIB)
    other.write(8 * MIB)
    await emptied(by_hand, other)
    await by_hand.growth.look()
    assert asked.size == 60 * MIB
    asked.close()
    other.close()
    await by_hand.sealer.seal(asked.staged, None)


async def test_larger_than_any_block_it_is_cut_at_once(by_hand: Worker) -> None:
    by_hand.staging.max_block_bytes = 8 * MIB
    block = await kit.put(by_hand, b"x" * MIB)
    writer = await cut_one(by_hand, 9 * MIB)
    with pytest.raises(TooLarge, match="8388608"):
        await by_hand.staging.reserve(writer.staged, MIB)
    assert by_hand.store.get(block.id) is block, "nothing is evicted for what can never be sealed"
    writer.close()


async def test_a_seal_that_runs_is_left_alone(by_hand: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has hashed what it renames: to cut the file now would make a block without its bytes."""
    monkeypatch.setattr(seal, "LEASE_WAIT_S", 30.0)
    writer = await Writer.new(by_hand)
    full = await Writer.new(by_hand, 60 * MIB)
    writer.write(10 * MIB)
    sealing = asyncio.create_task(by_hand.sealer.seal(writer.staged, None))  # waits for its writer to go
    await kit.until(lambda: writer.staged.busy)
    for _ in range(3):
        await by_hand.growth.look()
        await asyncio.sleep(0.01)
    assert writer.size == 10 * MIB
    writer.close()
    block = await sealing
    assert await kit.get(by_hand, block.address) == b"x" * (10 * MIB)
    full.close()
    await by_hand.staging.abort(full.staged)


async def test_a_flush_that_waits_for_room_hears_of_the_cut(by_hand: Worker) -> None:
    full, writer = await Writer.new(by_hand, 60 * MIB), await Writer.new(by_hand)
    writer.write(10 * MIB)
    await by_hand.staging.look(writer.staged.volume)
    waiting = asyncio.create_task(by_hand.staging.reserve(writer.staged, 10 * MIB))
    await by_hand.growth.look()
    with pytest.raises(NoSpace, match="emptied"):
        await waiting
    assert by_hand.store.volumes[0].books.used == 60 * MIB
    full.close()
    writer.close()


async def test_a_cut_file_stays_cut_when_the_worker_starts_anew(tmp_path: Path) -> None:
    config = kit.settings(tmp_path, capacity=CAPACITY)._replace(session_grace_s=60.0)
    async with kit.running(config) as worker:
        writer, whole = await cut_one(worker), await Writer.new(worker, MIB)
        whole.write(MIB)
    writer.write(MIB)  # a hole, then bytes
    writer.close()
    whole.close()
    async with kit.running(config) as worker:
        with pytest.raises(NoSpace, match="before the worker started anew"):
            await worker.seals.seal(1, writer.staged.handle, None)
        with pytest.raises(NoSpace):
            await worker.staging.reserve(worker.staging.find(1, writer.staged.handle), 2 * MIB)
        await kit.until(lambda: Path(writer.staged.path).stat().st_size == 0)
        await worker.seals.abort(1, writer.staged.handle)
        block = await worker.seals.seal(1, whole.staged.handle, None)
        assert await kit.get(worker, block.address) == b"x" * MIB


async def test_a_file_that_its_client_cut_is_not_sealed(worker: Worker) -> None:
    staged = await kit.stage(worker, b"x" * MIB)
    cut_path(staged.path)
    with pytest.raises(NoSpace):
        await worker.sealer.seal(staged, None)


async def test_an_aborted_file_that_is_written_on_is_emptied(by_hand: Worker) -> None:
    """A child of a fork closed it, and the parent goes on writing."""
    writer = await Writer.new(by_hand)
    writer.write(10 * MIB)
    await by_hand.staging.abort(writer.staged)
    books = writer.staged.volume.books
    assert books.held == 10 * MIB
    writer.write(20 * MIB)
    await by_hand.held.probe()
    assert (books.held, writer.size) == (30 * MIB, 30 * MIB), "there is room"
    for _ in range(3):
        writer.write(60 * MIB)
        await by_hand.held.probe()
        await kit.until(lambda: writer.size == 0)
        assert books.used <= 30 * MIB
    assert is_cut(writer.fd)
    writer.close()
    await all_free(by_hand)


async def test_an_aborted_cut_file_never_counts(by_hand: Worker) -> None:
    writer = await cut_one(by_hand)
    writer.write(5 * MIB)
    await by_hand.staging.abort(writer.staged)
    books = writer.staged.volume.books
    assert books.used == 0
    await by_hand.held.probe()
    await kit.until(lambda: writer.size == 0)
    assert books.used == 0
    writer.close()
    await all_free(by_hand)


async def test_slow_eviction_holds_up_nobody(by_hand: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """While room is being made for one file the next looks see the others."""
    evicting, go_on = asyncio.Event(), asyncio.Event()

    async def announce(blocks: Sequence[BlockId]) -> bool:
        evicting.set()
        await go_on.wait()
        return True

    monkeypatch.setattr(by_hand.evictor, "_announce", announce)
    for _ in range(15):
        await kit.put(by_hand, os.urandom(4 * MIB))
    writer, other = await Writer.new(by_hand), await Writer.new(by_hand)
    writer.write(8 * MIB)
    await by_hand.growth.look()
    async with asyncio.timeout(10):
        await evicting.wait()
    other.write(MIB)
    await asyncio.wait_for(by_hand.growth.look(), 10)
    assert other.staged.counted == MIB
    go_on.set()
    await kit.until(lambda: writer.staged.granted == 8 * MIB and other.staged.granted == MIB)
    writer.close()
    other.close()


async def test_it_waits_for_what_may_become_free_no_longer_than_it_says(
    by_hand: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "OVERGROWN_WAIT_S", 0.2)
    block = await kit.put(by_hand, os.urandom(60 * MIB), owned=False)  # cannot be evicted
    writer = await Writer.new(by_hand)
    writer.write(8 * MIB)
    await emptied(by_hand, writer)
    assert by_hand.store.get(block.id) is block
    writer.close()


async def test_the_worker_looks_by_itself(worker: Worker) -> None:
    writer = await Writer.new(worker)
    writer.write(65 * MIB)
    await kit.until(lambda: writer.size == 0 and writer.staged.counted == 0)
    with pytest.raises(KvError):
        await worker.staging.reserve(writer.staged, 1)
    writer.close()
