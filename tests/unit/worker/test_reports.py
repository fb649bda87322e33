"""What a worker and its master tell each other: reports, verdicts, fences, refusals."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.core.errors import AlreadyExists, Denied, Unavailable
from kvstore.core.hashing import hash_block
from kvstore.core.types import Address, BlockId, Seen
from kvstore.pb import master_pb2 as m
from kvstore.runtime import SystemRuntime
from kvstore.worker import main as worker_main
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.reports.membership import Membership
from kvstore.worker.reports.report import Judged
from kvstore.worker.settings import VolumeSettings
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.volumes.identity import Identity
from kvstore.worker.volumes.opening import open_volumes
from kvstore.worker.volumes.volume import Volume, open_volume
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit
from tests.support.fake_master import FakeMaster, make, running, split
from tests.support.worker_kit import MIB


@pytest.fixture
async def master() -> AsyncIterator[FakeMaster]:
    fake = make()
    async with running(fake):
        yield fake


@pytest.fixture
async def worker(master: FakeMaster, tmp_path: Path) -> AsyncIterator[Worker]:
    async with kit.running(kit.settings(tmp_path, master=master.endpoint), joined=True) as worker:
        worker.sessions.enter(1)
        yield worker


async def put(worker: Worker, master: FakeMaster, data: bytes) -> Block:
    """A published block."""
    block = await kit.put(worker, data)
    master.publish(block.address)
    return block


async def test_registration_says_everything(worker: Worker, master: FakeMaster) -> None:
    [told] = master.registrations
    assert (told.node, told.endpoint, told.boot) == ("a", worker.endpoint, worker.store.fences.boot)
    assert [v.id for v in told.volumes] == [worker.store.volumes[0].id]
    assert [(f.boot, f.counter) for f in told.fences] == [(told.boot, 1)]
    await master.until(lambda: "a" in master.beats)


async def test_published_blocks_become_owned_and_the_fence_follows(worker: Worker, master: FakeMaster) -> None:
    first, second = [await kit.put(worker, os.urandom(100), owned=False) for _ in range(2)]
    await master.until(lambda: second.id in master.replicas)
    assert not first.owned
    master.publish(first.address)
    await master.until(lambda: 2 in master.fences.values())
    assert (first.owned, second.owned) == (True, False)


async def test_blocks_of_a_living_session_are_never_made_dead(worker: Worker, master: FakeMaster) -> None:
    block = await kit.put(worker, b"data", owned=False)
    block.since_s -= 1000
    count = len(master.reports)
    await master.until(lambda: len(master.reports) > count + 2)
    assert block.id not in master.dead


async def test_what_an_ended_session_left_is_made_dead_then_unlinked(worker: Worker, master: FakeMaster) -> None:
    block = await kit.put(worker, b"data", owned=False)
    worker.sessions.leave(1, worker.runtime.monotonic_s())
    await master.until(lambda: block.id in master.dead)
    await master.until(lambda: any(block.id in split(r.nowhere_ids) for r in master.reports))
    assert kit.files(worker, "blocks") == []
    assert worker.store.volumes[0].books.used == 0


async def test_a_block_that_its_writer_gave_up_is_made_dead_then_unlinked(worker: Worker, master: FakeMaster) -> None:
    unwanted, other = await kit.put(worker, b"data", owned=False), await kit.put(worker, b"other", owned=False)
    worker.store.give_up(unwanted)
    await master.until(lambda: any(unwanted.id in split(r.nowhere_ids) for r in master.reports))
    assert master.dead == {unwanted.id}
    assert [p.name for p in kit.files(worker, "blocks")] == [other.address.file_name]


async def test_a_copy_that_nobody_published_goes_with_the_next_one(worker: Worker, master: FakeMaster) -> None:
    """Its client's process died before it knew of it, and its successor does not; one that was published stays."""
    staged = await kit.stage(worker, b"data")
    lost = await worker.seals.seal_copy(1, staged.handle)
    published = await worker.seals.seal_copy(1, staged.handle)
    master.publish(published.address)
    last = await worker.seals.seal_copy(1, staged.handle)
    await master.until(lambda: any(lost.id in split(r.nowhere_ids) for r in master.reports))
    await kit.until(lambda: published.owned)
    await worker.seals.abort(1, staged.handle)
    await master.until(lambda: any(last.id in split(r.nowhere_ids) for r in master.reports))
    assert [p.name for p in kit.files(worker, "blocks")] == [published.address.file_name]


