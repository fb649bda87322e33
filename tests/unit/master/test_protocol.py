"""Rules of the protocol that the tests of the verbs would not miss, see ``tests/RULES.md``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from kvstore.core.errors import KvError
from kvstore.core.types import BlockId
from kvstore.master.namespace.publish import Mode
from kvstore.master.storage.db import Cf
from kvstore.master.workers.reports import Full, Verdict
from tests.unit.master import world
from tests.unit.master.world import World, address, running


async def test_reports_create_neither_blocks_nor_names() -> None:
    """Rule 13: whatever a worker says of an id that nobody published, in a change or in full."""
    async with running() as w:
        await w.join()
        unknown = address(3)
        told = await w.report(held=[(unknown, 1)], fence=1)
        full = Full(1, b"", b"\xff" * 16, [unknown.block.pack()])
        in_full = await w.report(full=full, fence=1)
        assert list(told.held.verdicts) == list(in_full.full.verdicts) == [Verdict.UNKNOWN]
        assert world.keys(w.db, Cf.BLOCKS) == world.keys(w.db, Cf.REPLICAS) == set()
        assert await w.names() == []
        await w.report(nowhere=[unknown], fence=1)
        assert world.keys(w.db, Cf.BLOCKS) == set()
        assert (await w.put("f", unknown)).created, "it can still be published"


async def test_a_report_that_comes_twice_does_not_undo_what_came_between() -> None:
    """Rule 15: the reply was lost, and the block was published meanwhile. The states of the message are old ones."""
    async with running() as w:
        await w.join()
        await w.report(nowhere=[address(3)], number=1, digest=5, fence=1)
        await w.put("f", address(3))
        again = await w.report(nowhere=[address(3)], number=1, digest=5, fence=1)
        assert (again.gap, again.next_report) == (False, 2)
        assert w.stat("f").replicas


# ---- nothing is said that a crash could take back (rule 19)


class Gate:
    """Each flush of the log waits until it is let through."""

    def __init__(self, world: World) -> None:
        self._permits, self._in_thread = asyncio.Semaphore(0), world.runtime.in_thread
        world.runtime.in_thread = self._wait  # type: ignore[method-assign]

    def let_through(self, flushes: int = 100) -> None:
        for _ in range(flushes):
            self._permits.release()

    async def _wait(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        await self._permits.acquire()
        return await self._in_thread(function, *args, **kwargs)


async def settled() -> None:
    """Whatever can go on without a flush has done so."""
    for _ in range(100):
        await asyncio.sleep(0)


VERBS: Final[dict[str, Callable[[World], Awaitable[object]]]] = {
    "publish": lambda w: w.put("f", address(2)),
    "a publish that changes nothing": lambda w: w.put("new", address(3), mode=Mode.IF_ABSENT),
    "mkdir": lambda w: w.mkdir("d"),
    "mkdir of what is there": lambda w: w.mkdir("new directory", parents=True),
    "remove": lambda w: w.remove("old"),
    "remove of what is gone": lambda w: w.remove("gone"),
    "rename": lambda w: w.rename("old", "other"),
    "rename of what is gone": lambda w: w.rename("gone", "other"),
    "rename to what is there": lambda w: w.rename("old", "new", no_replace=True),
    "report": lambda w: w.report(held=[(address(1), 1)]),
    "register": lambda w: w.join(2),
    "policy": lambda w: w.policy("", quota_bytes=1 << 30),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_no_reply_and_no_refusal_comes_before_what_it_rests_on_is_durable(verb: str) -> None:
    async with running() as w:
        await w.join()
        await w.put("old", address(1))
        await w.put("gone", address(9))
        gate = Gate(w)
        before = [asyncio.ensure_future(work) for work in (
            w.put("new", address(4)), w.mkdir("new directory"), w.remove("gone")
        )]  # fmt: skip
        await settled()
        reply = asyncio.ensure_future(VERBS[verb](w))
        await settled()
        assert not reply.done()
        gate.let_through()
        async with asyncio.timeout(10):
            results = await asyncio.gather(reply, *before, return_exceptions=True)
        assert isinstance(results[0], KvError) or not isinstance(results[0], BaseException)
        assert results[1:] == [task.result() for task in before]


async def test_an_unlink_order_waits_for_the_removal_that_it_comes_from() -> None:
    """The heartbeat was durable; what was removed while it waited for that is not."""
    async with running() as w:
        await w.join()
        await w.put("f", address(1))
        gate = Gate(w)
        earlier = asyncio.ensure_future(w.mkdir("d"))
        await settled()
        beat = asyncio.ensure_future(w.beat())
        await settled()
        removal = asyncio.ensure_future(w.remove("f"))
        await settled()
        gate.let_through(1)
        await settled()
        assert (earlier.done(), removal.done(), beat.done()) == (True, False, False)
        gate.let_through()
        async with asyncio.timeout(10):
            assert [BlockId.unpack(block) for block in (await beat).unlink] == [address(1).block]
            await removal
