"""A network in memory, in the place of gRPC's: each message has a fate of its own.

Servicers, serializers, metadata and status are the product's and gRPC's own; what is replaced is what lies between a
channel and a server (`kvstore.rpc.transport`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio

from tests.sim.loop import NEUTRAL, Process, SimLoop, current
from tests.sim.pipe import Pipe
from tests.sim.serving import SimServer
from tests.sim.trace import Trace
from tests.sim.weather import Fate, Weather

HOP_S: Final = 0.0005
"""One way of a message on a good day; drawn between nothing and twice as much."""
ECHO_S: Final = 4.0
"""How late a duplicate may be."""


class Net:
    """`cut`: pairs of hosts between which nothing passes, in this direction. `watch` sees each reply that is sent."""

    def __init__(self, loop: SimLoop, trace: Trace) -> None:
        self.loop, self.trace = loop, trace
        self.weather = Weather()
        self.cut: set[tuple[str, str]] = set()
        self.servers: dict[str, SimServer] = {}
        self.watch: Callable[[str, Process, Process, bytes], None] = lambda path, server, caller, reply: None

    def transport(self, process: Process) -> SimTransport:
        return SimTransport(self, process)

    def passes(self, source: str, target: str) -> bool:
        return (source, target) not in self.cut

    def fate(self, source: Process, target: str) -> Fate:
        if source.dead or not self.passes(source.host, target):
            return Fate.LOST
        if source.host == target:
            return Fate.ARRIVES
        dice, weather = self.loop.random.random(), self.weather
        for chance, fate in ((weather.lost, Fate.LOST), (weather.twice, Fate.TWICE), (weather.broken, Fate.BROKEN)):
            if dice < chance:
                return fate
            dice -= chance
        return Fate.ARRIVES

    def delay_s(self) -> float:
        delay_s = HOP_S * 2 * self.loop.random.random()
        if self.weather.slow and self.loop.random.random() < self.weather.slow:
            delay_s += self.weather.slow_s * self.loop.random.random()
        return delay_s

    def later(self, delay_s: float, function: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """What is on its way belongs to no process."""
        return self.loop.call_later(delay_s, function, *args, context=NEUTRAL)

    def at(self, time_s: float, function: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        return self.loop.call_at(time_s, function, *args, context=NEUTRAL)

    def listening(self, endpoint: str) -> SimServer | None:
        server = self.servers.get(endpoint)
        return None if server is None or server.process.dead else server

    def forget(self, process: Process) -> None:
        """It is dead: calls to it break where a reset can travel, and are silent elsewhere."""
        for endpoint, server in list(self.servers.items()):
            if server.process is process:
                del self.servers[endpoint]
                server.break_all()


class SimTransport:
    """A process's `kvstore.rpc.transport.Transport`."""

    def __init__(self, net: Net, process: Process) -> None:
        self._net, self._process = net, process

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        channel: Any = SimChannel(self._net, endpoint)
        return channel  # type: ignore[no-any-return]

    def server(self) -> grpc.aio.Server:
        server: Any = SimServer(self._net, self._process)
        return server  # type: ignore[no-any-return]


def host_of(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]


