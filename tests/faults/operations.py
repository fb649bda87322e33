"""What is carried out again and again: set-up, act, and what the store holds before and after."""

from __future__ import annotations

import os
from typing import Final

from kvstore.core.errors import Unavailable
from kvstore.master.recovery.rebuild import Kind, Wanted
from kvstore.master.storage.db import MemoryDb
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.scrub import Limits, Scrubber
from kvstore.worker.worker import Worker
from tests.faults.cluster import Cluster, Operation
from tests.sim.workload import OP_TIMEOUT_S

LARGE: Final = 48_000
SILENCE_S: Final = 8.0
"""A worker whose message was lost is back by then: a rebuild waits for it."""


def content(number: int, length_bytes: int = 5000) -> bytes:
    """Of one file: no two have the same."""
    return (number.to_bytes(8, "big") * (length_bytes // 8 + 1))[:length_bytes]


OLD, NEW, OTHER = content(1), content(2, 9000), content(3, 100)
FULL: Final = {f"full/{number}": content(10 + number, LARGE) for number in range(5)}
"""As much as fits on a volume."""


async def _put_new(cluster: Cluster) -> None:
    await cluster.put(0, "a/new", NEW)


async def _put_new_remotely(cluster: Cluster) -> None:
    await cluster.put(2, "a/new", NEW)


async def _replace(cluster: Cluster) -> None:
    await cluster.put(0, "a/1", NEW)


async def _rename(cluster: Cluster) -> None:
    await cluster.call(0, lambda client: client.rename("a/1", "b/1", timeout_s=OP_TIMEOUT_S))


async def _remove(cluster: Cluster) -> None:
    await cluster.call(0, lambda client: client.remove("a/1", timeout_s=OP_TIMEOUT_S))


async def _get(cluster: Cluster) -> None:
    if await cluster.get(0, "a/1") is None:
        raise Unavailable("a miss")


async def _seal_copy(cluster: Cluster) -> None:
    """Of a file that its client still writes."""
    worker = cluster.worker()
    await cluster.run(cluster.workers[0], _seal_while_open(worker))


async def _seal_while_open(worker: Worker) -> None:
    staged, fd = await worker.staging.create(1, len(NEW))
    try:
        os.pwrite(fd, NEW, 0)
        await worker.sealer.seal(staged, None)
    finally:
        os.close(fd)


# ---- between tiers


async def _only_block(cluster: Cluster) -> Block:
    """That the master has called owned: others do not move. Raises Unavailable."""
    block = next(iter(cluster.worker().store.all()), None)
    if block is None:
        raise Unavailable("the block is not there")
    await cluster.until(lambda: block.owned)
    return block


async def _demote(cluster: Cluster) -> None:
    await _promote(cluster)
    worker, block = cluster.worker(), await _only_block(cluster)
    await cluster.run(cluster.workers[0], worker.mover.demote(worker.store.volumes[0], block.used_bytes))
    if block.volume.tier != "ssd":
        raise Unavailable("it was not demoted")


async def _promote(cluster: Cluster) -> None:
    worker, block = cluster.worker(), await _only_block(cluster)
    for _ in range(3):
        if block.volume.tier != "mem":
            worker.store.touch(block, 1)
            await cluster.run(cluster.workers[0], worker.mover.step())
    if block.volume.tier != "mem":
        raise Unavailable("it was not promoted")


# ---- by itself


async def _quota(cluster: Cluster) -> None:
    await cluster.call(0, lambda client: client.set_policy("full", quota_bytes=2 * LARGE, timeout_s=OP_TIMEOUT_S))
    await cluster.until(lambda: len(cluster.worker().store) <= 2)


async def _scrub(cluster: Cluster) -> None:
    await cluster.run(cluster.workers[0], _scrub_all(cluster.worker()))


async def _scrub_all(worker: Worker) -> None:
    scrubber = Scrubber(worker.store, worker.disk, worker.verifier, Limits(1e12, 1.0))
    blocks, before = list(worker.store.all()), worker.counters.scrubbed_blocks
    await scrubber._load()
    for block in blocks:
        await scrubber.scrub(block)
    await scrubber.save()
    if worker.counters.scrubbed_blocks - before < len(blocks) or scrubber._saved is not scrubber._round:
        raise Unavailable("not all of it was scrubbed")


async def _let_burst_end(cluster: Cluster) -> None:
    """What follows at once counts as of the same prefix, and is colder."""
    await cluster.look(1.0)


async def _wait(cluster: Cluster) -> None:
    """Two rounds of whatever a worker does once a second."""
    await cluster.look(2.2)


# ---- starts


async def _stop_worker(cluster: Cluster) -> None:
    """It leaves heat, staging of a session that is over, something in quarantine, and what does not belong there."""
    worker = cluster.worker()
    await cluster.run(cluster.workers[0], _leave_staging(worker))
    ssd = worker.store.volumes[1]
    await cluster.workers[0].stop()
    part = min(os.listdir(f"{ssd.path}/blocks"))
    for name in (
        f"blocks/{part}/stranger",
        "quarantine/old",
        "identity.new",
        "staging/0000000000000000-0000000000000001",
    ):
        with open(f"{ssd.path}/{name}", "wb") as file:
            file.write(OTHER)


async def _leave_staging(worker: Worker) -> None:
    _, fd = await worker.staging.create(7, len(NEW))
    os.close(fd)


async def _start_worker(cluster: Cluster) -> None:
    host = cluster.workers[0]
    if host.worker is not None:  # the one that has come by itself may be without a volume
        await host.stop()
    host.start()
    await cluster.until(lambda: host.worker and host.worker.joined.is_set())
    if len(cluster.worker().store.in_service) < len(host.volume_paths):
        raise Unavailable("a volume is out of service")


async def _stop_master(cluster: Cluster) -> None:
    await cluster.master.stop()


async def _start_master(cluster: Cluster) -> None:
    cluster.master.start()
    await _put_new(cluster)


async def _lose_database(cluster: Cluster) -> None:
    """The master gets an empty drive, and its operator asks for a rebuild, at every start until it is complete."""
    host = cluster.master
    await host.stop()
    host.log.batches.clear()
    host.log.synced, host.log.durable = 0, MemoryDb()
    host.log.forget()
    host.wanted_rebuild = Wanted(Kind.REBUILD, wait_s=SILENCE_S)


async def _rebuild(cluster: Cluster) -> None:
    host = cluster.master
    host.start()
    await cluster.until(lambda: host.master and host.master.rebuild is None, SILENCE_S + 10)
    host.wanted_rebuild = None


A1: Final = {"a/1": OLD}
PUBLISH: Final = Operation("publish", _put_new, A1, A1 | {"a/new": NEW})
REMOTE: Final = Operation("publish-remote", _put_new_remotely, A1, A1 | {"a/new": NEW}, hosts=("n1", "n2"))
REPLACE: Final = Operation("replace", _replace, A1, {"a/1": NEW})
RENAME: Final = Operation("rename", _rename, A1 | {"b/1": OTHER}, {"b/1": OLD})
REMOVE: Final = Operation("remove", _remove, A1, {})
SEAL_COPY: Final = Operation("seal-copy", _seal_copy, A1, A1)
FETCH: Final = Operation("fetch", _get, A1, A1, writer=1, hosts=("n1", "n2"))
EVICT: Final = Operation("evict", _put_new, FULL, FULL | {"a/new": NEW}, _let_burst_end, may_miss=frozenset(FULL))
PROMOTE: Final = Operation("promote", _promote, A1, A1)
DEMOTE: Final = Operation("demote", _demote, A1, A1)
QUOTA: Final = Operation("quota", _quota, FULL, FULL, may_miss=frozenset(FULL))
SCRUB: Final = Operation("scrub", _scrub, A1 | {"b/1": NEW}, A1 | {"b/1": NEW})
START_WORKER: Final = Operation(
    "start-worker", _start_worker, A1 | {"b/1": NEW}, A1 | {"b/1": NEW}, _stop_worker, upkeep=True, linger_s=0.3
)
START_MASTER: Final = Operation("start-master", _start_master, A1, A1 | {"a/new": NEW}, _stop_master)
UPKEEP: Final = Operation("upkeep", _wait, A1, A1, upkeep=True)
REBUILD: Final = Operation("rebuild", _rebuild, A1 | {"b/x/1": NEW}, A1 | {"b/x/1": NEW}, _lose_database)
