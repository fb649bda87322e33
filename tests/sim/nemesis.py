"""Whoever breaks things: one fault after the other, drawn by the seed, each over after a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from tests.sim.programs import Host, WorkerHost
from tests.sim.weather import Weather
from tests.sim.world import World

PAUSE_S: Final = 1.5
"""Between two faults, on average."""
LONGEST_S: Final = 8.0
"""Of what is over by itself: a stop, a partition, an outage."""
JUMP_NS: Final = 3600 * 10**9


class Nemesis:
    """Faults that are mild are frequent; each seed leaves out some kinds, so that others have more room.

    `only`: names of the kinds to draw from, () for all.
    """

    def __init__(self, world: World, only: Sequence[str] = ()) -> None:
        self._world = world
        self._random = world.random
        self._late: set[asyncio.Task[None]] = set()
        faults: list[tuple[Callable[[], str], int]] = [
            (self._crash_worker, 4), (self._crash_master, 4), (self._kill_in_a_call, 4), (self._power_worker, 3),
            (self._power_master, 4), (self._wipe, 1), (self._partition, 4), (self._weather, 6), (self._freeze, 3),
            (self._jump, 1), (self._rot, 6), (self._fill, 2), (self._break_drive, 1), (self._break_log, 1),
            (self._slow_drive, 2), (self._swap, 2), (self._restart_worker, 2),
            (self._echo, 2), (self._lose_disk, 1),
        ]  # fmt: skip
        kept = [each for each in faults if self._random.random() < 0.6] or faults
        if only:
            kept = [each for each in faults if each[0].__name__.strip("_") in only]
        self._faults, self._weights = zip(*kept, strict=True)

    async def run(self, until_s: float) -> None:
        loop = self._world.loop
        while loop.time() < until_s:
            (fault,) = self._random.choices(self._faults, self._weights)
            self._world.trace.add(f"NEMESIS {fault.__name__.strip('_')}: {fault()}")
            await asyncio.sleep(self._random.expovariate(1 / PAUSE_S))

    async def heal(self) -> None:
        """Everything works again, and is there."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        world = self._world
        world.operator.go_away()
        world.net.weather, world.net.cut = Weather(), set()
        world.master.log.broken = 0.0
        for host in world.servers:
            if host.process is not None:
                host.process.slow = 1.0
                host.process.resume()
        for worker in world.workers:
            worker.drive.broken, worker.drive.full, worker.disk.kill_at = 0.0, False, 0
            if worker.worker is not None and len(worker.worker.store.in_service) < len(worker.volume_paths):
                worker.crash()  # a failed drive is in service again after a restart only
        for host in world.servers:
            host.start()
        await world.operator.mend()

    def _after(self, undo: Callable[[], object], longest_s: float = LONGEST_S) -> str:
        """Undo it in a while."""
        delay_s = self._random.random() * longest_s

        async def later() -> None:
            await asyncio.sleep(delay_s)
            undo()

        task = asyncio.get_running_loop().create_task(later())
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        return f"for {delay_s:.2f} s"

    def _worker(self) -> WorkerHost:
        return self._random.choice(self._world.workers)

    def _down(self, host: Host) -> str:
        host.wanted = False
        return f"{host.name} {self._after(host.start)}"

    def _crash_worker(self) -> str:
        worker = self._worker()
        worker.crash()
        return self._down(worker)

    def _crash_master(self) -> str:
        self._world.master.crash()
        return self._down(self._world.master)

    def _kill_in_a_call(self) -> str:
        worker = self._worker()
        worker.disk.kill_at = self._random.randint(1, 40)
        self._after(worker.start)
        return f"{worker.name} before system call {worker.disk.kill_at}"

    def _power_worker(self) -> str:
        worker = self._worker()
        worker.power_cut()
        return self._down(worker)

    def _power_master(self) -> str:
        self._world.master.power_cut()
        self._world.check_durable()
        return self._down(self._world.master)

    def _lose_disk(self) -> str:
        """The operator comes in a while."""
        if self._world.operator.has_work:
            return "it is lost already"
        done = self._world.operator.lose_disk(self._random.choice((0.0, self._random.random())))
        self._world.operator.come(self._random.random() * LONGEST_S / 2)
        return f"{done}; {self._down(self._world.master)}"

    def _restart_worker(self) -> str:
        worker = self._worker()
        if not worker.running:
            return "not running"

        async def restart() -> None:
            await worker.stop()
            worker.start()

        task = asyncio.get_running_loop().create_task(restart())
        self._world.orderly.add(task)
        task.add_done_callback(self._world.orderly.discard)
        return worker.name

    def _wipe(self) -> str:
        worker = self._worker()
        path = self._random.choice(worker.volume_paths)
        worker.wipe(path)
        return f"{path.name} of {self._down(worker)}"

    def _partition(self) -> str:
        net, hosts = self._world.net, self._world.host_names
        one = self._random.choice(hosts)
        others = self._random.sample(hosts, self._random.randint(1, len(hosts)))
        pairs = {pair for other in others if other != one for pair in ((one, other), (other, one))}
        if self._random.random() < 0.3:
            pairs = {pair for pair in pairs if pair[0] == one}
        net.cut |= pairs
        return f"{one} from {' '.join(sorted(others))} {self._after(lambda: net.cut.difference_update(pairs))}"

    def _weather(self) -> str:
        net, random = self._world.net, self._random
        net.weather = Weather(
            random.choice((0.0, 0.02, 0.2)), random.choice((0.0, 0.05)), random.choice((0.0, 0.05, 0.2)),
            random.choice((0.0, 0.1, 0.5)), random.choice((0.01, 0.5, 3.0)),
        )  # fmt: skip
        return f"{net.weather} {self._after(lambda: setattr(net, 'weather', Weather()))}"

    def _echo(self) -> str:
        """Many requests arrive a second time, some of them late."""
        net = self._world.net
        net.weather = Weather(twice=0.5)
        return self._after(lambda: setattr(net, "weather", Weather()))

    def _freeze(self) -> str:
        host = self._random.choice(self._world.servers)
        process = host.process
        if process is None or process.dead:
            return "nobody"
        process.stop()
        return f"{process.name} {self._after(process.resume, 2 * LONGEST_S)}"

    def _jump(self) -> str:
        host = self._random.choice(self._world.servers)
        host.skew_ns += self._random.randint(-JUMP_NS, JUMP_NS)
        if host.process is not None:
            host.process.skew_ns = host.skew_ns
        return f"{host.name} to {host.skew_ns / 1e9:.0f} s"

    def _rot(self) -> str:
        worker = self._worker()
        done = [worker.drive.rot(str(path)) for path in worker.block_files() if self._random.random() < 0.3]
        return f"{worker.name} {' '.join(done)}"

    def _swap(self) -> str:
        """Two block files of one length change places, as by a file system that mixed them up."""
        worker = self._worker()
        files = worker.block_files()
        pairs = [(a, b) for i, a in enumerate(files) for b in files[:i] if a.stat().st_size == b.stat().st_size]
        if not pairs:
            return "no pair"
        one, other = self._random.choice(pairs)
        aside = one.with_name("aside")
        one.rename(aside)
        other.rename(one)
        aside.rename(other)
        return worker.name

    def _fill(self) -> str:
        drive = self._worker().drive
        drive.full = True
        return f"{drive.root.name} {self._after(lambda: setattr(drive, 'full', False))}"

    def _break_drive(self) -> str:
        drive = self._worker().drive
        drive.broken = self._random.choice((0.01, 0.2, 1.0))
        return f"{drive.root.name} {self._after(lambda: setattr(drive, 'broken', 0.0))}"

    def _break_log(self) -> str:
        log = self._world.master.log
        log.broken = self._random.choice((0.02, 0.5))
        return self._after(lambda: setattr(log, "broken", 0.0), 2.0)

    def _slow_drive(self) -> str:
        process = self._random.choice(self._world.servers).process
        if process is None:
            return "nobody"
        process.slow = self._random.choice((30.0, 300.0, 3000.0))
        return f"{process.name} {process.slow:.0f} times {self._after(lambda: setattr(process, 'slow', 1.0))}"
