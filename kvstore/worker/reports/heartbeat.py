"""Registration and heartbeats: a thread with a channel of its own, so that a busy loop does not look like a dead
worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from kvstore.core.errors import Denied, KvError
from kvstore.core.limits import HEARTBEAT_TIMEOUT_S
from kvstore.pb import master_pb2 as m
from kvstore.rpc.failover import Failover
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import HEARTBEAT, REGISTER, A, Method, Q

log = logging.getLogger(__name__)
T = TypeVar("T")
Reply = TypeVar("Reply", bound=Message)
FAREWELL_TIMEOUT_S = 0.5
"""For the last heartbeat. It is a courtesy: without it the master notices after some ticks."""
DEFAULT_TICK_S = 1.0
"""Until the master said how long its tick is; also the pause between attempts to reach it."""


class Nerve(Protocol):
    """What the heart does that takes time. In the thread every await of these blocks it and suspends nothing; a
    simulation has no threads, there they suspend a task. `start`, `join` and `cut` belong to the loop.
    """

    def start(self, work: Coroutine[Any, Any, None]) -> None: ...

    async def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        """Ask the master. Raises KvError."""

    async def ask(self, question: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Have the question answered on the worker's loop."""

    def tell(self, function: Callable[..., None], *args: object) -> bool:
        """Have it called on the worker's loop, in order; False when the loop is closed."""

    async def pause(self, delay_s: float) -> None:
        """Over at once from the first `wake` on."""

    def wake(self) -> None: ...

    async def join(self, timeout_s: float) -> None:
        """Wait for the end of the work, at most so long."""

    def cut(self) -> None:
        """Close the link to the master: ends the call under way."""


MakeNerve = Callable[[Sequence[str], Caller], Nerve]
"""Of the master's endpoints and the worker's introduction; called on the worker's loop."""


class ThreadNerve:
    """The real one: a daemon thread, and the synchronous gRPC API."""

    def __init__(self, link: Failover) -> None:
        self._link, self._loop = link, asyncio.get_running_loop()
        self._woken = threading.Event()
        self._thread = threading.Thread(name="kvstore-heart", daemon=True)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._thread = threading.Thread(target=_run_blocking, args=[work], name="kvstore-heart", daemon=True)
        self._thread.start()

    async def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        return self._link.call(method, request, timeout_s)

    async def ask(self, question: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return asyncio.run_coroutine_threadsafe(question, self._loop).result(timeout_s)

    def tell(self, function: Callable[..., None], *args: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True

    async def pause(self, delay_s: float) -> None:
        self._woken.wait(delay_s)

    def wake(self) -> None:
        self._woken.set()

    async def join(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._thread.join, timeout_s)

    def cut(self) -> None:
        self._link.close()


def own_thread(endpoints: Sequence[str], caller: Caller) -> ThreadNerve:
    return ThreadNerve(Failover(endpoints, caller))


def _run_blocking(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine none of whose awaits suspends."""
    with contextlib.suppress(StopIteration):
        work.send(None)


class Owner(Protocol):
    """What the heart asks of its worker. All but `beat` run on the loop."""

    @property
    def known_sequence(self) -> int: ...

    def beat(self, *, leaving: bool = False) -> m.HeartbeatRequest:
        """Called in the thread: reads numbers, changes nothing."""

    async def registration(self) -> m.RegisterRequest: ...

    def on_registered(self, reply: m.RegisterReply, known_sequence: int) -> None: ...

    def on_beat(self, reply: m.HeartbeatReply, known_sequence: int) -> None: ...

    def on_refused(self, error: KvError) -> None:
        """The master will have nothing to do with this worker, for good."""


class Heart:
    """`start` and `stop` belong to the loop; everything between runs in the thread (see `Nerve`)."""

    def __init__(self, owner: Owner, nerve: Nerve) -> None:
        self._owner, self._nerve = owner, nerve
        self._stopping = self._registered = False
        self._tick_s = DEFAULT_TICK_S
        self._complaint = ""

    def start(self) -> None:
        self._nerve.start(self._run())

    async def stop(self) -> None:
        """Says farewell to a master that answered last time, and ends the thread; a call that takes long is cut off."""
        self._stopping = True
        self._nerve.wake()
        if self._in_touch:
            await self._nerve.join(2 * FAREWELL_TIMEOUT_S)
        self._nerve.cut()
        await self._nerve.join(HEARTBEAT_TIMEOUT_S + 1)

    @property
    def _in_touch(self) -> bool:
        return self._registered and not self._complaint

    @property
    def complaint(self) -> str:
        """Why the last call failed, as the master or the transport put it; "" after one that did not."""
        return self._complaint

    def register_again(self) -> None:
        """The master does not know us (any more): register at the next tick."""
        self._registered = False

    async def _run(self) -> None:
        while not self._stopping:
            try:
                await (self._beat() if self._registered else self._register())
                self._complain("")
            except KvError as error:
                if isinstance(error, Denied):
                    self._tell(self._owner.on_refused, error)
                    return
                self._complain(error.message)
            except Exception:
                if not self._stopping:  # a closed channel raises what it likes
                    log.exception("heartbeat failed")
            await self._nerve.pause(self._tick_s)
        await self._farewell()

    async def _farewell(self) -> None:
        if self._in_touch:
            with contextlib.suppress(KvError):
                await self._nerve.call(HEARTBEAT, self._owner.beat(leaving=True), FAREWELL_TIMEOUT_S)

    async def _register(self) -> None:
        known = self._owner.known_sequence
        request = await self._nerve.ask(self._owner.registration(), HEARTBEAT_TIMEOUT_S)
        reply = await self._nerve.call(REGISTER, request, HEARTBEAT_TIMEOUT_S)
        self._tick_s = min(max(reply.tick_s, 0.01), 60.0) if reply.tick_s else DEFAULT_TICK_S
        self._registered = True
        self._tell(self._owner.on_registered, reply, known)

    async def _beat(self) -> None:
        known = self._owner.known_sequence
        reply = await self._nerve.call(HEARTBEAT, self._owner.beat(), HEARTBEAT_TIMEOUT_S)
        if any(command.WhichOneof("command") == "register" for command in reply.commands):
            self._registered = False
        self._tell(self._owner.on_beat, reply, known)

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        if not self._nerve.tell(function, *args):
            self._stopping = True

    def _complain(self, text: str) -> None:
        """Each new trouble once, and its end."""
        if text and text != self._complaint:
            log.warning("not in touch with the master: %s; trying on", text)
        elif not text and self._complaint:
            log.info("in touch with the master again")
        self._complaint = text