@pytest.mark.parametrize("why", ["session over", "given up"])
async def test_a_block_published_in_the_last_moment_survives_being_made_dead(
    worker: Worker, master: FakeMaster, why: str
) -> None:
    """The Publish overtakes the report that calls the block dead: the verdict decides, not the worker's intent."""
    block = await kit.put(worker, b"data", owned=False)
    take, told = master._take, asyncio.Event()

    def publish_first(request: m.ReportRequest) -> None:
        if block.id in split(request.dead_ids):
            master.publish(block.address)
            told.set()
        take(request)

    master._take = publish_first  # type: ignore[method-assign]
    if why == "given up":
        worker.store.give_up(block)
    else:
        worker.sessions.leave(1, worker.runtime.monotonic_s())
    async with asyncio.timeout(10):
        await told.wait()
    await kit.until(lambda: block.owned)
    assert not block.given_up
    assert await kit.get(worker, block.address) == b"data"


@pytest.mark.parametrize("own", [False, True], ids=["of another worker", "of our own, back from a peer"])
async def test_a_replica_whose_name_went_while_it_was_fetched_does_not_stay(
    tmp_path: Path, master: FakeMaster, own: bool
) -> None:
    """The master has forgotten the id by now: it will neither own it nor call it dead, and no session is its owner, so
    that there is no grace to wait for."""
    settings = kit.settings(tmp_path, master=master.endpoint)._replace(session_grace_s=600)
    async with kit.running(settings, joined=True) as worker:
        data, id = b"data", BlockId(99, 1)
        if own:
            id = worker.store.fences.mint()
            worker.store.fences.settle(id)
            await master.until(lambda: id.counter < master.fences.get(id.boot, 0))
        address = Address(id, len(data), hash_block(data))
        async with worker.staging.private(len(data)) as (staged, sink):
            await sink.write(data)
            block = await worker.sealer.install_replica(staged, address, sink.state())
        await master.until(lambda: any(id in split(r.nowhere_ids) for r in master.reports))
        await kit.until(lambda: worker.store.volumes[0].books.used == 0)
        assert not os.path.exists(block.path)
        assert worker.counters.tiers["ssd"].unlinked[Reason.ORPHAN].files == 1


async def test_removed_blocks_are_unlinked_by_order_and_reported(worker: Worker, master: FakeMaster) -> None:
    block = await put(worker, master, b"data")
    master.remove(block.address)
    master.commands.append(m.Command(unlink=m.Unlink(block_ids=block.id.pack() + BlockId(9, 9).pack())))
    await master.until(lambda: {block.id, BlockId(9, 9)} <= {b for r in master.reports for b in split(r.nowhere_ids)})
    assert kit.files(worker, "blocks") == []


