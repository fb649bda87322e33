"""One operation under one fault, for N = 1, 2, 3 … until it passes untouched."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.worker.blocks import store
from tests.faults.cluster import Cluster, Operation
from tests.faults.operations import NEW
from tests.sim.faults import Violation
from tests.sim.loop import SimLoop, Stuck
from tests.sim.run import _bury, _surroundings, freeze
from tests.sim.trace import Trace
from tests.support.nth import Fault, Trigger, seams

SEED: Final = 1
MAX_S: Final = 300.0
"""Of virtual time, for one case."""
PROBE: Final = b"whether all works as before"


class Case(NamedTuple):
    """`hit`: the call that failed, "" when there was none any more; `error`: what did not hold then."""

    hit: str
    error: str
    story: list[str]


def fail_each(operation: Operation, fault: Fault) -> int:
    """Returns how many calls there are. Raises AssertionError with the first case in which something did not hold."""
    with _frozen():
        return _fail_each(operation, fault)


def _fail_each(operation: Operation, fault: Fault) -> int:
    at = 1
    while True:
        case = run_case(operation, fault, at)
        if case.error:
            lines = [*case.story, f"{operation}: call {at}, {fault.name} ({case.hit or 'untouched'}): {case.error}"]
            raise AssertionError("\n".join(lines))
        if not case.hit:
            return at - 1
        at += 1


def run_case(operation: Operation, fault: Fault, at: int) -> Case:
    loop = SimLoop(SEED)
    trace, trigger = Trace(loop.time), Trigger(fault, at, operation.hosts, with_upkeep=operation.upkeep)
    root = Path(tempfile.mkdtemp(prefix="kvnth-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    clusters: list[Cluster] = []
    error = ""

    async def course() -> None:
        clusters.append(cluster := Cluster(loop, root, trace, trigger, operation))
        with _noting_purges(cluster):
            await _course(cluster)

    contents = {*operation.before.values(), *operation.after.values(), NEW, PROBE}
    with _surroundings(loop, SEED), seams(trigger, contents):
        try:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(asyncio.wait_for(course(), MAX_S))
        except (Violation, Stuck, TimeoutError) as violation:
            error = str(violation) or repr(violation)
        finally:
            _bury(loop, clusters)  # type: ignore[arg-type]
            shutil.rmtree(root, ignore_errors=True)
    return Case(trigger.hit.replace(str(root), ""), error.replace(str(root), ""), list(trace.lines)[-40:])


async def _course(cluster: Cluster) -> None:
    """Raises Violation."""
    before, after = cluster.operation.before, cluster.operation.after
    await cluster.begin()
    is_done = await cluster.attempt_under_fault()
    await cluster.check_bytes()
    await cluster.mend()
    found = await cluster.check_all(*([after] if is_done else [after, before]))
    if not is_done and (cluster.may_be_lost or found is before or before == after):
        await _again(cluster)
    await cluster.put(0, "probe", PROBE)
    await cluster.end()


async def _again(cluster: Cluster) -> None:
    """Without a fault."""
    if cluster.may_be_lost:
        await cluster.put_all()
        cluster.may_be_lost.clear()
        await cluster.check_all(cluster.operation.before)
    if not await cluster.attempt():
        raise Violation("the same operation fails once more")
    await cluster.check_all(cluster.operation.after)


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # Hypothesis asks who refers to its objects


@contextlib.contextmanager
def _noting_purges(cluster: Cluster) -> Iterator[None]:
    """Volumes with blocks that go out of service."""

    def note(record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and "out of service with" in record.msg and record.args[1]:
            cluster.failed()
        return True

    log = logging.getLogger(store.__name__)
    log.addFilter(note)
    try:
        yield
    finally:
        log.removeFilter(note)
