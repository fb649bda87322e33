"""What must hold once everything works again: the cluster comes to rest by itself, and everything agrees."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Final

from kvstore.core.errors import KvError
from kvstore.core.types import Address, BlockId
from tests.sim.faults import Violation
from tests.sim.programs import Host, WorkerHost
from tests.sim.world import World
from tests.support.accounting import check_exact, files_below

SETTLE_S: Final = 15.0
"""Grace of sessions, a full report, and time for what follows from them."""
PATIENCE_S: Final = 30.0
"""Beyond that."""
STOP_S: Final = 15.0
READ_S: Final = 60.0
SCRUB_S: Final = 10.0
BOOKS_S: Final = 5.0


class Rest:
    def __init__(self, world: World) -> None:
        self._world = world

    async def run(self) -> None:
        """Raises Violation."""
        world = self._world
        await asyncio.wait_for(asyncio.gather(*world.orderly, return_exceptions=True), STOP_S)
        for client in world.clients:
            await self._stop(client)  # what they staged and never published goes with their sessions
        await world.look(SETTLE_S)
        await world.operator.discard_rest()
        for worker in world.workers:
            await self._scrub(worker)
        await self._until_agreed()
        await self._check_books()
        await self._read_all()
        await self._stop_all()

    async def _scrub(self, host: WorkerHost) -> None:
        """Verify every block, so that what is damaged is where it belongs."""
        if host.process is None or host.worker is None:
            raise Violation(f"{host.name} does not run")
        store, verify = host.worker.store, host.worker.verifier.verify

        async def scrub() -> None:
            for block in list(store.all()):
                with contextlib.suppress(KvError):
                    await verify(block)

        await asyncio.wait_for(host.process.spawn(scrub()), SCRUB_S)

    async def _until_agreed(self) -> None:
        world, difference = self._world, ""
        for _ in range(int(PATIENCE_S)):
            difference = self._difference()
            if not difference:
                return
            await world.look(1.0)
        raise Violation(f"at rest: {difference}", [difference.rpartition(" ")[2]])

    def _difference(self) -> str:
        """What does not agree yet, in words; "" when all does."""
        world = self._world
        master = world.master.master
        if master is None:
            return "there is no master"
        for worker in world.workers:
            if worker.worker is None or not worker.worker.joined.is_set():
                return f"{worker.name} has not joined"
            node = master.nodes.get(worker.name)
            if node is None or not master.nodes.live(node):
                return f"{worker.name} is not live"
            if len(worker.worker.store.in_service) != len(worker.volume_paths):
                return f"{worker.name} has a volume out of service"
        return self._replicas_differ()

    def _replicas_differ(self) -> str:
        world = self._world
        believed = {pair for pair in world.ledger.replicas() if world.is_live(pair[0])}
        there: set[tuple[int, bytes]] = set()
        for worker in world.workers:
            assert worker.worker is not None
            for volume in worker.worker.store.in_service:
                there |= {(volume.id, block.pack()) for block in _blocks_in(volume.path)}
        if missing := sorted(believed - there):
            return f"the master believes in a replica that is not there, of block {_text(missing[0][1])}"
        if unknown := sorted(there - believed):
            return f"the master does not know of a file, of block {_text(unknown[0][1])}"
        return ""

    async def _check_books(self) -> None:
        for worker in self._world.workers:
            for last in (False, False, True):
                if await self._agree(worker, last):
                    break
                await self._world.look(1.0)

    async def _agree(self, host: WorkerHost, last: bool) -> bool:
        """Whether books and disk do. Not while the worker itself looks for who holds its files: then ask again."""
        process, worker = host.process, host.worker
        assert process is not None
        assert worker is not None
        try:
            await asyncio.wait_for(process.spawn(check_exact(worker)), BOOKS_S)
        except AssertionError as error:
            if last:
                raise Violation(f"{host.name}: books and disk differ: {error}") from None
            return False
        if len(worker.staging):
            raise Violation(f"{host.name}: {len(worker.staging)} staging files are left over")
        return True

    async def _read_all(self) -> None:
        """Every name resolves to a version it may hold, from everywhere; what is there can be read."""
        world = self._world
        for reader in world.new_clients():
            await asyncio.wait_for(reader.process.spawn(reader.check_all()), READ_S)
        world.check()
        world.check_durable()
        world.check()

    async def _stop_all(self) -> None:
        world = self._world
        for host in [*world.clients, *world.workers, world.master]:
            await self._stop(host)
        world.check()

    async def _stop(self, host: Host) -> None:
        process = host.process
        assert process is not None
        try:
            await asyncio.wait_for(host.stop(), STOP_S)
        except TimeoutError:
            raise Violation(f"{host.name} did not stop within {STOP_S} s") from None
        left = [str(task.get_coro()) for task in process.tasks]
        if left:
            raise Violation(f"{host.name} left tasks behind: {left[:3]}")


def _blocks_in(volume: str) -> list[BlockId]:
    return [Address.parse(os.path.basename(path)).block for path in files_below(f"{volume}/blocks")]


def _text(block: bytes) -> str:
    return str(BlockId.unpack(block))