class SimChannel:
    """The part of `grpc.aio.Channel` that links use."""

    def __init__(self, net: Net, endpoint: str) -> None:
        self.net, self.endpoint = net, endpoint
        self._calls: set[Call] = set()
        self._closed = False

    def unary_unary(self, path: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        async def call(request: Any, timeout: float, metadata: Any) -> Any:
            under_way = self._begin(path, timeout, metadata)
            under_way.send(_with(request_serializer, request))
            return _with(response_deserializer, await under_way.reply())

        return call

    def unary_stream(self, path: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        async def call(request: Any, timeout: float, metadata: Any) -> Any:
            under_way = self._begin(path, timeout, metadata)
            under_way.send(_with(request_serializer, request))
            try:
                while (item := await under_way.next()) is not None:
                    yield _with(response_deserializer, item)
            finally:
                under_way.cancel()

        return call

    def stream_unary(self, path: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        async def call(requests: Any, timeout: float, metadata: Any) -> Any:
            under_way = self._begin(path, timeout, metadata)
            for item in requests:
                if under_way.over:
                    break
                await asyncio.sleep(0)
                under_way.send(_with(request_serializer, item))
            under_way.send(None)
            return _with(response_deserializer, await under_way.reply())

        return call

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        for call in sorted(self._calls, key=lambda call: call.number):
            call.end_with(grpc.StatusCode.CANCELLED, "Channel closed!")

    def _begin(self, path: str, timeout: float, metadata: Any) -> Call:
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        call = Call(self.net, current(), self.endpoint, path, timeout, tuple(metadata))
        self._calls.add(call)
        call.on_end = lambda: self._calls.discard(call)
        return call


class Call:
    """The caller's side of a call. `number` orders calls; messages of one call keep their order, each way."""

    def __init__(
        self, net: Net, process: Process, endpoint: str, path: str, timeout_s: float, metadata: tuple[Any, ...]
    ) -> None:
        assert (timeout_s or 0) > 0, f"{path} without a deadline"
        self.net, self.process, self.endpoint, self.path, self.metadata = net, process, endpoint, path, metadata
        net.trace.calls += 1
        self.number = net.trace.calls
        self.deadline_s = net.loop.time() + timeout_s
        self.on_end: Callable[[], object] = lambda: None
        self._items: asyncio.Queue[bytes | grpc.aio.AioRpcError | None] = asyncio.Queue()
        self.over = self.refused = self._reached = self._stalled = False
        self._pipe = Pipe(net)
        self._server: SimServer | None = None
        self._timer = net.at(self.deadline_s, self.end_with, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def send(self, item: bytes | None) -> None:
        """The request, or a frame of it; None ends a stream of frames."""
        if self.over or self._stalled or self.process.dead:
            return
        fate = self.net.fate(self.process, host_of(self.endpoint))
        server = self._server or self.net.listening(self.endpoint)
        if fate is Fate.LOST:
            self._stalled = True
            self._note("lost")
        elif server is None:
            self.net.later(0, self.end_with, grpc.StatusCode.UNAVAILABLE, "connection refused")
        else:
            self._server = server
            self._deliver(server, item, fate)

    def _deliver(self, server: SimServer, item: bytes | None, fate: Fate) -> None:
        loop = self.net.loop
        first, self._reached = not self._reached, True
        if fate is Fate.BROKEN:
            arrives = loop.random.random() < 0.5
            self._note(f"breaks, request {'arrives' if arrives else 'does not'}")
            self.net.later(self.net.delay_s(), self.end_with, grpc.StatusCode.UNAVAILABLE, "connection reset")
            if not arrives:
                return
        self._pipe.send(server.take, self, first, item)
        if fate is Fate.TWICE and first and server.is_unary(self.path):
            self._note("twice")
            self.net.later(loop.random.random() * ECHO_S, server.take_again, self, item)

    async def reply(self) -> bytes:
        try:
            item = await self.next()
            assert item is not None, f"{self.path} ended without a reply"
            self._end()
            return item
        finally:
            self.cancel()

    async def next(self) -> bytes | None:
        """An item of the reply; None at its end. Raises AioRpcError."""
        item = await self._items.get()
        if isinstance(item, grpc.aio.AioRpcError):
            raise item
        return item

    def arrive(self, item: bytes | grpc.aio.AioRpcError | None) -> None:
        if self.over:
            return
        self._items.put_nowait(item)
        if item is None or isinstance(item, grpc.aio.AioRpcError):
            self._end()

    def end_with(self, code: grpc.StatusCode, details: str) -> None:
        if not self.over:
            self._note(f"{code.name}: {details}")
            self.arrive(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))

    def cancel(self) -> None:
        """The caller gave up, if it was not over: the server hears of it."""
        if self.over:
            return
        self._end()
        if self._server is not None and self.net.passes(self.process.host, host_of(self.endpoint)):
            self.net.later(self.net.delay_s(), self._server.cancel, self)

    def _end(self) -> None:
        self.over = True
        self._timer.cancel()
        self.on_end()

    def _note(self, text: str) -> None:
        self.net.trace.add(f"call {self.number} {self.path.rpartition('/')[2]} to {self.endpoint}: {text}")


def _with(serializer: Any, item: Any) -> Any:
    return item if serializer is None else serializer(item)
