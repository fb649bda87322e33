"""Registration and heartbeats: a thread with a channel of its own, so that a busy loop does not look like a dead
worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from kvstore.core.errors import Denied, KvError
from kvstore.core.limits import HEARTBEAT_TIMEOUT_S
from kvstore.pb import master_pb2 as m
from kvstore.rpc.methods import HEARTBEAT, REGISTER, A, Method, Q

log = logging.getLogger(__name__)
T = TypeVar("T")
Reply = TypeVar("Reply", bound=Message)
FAREWELL_TIMEOUT_S = 0.5
"""For the last heartbeat. It is a courtesy: without it the master notices after some ticks."""
DEFAULT_TICK_S = 1.0
"""Until the master said how long its tick is; also the pause between attempts to reach it."""


class MasterLink(Protocol):
    """What the thread needs of `rpc.failover.Failover`."""

    def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A: ...

    def close(self) -> None: ...


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
    """`start` and `stop` belong to the loop; everything between runs in the thread."""

    def __init__(self, owner: Owner, link: MasterLink) -> None:
        self._owner, self._link = owner, link
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._registered = threading.Event()
        self._tick_s = DEFAULT_TICK_S
        self._complaint = ""
        self._thread = threading.Thread(target=self._run, name="kvstore-heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Says farewell to a master that answered last time, and ends the thread; a call that takes long is cut off."""
        self._stopping.set()
        if self._in_touch:
            await asyncio.to_thread(self._thread.join, 2 * FAREWELL_TIMEOUT_S)
        self._link.close()
        await asyncio.to_thread(self._thread.join, HEARTBEAT_TIMEOUT_S + 1)

    @property
    def _in_touch(self) -> bool:
        return self._registered.is_set() and not self._complaint

    @property
    def complaint(self) -> str:
        """Why the last call failed, as the master or the transport put it; "" after one that did not."""
        return self._complaint

    def register_again(self) -> None:
        """The master does not know us (any more): register at the next tick."""
        self._registered.clear()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._beat() if self._registered.is_set() else self._register()
                self._complain("")
            except KvError as error:
                if isinstance(error, Denied):
                    self._on_loop(self._owner.on_refused, error)
                    return
                self._complain(error.message)
            except Exception:
                if not self._stopping.is_set():  # a closed channel raises what it likes
                    log.exception("heartbeat failed")
            self._stopping.wait(self._tick_s)
        self._farewell()

    def _farewell(self) -> None:
        if self._in_touch:
            with contextlib.suppress(KvError):
                self._link.call(HEARTBEAT, self._owner.beat(leaving=True), FAREWELL_TIMEOUT_S)

    def _register(self) -> None:
        known = self._owner.known_sequence
        request = self._ask_loop(self._owner.registration())
        reply = self._link.call(REGISTER, request, HEARTBEAT_TIMEOUT_S)
        self._tick_s = min(max(reply.tick_s, 0.01), 60.0) if reply.tick_s else DEFAULT_TICK_S
        self._registered.set()
        self._on_loop(self._owner.on_registered, reply, known)

    def _beat(self) -> None:
        known = self._owner.known_sequence
        reply = self._link.call(HEARTBEAT, self._owner.beat(), HEARTBEAT_TIMEOUT_S)
        if any(command.WhichOneof("command") == "register" for command in reply.commands):
            self._registered.clear()
        self._on_loop(self._owner.on_beat, reply, known)

    def _ask_loop(self, question: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(question, self._loop).result(HEARTBEAT_TIMEOUT_S)

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self._stopping.set()  # the loop is closed

    def _complain(self, text: str) -> None:
        """Each new trouble once, and its end."""
        if text and text != self._complaint:
            log.warning("not in touch with the master: %s; trying on", text)
        elif not text and self._complaint:
            log.info("in touch with the master again")
        self._complaint = text
