"""The wall clock may jump either way: it is for what people read, and decides nothing."""

from __future__ import annotations

import pytest

from kvstore.core.errors import NotFound
from tests.unit.master.world import DEFAULT, address, running

YEAR_NS = 365 * 24 * 3600 * 10**9


@pytest.mark.parametrize("jump_ns", [YEAR_NS, -YEAR_NS], ids=["forward", "back"])
async def test_nobody_dies_and_no_name_changes_when_the_clock_jumps(jump_ns: int) -> None:
    async with running() as w:
        w.runtime.now_ns = 10 * YEAR_NS
        await w.join(1)
        await w.put("a", address(1))
        w.runtime.now_ns += jump_ns
        w.master.tick()
        node = w.master.nodes.get("n1")
        assert node is not None
        assert w.master.nodes.live(node)
        assert not (await w.beat(1)).register
        assert w.stat("a").address == address(1)
        await w.put("b", address(2))
        await w.rename("b", "a")
        assert w.stat("a").address == address(2), "the last one wins, whatever its time says"
        await w.remove("a")
        with pytest.raises(NotFound):
            w.stat("a")


async def test_a_dead_worker_is_dead_by_ticks_whatever_the_clock_says() -> None:
    async with running() as w:
        w.runtime.now_ns = 10 * YEAR_NS
        await w.join(1)
        for _ in range(DEFAULT.dead_ticks):
            w.runtime.now_ns -= YEAR_NS // 10
            w.master.tick()
        node = w.master.nodes.get("n1")
        assert node is not None
        assert not w.master.nodes.live(node)
        await w.beat(1)
        assert w.master.nodes.live(node)