async def test_evict_tells_first_and_unlinks_after_the_reply(
    worker: Worker, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.worker.reports.report.ANNOUNCE_WAIT_S", 30.0)  # a busy machine is no absent master
    block = await put(worker, master, os.urandom(MIB))
    told = asyncio.Event()
    take = master._take

    def look(request: m.ReportRequest) -> None:
        if block.id in split(request.nowhere_ids):
            assert os.path.exists(block.path), "told before it is gone"
            told.set()
        take(request)

    master._take = look  # type: ignore[method-assign]
    assert await worker.evictor.evict([block], Reason.CAPACITY) == MIB
    assert told.is_set()
    assert not os.path.exists(block.path)


async def test_without_a_master_the_cap_holds_and_the_eviction_is_told_later(
    worker: Worker, master: FakeMaster
) -> None:
    block = await put(worker, master, os.urandom(MIB))
    master.fail = Unavailable("gone")
    assert await worker.evictor.evict([block], Reason.CAPACITY) == MIB
    master.fail = None
    await master.until(lambda: any(block.id in split(r.nowhere_ids) for r in master.reports))


async def test_a_reader_that_finds_nothing_repairs_the_map(worker: Worker, master: FakeMaster) -> None:
    block = await put(worker, master, b"data")
    await master.until(lambda: block.id in master.replicas)
    os.unlink(block.path)
    block.stamp = None
    with pytest.raises(Exception, match=r"gone|No such file"):
        await kit.get(worker, block.address)
    await master.until(lambda: block.id not in master.replicas)
    assert worker.store.volumes[0].books.used == 0


async def test_a_gap_makes_a_full_report(worker: Worker, master: FakeMaster) -> None:
    blocks = [await put(worker, master, os.urandom(10)) for _ in range(3)]
    await master.until(lambda: all(b.id in master.replicas for b in blocks))
    master.replicas.clear()
    master.next_report["a"] = 1000
    worker.store.on_change(blocks[0].id)
    await master.until(lambda: all(b.id in master.replicas for b in blocks))
    assert master.reports[-1].number >= 1000


async def test_full_reports_come_in_pieces_that_cover_every_id(
    worker: Worker, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await master.until(lambda: any(r.HasField("full") for r in master.reports))  # the one of the registration
    monkeypatch.setattr("kvstore.worker.reports.fullreport.MAX_BATCH", 2)
    blocks = [await put(worker, master, os.urandom(10)) for _ in range(5)]
    stray = BlockId(3, 3)
    master.replicas[stray] = {worker.store.volumes[0].id}
    count = len(master.reports)
    master.commands.append(m.Command(full_report=m.FullReport()))
    await master.until(lambda: sum(1 for r in master.reports[count:] if r.HasField("full")) == 3)
    pieces = [r.full for r in master.reports[count:] if r.HasField("full")]
    assert [len(split(p.ids)) for p in pieces] == [2, 2, 1]
    assert (pieces[0].first, pieces[-1].last) == (b"", b"")
    for before, after in itertools.pairwise(pieces):
        assert int.from_bytes(after.first) == int.from_bytes(before.last) + 1
    assert {b.id for b in blocks} == {i for p in pieces for i in split(p.ids)}
    assert not master.replicas[stray], "what the master had besides is gone"


async def test_a_restart_keeps_blocks_and_the_fences_of_earlier_boots(master: FakeMaster, tmp_path: Path) -> None:
    settings = kit.settings(tmp_path, master=master.endpoint)._replace(session_grace_s=60)
    async with kit.running(settings, joined=True) as worker:
        owned = await kit.put(worker, b"owned", owned=False)
        unpublished = await kit.put(worker, b"unpublished", owned=False)
        master.publish(owned.address)
        await master.until(lambda: 2 in master.fences.values())
    async with kit.running(settings, joined=True) as worker:
        fences = {f.boot: f.counter for f in master.registrations[-1].fences}
        assert fences == {worker.store.fences.boot: 1, owned.id.boot: 1}, "nobody knows yet which one was published"
        master.publish(unpublished.address)
        await master.until(lambda: worker.store.fences.boot in master.fences and owned.id.boot not in master.fences)
        assert await kit.get(worker, owned.address) == b"owned"
        assert await kit.get(worker, unpublished.address) == b"unpublished"


async def test_a_master_that_asks_gets_a_new_registration(worker: Worker, master: FakeMaster) -> None:
    block = await put(worker, master, b"data")
    master.replicas.clear()
    master.next_report.clear()
    master.commands.append(m.Command(register=m.Reregister()))
    await master.until(lambda: len(master.registrations) == 2 and block.id in master.replicas)


async def test_another_cluster_is_refused(worker: Worker, master: FakeMaster) -> None:
    master.cluster = "another"
    error = await asyncio.wait_for(asyncio.shield(worker.refused), 10)
    assert isinstance(error, Denied)
    assert "another" in error.message


@pytest.mark.allow_errors("lost state", "rolled back earlier")
async def test_a_rolled_back_master_collects_nothing_even_after_a_restart(master: FakeMaster, tmp_path: Path) -> None:
    settings = kit.settings(tmp_path, master=master.endpoint)
    master.sequence = 100
    async with kit.running(settings, joined=True) as worker:
        block = await put(worker, master, b"data")
        master.publish(block.address)
        await master.until(lambda: block.id in master.replicas)
    master.sequence = 50
    master.owned.clear()
    master.dead.add(block.id)
    async with kit.running(settings, joined=True) as worker:
        await master.until(lambda: any(block.id in split(r.full.ids) for r in master.reports[-3:]))
        worker.master_sync.on_verdicts([Judged(block.id, m.DEAD)])
        worker.master_sync._unlink(block.id.pack())
        assert not worker.membership.collects
        assert await kit.get(worker, block.address) == b"data"
    master.sequence = 500
    async with kit.running(settings, joined=True) as worker:
        assert not worker.membership.collects, "it has grown past what we knew, and is still not the same"
    async with kit.running(settings._replace(accept_rollback=True), joined=True) as worker:
        await master.until(lambda: any(block.id in split(r.nowhere_ids) for r in master.reports))


@pytest.mark.allow_errors("lost state", "rolled back earlier")
async def test_a_master_that_finds_a_worker_ahead_collects_nothing_even_after_a_restart(
    master: FakeMaster, tmp_path: Path
) -> None:
    """Its sequence has overtaken what the worker has seen: only its word at the registration tells."""
    settings = kit.settings(tmp_path, master=master.endpoint)
    master.incarnation, master.sequence = 11, 100
    async with kit.running(settings, joined=True) as worker:
        block = await put(worker, master, b"data")
        await master.until(lambda: block.id in master.replicas)
    assert list(master.registrations[0].seen) == []
    master.incarnation, master.sequence, master.rolled_back = 12, 500, True
    for _ in range(2):
        async with kit.running(settings, joined=True) as worker:
            assert list(master.registrations[-1].seen) == [m.Seen(incarnation=11, sequence=100)], "the evidence stays"
            worker.master_sync.on_verdicts([Judged(block.id, m.DEAD)])
            assert await kit.get(worker, block.address) == b"data"
    master.rolled_back = False
    async with kit.running(settings._replace(accept_rollback=True), joined=True) as worker:
        assert (master.registrations[-1].sequence, list(master.registrations[-1].seen)) == (0, [])
        assert worker.membership.collects
    assert worker.store.volumes[0].identity.incarnation == 12


@pytest.mark.allow_errors("lost state")
@pytest.mark.parametrize("noticed_by", ["heartbeat", "report"])
async def test_another_start_of_the_master_is_registered_with_before_anything_of_it_counts(
    worker: Worker, master: FakeMaster, monkeypatch: pytest.MonkeyPatch, noticed_by: str
) -> None:
    """Its unlink order and its verdicts may be those of a master that lost state: it has to judge us first."""
    block = await put(worker, master, b"data")
    if noticed_by == "report":
        monkeypatch.setattr(worker.master_sync, "on_beat", lambda reply, known: None)
    await master.until(lambda: block.id in master.replicas)
    master.incarnation, master.sequence, master.rolled_back = 12, 500, True
    master.owned.clear()
    master.dead.add(block.id)
    master.commands.append(m.Command(unlink=m.Unlink(block_ids=block.id.pack())))
    worker.store.on_change(block.id)
    await master.until(lambda: len(master.registrations) == 2)
    await kit.until(lambda: worker.membership.rolled_back)
    assert await kit.get(worker, block.address) == b"data"


async def test_a_master_that_only_started_again_goes_on_where_it_was(worker: Worker, master: FakeMaster) -> None:
    block = await put(worker, master, b"data")
    master.incarnation, master.sequence = 12, 7
    await master.until(lambda: len(master.registrations) == 2)
    await kit.until(lambda: worker.membership.seen == (Seen(12, 7),))
    master.remove(block.address)
    master.commands.append(m.Command(unlink=m.Unlink(block_ids=block.id.pack())))
    await master.until(lambda: any(block.id in split(r.nowhere_ids) for r in master.reports))


async def test_the_sequence_is_kept_beside_the_data(master: FakeMaster, tmp_path: Path) -> None:
    master.sequence = 77
    settings = kit.settings(tmp_path, master=master.endpoint)
    async with kit.running(settings, joined=True):
        pass
    async with kit.running(settings._replace(master=[kit.NOBODY])) as worker:
        assert (worker.membership.cluster, worker.membership.sequence) == (master.cluster, 77)


async def test_why_it_is_not_registered_is_what_the_master_said(
    master: FakeMaster, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master that refuses is there: "no master yet" would send its operator the wrong way."""
    master.refuse = AlreadyExists("node a lives at h:1")
    monkeypatch.setattr(worker_main, "JOIN_WAIT_S", 0.0)
    async with kit.running(kit.settings(tmp_path, master=master.endpoint)) as worker:
        await kit.until(lambda: worker.complaint)
        monkeypatch.setattr(worker, "start", nothing)
        await worker_main._start(worker)
        assert "not registered with a master yet (node a lives at h:1); trying on" in caplog.text
        ready = worker_main._ready(worker)
        assert ready() == "not registered with a master: node a lives at h:1"
        master.refuse = None
        await worker.joined.wait()
        await kit.until(lambda: not worker.complaint)
        assert ready() is None


async def nothing() -> None:
    pass


async def denied() -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


async def test_what_it_may_not_use_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden(Disk):
        def make_directory(self, path: str) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", path)

    with pytest.raises(Denied, match=r"worker\.volumes: .*: Permission denied"):
        await open_volumes(kit.settings(tmp_path), SystemRuntime(1), Forbidden())
    async with kit.running(kit.settings(tmp_path)) as worker:
        monkeypatch.setattr(worker, "start", denied)
        with pytest.raises(Denied, match=r"worker\.socket: .*a\.sock: Permission denied"):
            await worker_main._start(worker)


def volumes_that_have_seen(root: Path, *points: Seen) -> list[Volume]:
    volumes = []
    for i, seen in enumerate(points):
        volume = open_volume(VolumeSettings("ssd", str(root / f"v{i}"), MIB, 0), i + 1, Disk())
        volume.write_identity(Identity(volume.id, "c", seen.sequence, incarnation=seen.incarnation))
        volume.close()
        volumes.append(volume)
    return volumes


def test_volumes_that_have_seen_different_histories_are_all_told(tmp_path: Path) -> None:
    points = [Seen(11, 100), Seen(12, 60), Seen(12, 60), Seen(0, 7)]
    found = Membership(volumes_that_have_seen(tmp_path, *points))
    assert set(found.seen) == {Seen(11, 100), Seen(12, 60)}
    assert found.sequence == 100
    found.registered(13, "c", 200, 100, rolled_back=False)
    assert found.seen == (Seen(13, 200),)
    assert found.is_judge(13)
    assert found.is_judge(0), "it does not say"
    assert not found.is_judge(14)


@pytest.mark.allow_errors("lost state")
def test_what_was_seen_of_the_lost_history_stays_as_evidence(tmp_path: Path) -> None:
    member = Membership(volumes_that_have_seen(tmp_path, Seen(11, 100)))
    member.registered(12, "c", 500, 100, rolled_back=True)
    member.meet("c", 501, 100)
    assert not member.collects
    assert member.seen == (Seen(11, 100),)
    member.accept_rollback()
    assert (member.collects, list(member.seen), member.sequence) == (True, [], 0)
