"""The programs of a cluster, put together as their mains do, and started on hosts that may fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from kvstore.client.aio import AsyncClient
from kvstore.core.errors import KvError
from kvstore.master.master import Master
from kvstore.master.master import Settings as MasterSettings
from kvstore.master.recovery.rebuild import Wanted
from kvstore.master.running import Running
from kvstore.master.storage.records import JournalLimits
from kvstore.rpc.failover import AsyncFailover
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import A, Method, Q
from kvstore.worker.settings import Settings, VolumeSettings
from kvstore.worker.volumes.identity import Identity, decode
from kvstore.worker.volumes.opening import open_volumes
from kvstore.worker.worker import Worker
from tests.sim.clock import SimRuntime
from tests.sim.db import Log, SimDb
from tests.sim.disk import SimDisk
from tests.sim.drive import FREE_BYTES, Drive, remove_tree
from tests.sim.loop import Process, SimLoop, State
from tests.sim.net import Net
from tests.sim.trace import Trace
from tests.support.accounting import files_below

T = TypeVar("T")
MASTER: Final = "master:7000"
DEAD_TICKS: Final = 3
SCAN_S: Final = 20.0
GRACE_S: Final = 4.0
FULL_REPORT_S: Final = 8.0
SCRUB_BYTES_S: Final = 1e6
SCRUB_S: Final = 6.0
RESTART_S: Final = 1.0
"""After which a program that ended by itself is started again, as `kvstore node` does."""


class Host:
    """A machine with one program. `process` is the current one, or the last that there was."""

    def __init__(self, loop: SimLoop, net: Net, trace: Trace, name: str) -> None:
        self.loop, self.net, self.trace, self.name = loop, net, trace, name
        self.random = random.Random(loop.random.getrandbits(64))
        self.process: Process | None = None
        self.buried: list[Process] = []
        self.starts = 0
        self._main_task: asyncio.Task[None] | None = None
        self.wanted = False
        self.skew_ns = 0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.state is State.RUNNING

    @property
    def up(self) -> bool:
        return self.process is not None and not self.process.dead

    def start(self) -> None:
        self.wanted = True
        if self.up:
            return
        self.starts += 1
        process = self.process = Process(self.loop, f"{self.name}#{self.starts}", self.name)
        process.skew_ns = self.skew_ns
        self.trace.add(f"{process.name} starts")
        self._main_task = process.spawn(self._main(process))

    def crash(self) -> None:
        """As kill -9: whatever it had told the kernel stays."""
        process = self.process
        if process is not None and not process.dead:
            self.trace.add(f"{process.name} is killed")
            process.kill()
            self._fallen(process)
            self.loop.hang_up(process)
            self.net.forget(process)
            self.buried.append(process)

    async def stop(self) -> None:
        """In order, as by SIGTERM."""
        self.wanted = False
        process = self.process
        if process is not None and not process.dead:
            process.resume()
            if self._main_task is not None:
                self._main_task.cancel()
            stopping = process.spawn(self._stop())
            gone = self.loop.create_task(process.gone.wait())
            await asyncio.wait([stopping, gone], return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if stopping.done():
                stopping.result()
                self.trace.add(f"{process.name} has stopped")
                self._ended(process)

    async def _main(self, process: Process) -> None:
        try:
            await self._run(process, SimRuntime(process, self.random))
        except KvError as error:
            self.trace.add(f"{process.name} ends: {type(error).__name__} {error.reason}")
            self._ended(process)
            self.net.later(RESTART_S, self._again)
        except Exception as error:  # noqa: BLE001 - a bug, of the program or of what watches it
            self.loop.troubles.append(f"{process.name} ended: {error!r}")
            self._ended(process)

    def _again(self) -> None:
        if self.wanted:
            self.start()

    def _ended(self, process: Process) -> None:
        process.kill()
        self._fallen(process)
        self.loop.hang_up(process)
        self.net.forget(process)
        self.buried.append(process)

    async def _run(self, process: Process, runtime: SimRuntime) -> None:
        """Until it ends by itself. Raises KvError with the reason."""
        raise NotImplementedError

    async def _stop(self) -> None:
        raise NotImplementedError

    def _fallen(self, process: Process) -> None:
        """What the kernel does when a process is gone."""


class MasterHost(Host):
    """`wanted_rebuild`: what its operator has said on the command line, at every start until it is taken back."""

    def __init__(self, loop: SimLoop, net: Net, trace: Trace) -> None:
        super().__init__(loop, net, trace, "master")
        self.log = Log(random.Random(self.random.getrandbits(64)))
        self.wanted_rebuild: Wanted | None = None
        self._running: Running | None = None
        self._db: SimDb | None = None

    @property
    def master(self) -> Master | None:
        """None while none runs."""
        return None if self._running is None else self._running.master

    def power_cut(self) -> None:
        self.crash()
        self.trace.add(f"{self.name}: power cut, {self.log.power_cut()}")

    async def _run(self, process: Process, runtime: SimRuntime) -> None:
        self._db = SimDb(self.log)
        running = self._running = Running(
            self._db,
            runtime,
            MasterSettings(1.0, DEAD_TICKS, 3600.0, JournalLimits(10**9, 1 << 40)),
            free_bytes=lambda: FREE_BYTES,
            reserve_bytes=0,
            scan_interval_s=SCAN_S,
            wanted=self.wanted_rebuild,
        )
        server = await running.serve(MASTER, self.net.transport(process))
        await server.set_serving(True)
        try:
            await running.until_failed()
        except KvError:
            await running.stop()
            raise

    async def _stop(self) -> None:
        if self._running is not None:
            await self._running.stop()

    def _fallen(self, process: Process) -> None:
        self._running = None
        if self._db is not None:
            self._db.close()


class SimNerve:
    """A heart's thread and link (`worker.heartbeat.Nerve`) as a task of its own."""

    def __init__(self, link: AsyncFailover) -> None:
        self._link, self._loop = link, asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(work)

    async def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        return await self._link.call(method, request, timeout_s)

    async def ask(self, question: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return await asyncio.wait_for(question, timeout_s)

    def tell(self, function: Callable[..., None], *args: object) -> bool:
        self._loop.call_soon(function, *args)
        return True

    async def pause(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._woken.wait()
        except TimeoutError:
            return

    def wake(self) -> None:
        self._woken.set()

    async def join(self, timeout_s: float) -> None:
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout_s)

    def cut(self) -> None:
        self._closing = self._loop.create_task(self._link.close())


class WorkerHost(Host):
    """`path` is the directory of everything on its drives."""

    def __init__(
        self,
        loop: SimLoop,
        net: Net,
        trace: Trace,
        name: str,
        number: int,
        path: Path,
        sizes: Sequence[tuple[str, int]],
    ) -> None:
        super().__init__(loop, net, trace, name)
        self._number, self._sizes, self._path = number, sizes, path
        source = random.Random(self.random.getrandbits(64))
        self.drive = Drive(path, [str(path / tier) for tier, _ in sizes if tier == "mem"], source)
        self.disk = SimDisk(self.drive, number, self.crash)
        self.worker: Worker | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.endpoint = f"{name}:7000"

    @property
    def socket(self) -> str:
        return str(self._path / "sock")

    @property
    def volume_paths(self) -> list[Path]:
        return [self._path / tier for tier, _ in self._sizes]

    def block_files(self) -> list[Path]:
        return sorted(Path(path) for volume in self.volume_paths for path in files_below(f"{volume}/blocks"))

    def power_cut(self) -> None:
        self.crash()
        self.trace.add(f"{self.name}: power cut, {self.drive.power_cut()}")

    def identities(self) -> list[tuple[Path, Identity]]:
        """What its volumes know of themselves."""
        found = []
        for path in self.volume_paths:
            with contextlib.suppress(FileNotFoundError):
                found.append((path, decode((path / "identity").read_bytes(), str(path))))
        return found

    def wipe(self, path: Path) -> None:
        """A new drive in place of a volume's."""
        self.crash()
        remove_tree(str(path))
        self.trace.add(f"{self.name}: volume {path.name} is empty now")

    async def _run(self, process: Process, runtime: SimRuntime) -> None:
        disk = self.disk = SimDisk(self.drive, self._number, self.crash)
        settings = self._settings()
        volumes = await open_volumes(settings, runtime, disk)
        worker = self.worker = Worker(settings, runtime, volumes, disk, self.net.transport(process), self._nerve)
        worker.verifier._residency = SimResidency(self.drive)  # type: ignore[assignment]
        await worker.start()
        error = await worker.refused
        await self._stop()
        raise error

    async def _stop(self) -> None:
        """Once: a worker that was refused may be told to stop as well."""
        if self.worker is not None and self.process is not None:
            if self._stopping is None:
                self._stopping = self.process.spawn(self.worker.stop())
            await asyncio.shield(self._stopping)

    def _nerve(self, endpoints: Sequence[str], caller: Caller) -> SimNerve:
        assert self.process is not None
        return SimNerve(AsyncFailover(endpoints, caller, self.net.transport(self.process)))

    def _fallen(self, process: Process) -> None:
        self.disk.give_up()
        self.worker = self._stopping = None

    def _settings(self) -> Settings:
        volumes = [VolumeSettings(tier, str(self._path / tier), size, 0) for tier, size in self._sizes]
        return Settings(
            self.name, [MASTER], self.endpoint, "", self.socket, 0o600, GRACE_S, FULL_REPORT_S, volumes,
            scrub_bytes_per_s=SCRUB_BYTES_S, scrub_interval_s=SCRUB_S,
        )  # fmt: skip


class SimResidency:
    """Which files are in memory: all but those that the drive calls cold, and now and then one that was evicted."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive

    def is_whole(self, fd: int, length_bytes: int) -> bool:
        return os.fstat(fd).st_ino not in self._drive.cold and self._drive.random.random() > 0.02


class ClientHost(Host):
    """A client beside a worker (`socket`), or without one."""

    def __init__(
        self, loop: SimLoop, net: Net, trace: Trace, name: str, host: str, socket: str, scratch: Path, ttl_s: float
    ) -> None:
        super().__init__(loop, net, trace, name)
        self.ttl_s, self.home = ttl_s, host
        self._socket, self._scratch = socket, scratch
        process = self.process = Process(loop, name, host)
        self.client: AsyncClient = process._context.copy().run(self._make)

    def _make(self) -> AsyncClient:
        assert self.process is not None
        return AsyncClient(
            f"kvstore://{MASTER}",
            worker_socket=self._socket,
            metadata_ttl_s=self.ttl_s,
            staging_dir=str(self._scratch),
            runtime=SimRuntime(self.process, self.random),
            transport=self.net.transport(self.process),
        )

    async def _stop(self) -> None:
        await self.client.close()
