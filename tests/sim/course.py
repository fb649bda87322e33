"""The course of a seed: load under faults, then peace, and what must hold then."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from tests.sim.nemesis import Nemesis
from tests.sim.rest import Rest
from tests.sim.world import LOOK_S, World

DRILLS: Final = 0.2
"""Of the seeds lose the master's disk once more, in peace."""


async def run_course(world: World, load_s: float, faults: Sequence[str]) -> None:
    """Raises Violation. `faults`: their kinds, () for all."""
    for host in world.servers:
        host.start()
    await asyncio.sleep(0.5 + world.random.random())
    until_s = world.loop.time() + load_s
    nemesis = Nemesis(world, faults)
    load = [user.process.spawn(user.run(until_s)) for user in world.users]
    breaking = world.loop.create_task(nemesis.run(until_s))
    try:
        await _watch(world, load, breaking)
    finally:
        breaking.cancel()
        await asyncio.gather(breaking, return_exceptions=True)
    await nemesis.heal()
    if world.random.random() < DRILLS:
        await world.operator.drill()
        world.check()
    await Rest(world).run()


async def _watch(world: World, load: Sequence[asyncio.Task[None]], breaking: asyncio.Task[None]) -> None:
    while not all(task.done() for task in load):
        await world.look(LOOK_S)
        if breaking.done():
            breaking.result()
    for task in load:
        task.result()
