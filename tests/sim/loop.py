"""An event loop whose time is a number and whose order is a seed's, and the processes that run on it.

Every handle belongs to the process in whose context it was made. So a process can be stopped (its handles are parked,
as by SIGSTOP) or killed (they are dropped: its coroutines never run another line, as by SIGKILL).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import heapq
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, ContextVar
from typing import Any, Final, TypeVar

T = TypeVar("T")

START_S: Final = 1000.0
TURN_S: Final = 2e-6
"""What a round of the ready queue takes: who polls in a loop without a pause sees time go by."""
THREAD_S: Final = 0.0003
"""A thread's work, there and back, on an idle machine; drawn between nothing and twice as much."""

MAX_KEPT: Final = 500
"""Tasks of a process among which some may be over."""


class Killed(BaseException):
    """Ends what a process was doing when it was killed in the middle of it."""


class State(enum.Enum):
    RUNNING = enum.auto()
    STOPPED = enum.auto()
    DEAD = enum.auto()


class Process:
    """One start of one program.

    host     where it runs: partitions and pauses are between hosts
    slow     factor on the time that work in threads takes
    skew_ns  how far its wall clock is off
    """

    def __init__(self, loop: SimLoop, name: str, host: str) -> None:
        self.loop, self.name, self.host = loop, name, host
        self.state = State.RUNNING
        self._tasks: list[asyncio.Task[Any]] = []
        self.slow, self.skew_ns = 1.0, 0
        self.gone = asyncio.Event()
        self._parked: list[asyncio.Handle] = []
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return f"<{self.name} {self.state.name.lower()}>"

    @property
    def dead(self) -> bool:
        return self.state is State.DEAD

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.loop.create_task(work, context=self._context.copy())

    def call(self, function: Callable[..., object], *args: object) -> None:
        """As a callback of the process, with the next round."""
        self.loop.call_soon(function, *args, context=self._context.copy())

    def keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        if len(self._tasks) > MAX_KEPT:
            self._tasks = self.tasks

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those that are not over, in order of their start."""
        return [task for task in self._tasks if not task.done()]

    def stop(self) -> None:
        if self.state is State.RUNNING:
            self.state = State.STOPPED

    def resume(self) -> None:
        if self.state is State.STOPPED:
            self.state = State.RUNNING
            self.loop.put_back(self._parked)
            self._parked = []

    def kill(self) -> None:
        """Its coroutines stay as they are until the end of the simulation (`bury`): nothing of them runs."""
        self.state = State.DEAD
        self.gone.set()
        self._parked = []

    def bury(self) -> None:
        """Close what was killed without letting it do anything that matters: its disk and its network are dead."""
        for task in self.tasks:
            with contextlib.suppress(BaseException):  # it cannot be told to whom it may concern
                task.get_coro().close()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.clear()

    def park(self, handle: asyncio.Handle) -> None:
        self._parked.append(handle)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


NEUTRAL: Final = Context()
"""Of what belongs to no process."""


def current() -> Process:
    process = PROCESS.get()
    assert process is not None, "outside of every process"
    return process


class Stuck(Exception):
    """Nothing is ready, no timer runs, and somebody waits."""


class SimLoop(asyncio.SelectorEventLoop):
    """`random` orders what is ready and times the threads; `troubles` holds what nobody caught."""

    _ready: deque[asyncio.Handle]
    _selector: selectors.EpollSelector

    def __init__(self, seed: int) -> None:
        selector = selectors.EpollSelector()
        super().__init__(selector)
        self._epoll = selector._selector  # type: ignore[attr-defined]
        self.random = random.Random(seed)
        self.troubles: list[str] = []
        self.rounds = 0
        self._now_s = START_S
        # Not asyncio's heap of handles, which are compared in Python: here the time decides, then the order of calls.
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self.get_debug = bool  # type: ignore[method-assign] # False, without a frame: each handle asks
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._now_s

    # ---- one round

    def _run_once(self) -> None:
        self._poll()
        if not self._ready and not self._advance():
            raise Stuck
        self._now_s += TURN_S
        self._wake_due()
        turns = list(self._ready)
        self._ready.clear()
        if len(turns) > 1:
            self.random.shuffle(turns)
        for handle in turns:
            self._turn(handle)
        self.rounds += 1

    def _turn(self, handle: asyncio.Handle) -> None:
        if handle._cancelled:
            return
        process = owner_of(handle)
        if process is None or process.state is State.RUNNING:
            handle._run()
        elif process.state is State.STOPPED:
            process.park(handle)

    def put_back(self, handles: Sequence[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def _poll(self) -> None:
        """What came on the Unix sockets. Those of a process that does not run wait."""
        if self._epoll.poll(0, 1):
            self._process_events(self._selector.select(0))

    def _process_events(self, events: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        for key, mask in events:
            reader, writer = key.data
            for handle, wanted in ((reader, selectors.EVENT_READ), (writer, selectors.EVENT_WRITE)):
                if handle is not None and mask & wanted and _runs(handle):
                    self._ready.append(handle)

    def _advance(self) -> bool:
        """To the next timer; False when there is none."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            return False
        self._now_s = max(self._now_s, timers[0][0])
        return True

    def _wake_due(self) -> None:
        timers, now_s = self._timers, self._now_s
        while timers and timers[0][0] <= now_s:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                self._ready.append(timer)

    def hang_up(self, process: Process) -> None:
        """The sockets of a dead process: whoever is connected hears of it."""
        for key in list(self._selector.get_map().values()):
            owned = [handle for handle in key.data if handle is not None and owner_of(handle) is process]
            if owned:
                self._selector.unregister(key.fileobj)
                owned[0]._callback.__self__._sock.close()  # of a connection, or of the server

    def clear(self) -> None:
        """Nothing of what was to come comes."""
        self._ready.clear()
        self._timers.clear()

    # ---- what processes ask of it

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = super().create_task(coro, name=name, context=context)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.keep(task)
        return task

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """In no thread, but after a while; its result arrives after another while."""
        future: asyncio.Future[T] = self.create_future()
        self.call_later(self._thread_s(), self._work, future, func, args)
        return future

    def _work(self, future: asyncio.Future[T], function: Callable[..., T], args: Sequence[Any]) -> None:
        if future.cancelled() and self.random.random() < 0.5:
            return  # it still waited for a free thread
        try:
            result = function(*args)
        except Killed:
            return
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
            self.call_later(self._thread_s(), _fail, future, error)
        else:
            self.call_later(self._thread_s(), _succeed, future, result)

    def _thread_s(self) -> float:
        process = PROCESS.get()
        return THREAD_S * 2 * self.random.random() * (process.slow if process else 1.0)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Killed):
            return
        self.troubles.append(f"{context.get('message')}: {error!r}")


def owner_of(handle: asyncio.Handle) -> Process | None:
    return handle._context.get(PROCESS)  # type: ignore[attr-defined, no-any-return]


def _runs(handle: asyncio.Handle) -> bool:
    process = owner_of(handle)
    return not handle._cancelled and (process is None or process.state is State.RUNNING)


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
