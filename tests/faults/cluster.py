"""A cluster in which an operation is carried out, and what must hold of it afterwards."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from kvstore.client.aio import AsyncClient
from kvstore.core.errors import KvError, NotFound, Unavailable
from kvstore.worker.worker import Worker
from tests.sim.faults import Violation
from tests.sim.loop import SimLoop
from tests.sim.programs import Host, WorkerHost
from tests.sim.rest import Rest
from tests.sim.trace import Trace
from tests.sim.workload import LATE_S, OP_TIMEOUT_S
from tests.sim.world import MEM_BYTES, World
from tests.support.accounting import check_exact
from tests.support.nth import Trigger, install, open_files

T = TypeVar("T")
SSD_BYTES: Final = 256 << 10
LINGER_S: Final = 0.8
"""Until reports have been answered, and names noted beside blocks."""
ACT_S: Final = 12.0
"""Nothing that is done here may take longer."""
REST_S: Final = 60.0
"""A rebuild, or the grace of sessions and a full report, and as long again."""
LOOK_S: Final = 0.5
PATIENCE_S: Final = 6.0
"""Until a client has found out that its peers are back."""
READERS: Final = (0, 2)
"""A client beside a worker, and one without."""
UNKNOWN_FILE: Final = "the master does not know of a file"
"""In the words of `Rest`."""
VOLUME_FDS: Final = ("identity", "lock")
"""Files of a volume that are open all the time."""

Files = Mapping[str, bytes]


@dataclasses.dataclass(frozen=True)
class Operation:
    """`act` takes the store from `before` to `after`, in one step, or raises KvError.

    writer    client that puts `before`: 0 and 1 stand beside workers n1 and n2, 2 and 3 have none
    hosts     whose system calls fail
    may_miss  names that a cache may lose meanwhile
    upkeep    whether what workers look at once a second counts as part of it
    linger_s  what follows by itself counts as part of it for so long
    """

    name: str
    act: Callable[[Cluster], Awaitable[None]]
    before: Files
    after: Files
    prepare: Callable[[Cluster], Awaitable[None]] | None = None
    writer: int = 0
    hosts: tuple[str, ...] = ("n1",)
    may_miss: frozenset[str] = frozenset()
    upkeep: bool = False
    linger_s: float = LINGER_S

    def __str__(self) -> str:
        return self.name

    def could_hold(self, found: Mapping[str, bytes | None]) -> bool:
        return all(data in (None, self.before.get(name), self.after.get(name)) for name, data in found.items())


class Cluster(World):
    def __init__(self, loop: SimLoop, root: Path, trace: Trace, trigger: Trigger, operation: Operation) -> None:
        super().__init__(loop, root, trace)
        del self.workers[2:]
        self.servers = [self.master, *self.workers]
        self.trigger = trigger
        self.operation = operation
        self.may_be_lost = {*operation.before} if trigger.fault.effect == errno.ENOSPC else set[str]()
        """On a full disk what was there before may have to go."""
        self._tasks: Counter[str] = Counter()
        self._rest = Rest(self)
        self._are_sessions_over = False
        install(trigger, self)

    def _worker(self, number: int) -> WorkerHost:
        name = f"n{number + 1}"
        sizes = [("mem", MEM_BYTES), ("ssd", SSD_BYTES)][number:]
        return WorkerHost(self.loop, self.net, self.trace, name, number, self.root / name, sizes)

    # ---- what operations are made of

    def worker(self, number: int = 0) -> Worker:
        """Raises Unavailable while it is not there."""
        worker = self.workers[number].worker
        if worker is None:
            raise Unavailable(f"worker {number} is not there")
        return worker

    def client(self, number: int) -> AsyncClient:
        return self.clients[number].client

    async def run(self, host: Host, work: Coroutine[Any, Any, T]) -> T:
        """In the process of a host. Raises Unavailable when that ends, Violation when the work does not."""
        process = host.process
        assert process is not None
        task, end_s = process.spawn(work), self.loop.time() + ACT_S
        while not task.done():
            if process.dead:
                raise Unavailable(f"{host.name} has fallen")
            if self.loop.time() > end_s:
                raise Violation(f"{host.name}: {task.get_coro()} is not over after {ACT_S} s")
            await asyncio.sleep(0.01)
        return task.result()

    async def call(self, number: int, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """A client's call, that keeps its deadline."""
        began_s = self.loop.time()
        try:
            return await self.run(self.clients[number], work(self.client(number)))
        finally:
            if self.loop.time() > began_s + OP_TIMEOUT_S + LATE_S:
                raise Violation(f"a call took {self.loop.time() - began_s:.3f} s, its deadline is {OP_TIMEOUT_S} s")

    async def put(self, number: int, name: str, data: bytes) -> None:
        await self.call(number, lambda client: client.put(name, data, timeout_s=OP_TIMEOUT_S))

    async def get(self, number: int, name: str) -> bytes | None:
        """None for a miss. Raises KvError where it cannot be known."""
        try:
            return await self.call(number, lambda client: client.get(name, timeout_s=OP_TIMEOUT_S))
        except NotFound:
            return None

    async def until(self, condition: Callable[[], object], timeout_s: float = 8.0) -> None:
        """Raises Unavailable when it does not come true."""
        end_s = self.loop.time() + timeout_s
        while not condition():
            if self.loop.time() > end_s:
                raise Unavailable("it did not come true in time")
            await asyncio.sleep(0.02)

    # ---- the course of a case

    async def begin(self) -> None:
        """Everything runs, `before` is there, and nothing is under way."""
        for host in self.servers:
            host.start()
        await self.until(lambda: not self._rest._difference())
        await self.put_all()
        await self.until(lambda: all(b.noted for host in self.workers if host.worker for b in host.worker.store.all()))
        await self._until_at_rest()
        self._tasks = self._task_names()
        if self.operation.prepare is not None:
            await self.operation.prepare(self)

    async def put_all(self) -> None:
        """What is there before."""
        for name, data in self.operation.before.items():
            await self.put(self.operation.writer, name, data)

    async def attempt(self) -> bool:
        """Whether it was acknowledged."""
        try:
            await self.operation.act(self)
        except KvError as error:
            self.trace.add(f"not done: {type(error).__name__}: {error.message}")
            return False
        return True

    async def attempt_under_fault(self) -> bool:
        with self.trigger.armed():
            is_done = await self.attempt()
            await self.look(self.operation.linger_s)
        return is_done

    async def mend(self) -> None:
        """What fell is started again; so is a worker that has taken a volume out of service."""
        for host in self.servers:
            if not host.up or (isinstance(host, WorkerHost) and host.worker is None):
                host.crash()
                host.start()
        for worker in self.workers:
            if worker.worker is not None and len(worker.worker.store.in_service) < len(worker.volume_paths):
                await worker.stop()
                worker.start()

    async def check_bytes(self) -> None:
        """Right, or a miss, from everywhere."""
        for number in READERS:
            await self._read(number)

    async def check_all(self, *wanted: Files) -> Files:
        """All invariants; the store holds one of `wanted`, everywhere the same. Returns which."""
        await self._until_at_rest()
        end_s = self.loop.time() + PATIENCE_S
        while True:
            found = [await self._read(number) for number in READERS]
            for state in wanted:
                if all(self._holds(each, state) for each in found):
                    await self._until_at_rest()  # what was read may have come or moved
                    return state
            if self.loop.time() > end_s:
                raise Violation(f"read {' and '.join(map(told, found))} instead of {' or '.join(map(told, wanted))}")
            await self.look(LOOK_S)

    async def end(self) -> None:
        """In order: what sessions leave behind goes, and no task is left."""
        for client in self.clients:
            await self._rest._stop(client)
        self._are_sessions_over = True
        await self._until_at_rest()
        for host in [*self.workers, self.master]:
            await self._rest._stop(host)
        self.check()

    async def _read(self, number: int) -> dict[str, bytes | None]:
        """What a client finds; None also where it cannot know. Raises Violation for what was never there."""
        found: dict[str, bytes | None] = {}
        for name in sorted({*self.operation.before, *self.operation.after}):
            try:
                found[name] = await self.get(number, name)
            except KvError:
                found[name] = None
        if not self.operation.could_hold(found):
            raise Violation(f"client {number} read what was never there: {told(found)}")
        return found

    def _holds(self, found: Mapping[str, bytes | None], wanted: Files) -> bool:
        may_miss = self.operation.may_miss | self.may_be_lost
        return all(data == wanted.get(name) or (data is None and name in may_miss) for name, data in found.items())

    def failed(self) -> None:
        """A volume has, and the master was told that its blocks are nowhere (rule 4)."""
        self.may_be_lost = {*self.operation.before, *self.operation.after}

    async def _until_at_rest(self) -> None:
        """Raises Violation."""
        end_s = self.loop.time() + REST_S
        while trouble := await self._trouble():
            if self.loop.time() > end_s:
                raise Violation(f"does not come to rest: {trouble}")
            await self.look(LOOK_S)

    async def _trouble(self) -> str:
        """What does not fit yet, in words; "" when all does."""
        master = self.master.master
        if master is not None and master.rebuild is not None:
            return "names are being taken back"
        return self._disagreement() or self._left() or await self._books_differ()

    def _disagreement(self) -> str:
        """Of master and workers. What a session has sealed and could not publish is its own as long as it lives."""
        difference = self._rest._difference()
        is_unowned = difference.startswith(UNKNOWN_FILE) and any(
            h.worker and h.worker.store.unowned for h in self.workers
        )
        return "" if is_unowned and not self._are_sessions_over else difference

    def _left(self) -> str:
        """Files, fds, tasks of something that is over."""
        staged = [path for host in self.workers for volume in host.volume_paths for path in volume.glob("staging/*")]
        if staged or any(len(host.worker.staging) for host in self.workers if host.worker):
            return f"staging files are left: {[str(path.relative_to(self.root)) for path in staged]}"
        own = [f"{volume}/{name}" for host in self.workers for volume in host.volume_paths for name in VOLUME_FDS]
        if (fds := open_files(self.root)) != sorted(own):
            return f"fds are left: {sorted((Counter(fds) - Counter(own)).elements())}"
        if self._tasks and (tasks := self._task_names()) != self._tasks:
            return f"tasks are left, or gone: {tasks - self._tasks}, {self._tasks - tasks}"
        return ""

    def _task_names(self) -> Counter[str]:
        processes = ((host.name, host.process) for host in self.servers if host.process)
        return Counter(f"{name}: {_name_of(task)}" for name, process in processes for task in process.tasks)

    async def _books_differ(self) -> str:
        for host in self.workers:
            try:
                await self.run(host, check_exact(self.worker(self.workers.index(host))))
            except (AssertionError, KvError) as error:
                if isinstance(error, Violation):
                    raise
                return f"{host.name}: books and disk differ: {error}"
        return ""


def _name_of(task: asyncio.Task[Any]) -> str:
    work = task.get_coro()
    return getattr(work, "__qualname__", str(work))


def told(state: Mapping[str, bytes | None]) -> str:
    return "{" + ", ".join(f"{name}: {data[7]}" for name, data in state.items() if data is not None) + "}"
