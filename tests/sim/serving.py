"""The server's side of the network in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from kvstore.pb import master_pb2 as m
from tests.sim.loop import Process
from tests.sim.pipe import Pipe
from tests.sim.weather import Fate

if TYPE_CHECKING:
    from tests.sim.net import Call, Net


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str) -> None:
        self.method, self.invocation_metadata = method, ()


class SimServer:
    """The part of `grpc.aio.Server` that `rpc.server.serve` uses."""

    def __init__(self, net: Net, process: Process) -> None:
        self.net, self.process = net, process
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._endpoint = ""
        self._under_way: dict[Call, _Serving] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """The same ones again, for a faster look-up."""

    def add_insecure_port(self, address: str) -> int:
        if self.net.listening(address) is not None:
            raise RuntimeError("Address already in use")
        self._endpoint = address
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        self.net.servers[self._endpoint] = self

    async def stop(self, grace: float | None) -> None:
        if self.net.servers.get(self._endpoint) is self:
            del self.net.servers[self._endpoint]
        tasks = [serving.task for serving in self._under_way.values()]
        if tasks and grace:
            await asyncio.wait(tasks, timeout=grace)
        for serving in list(self._under_way.values()):
            serving.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.break_all()

    # ---- called by the network

    def is_unary(self, path: str) -> bool:
        handler = self._find(path)
        return handler is not None and not (handler.request_streaming or handler.response_streaming)

    def take(self, call: Call, first: bool, item: bytes | None) -> None:
        """A message arrives; the first one starts the handler. A host that was cut off meanwhile hears nothing."""
        if self.process.dead or self.net.servers.get(self._endpoint) is not self:
            if not self.process.dead or self.net.listening(self._endpoint) is not None:
                call.end_with(grpc.StatusCode.UNAVAILABLE, "connection refused")
            return
        if first:
            self._begin(call, item)
        elif call in self._under_way:
            self._under_way[call].frames.put_nowait(item)

    def take_again(self, call: Call, item: bytes | None) -> None:
        """A duplicate: it is carried out, and nobody hears of it.

        Over TCP nothing comes again after its answer, and two things rely on that: a publish that was refused (its
        caller has stored the data anew since) and a rename (what was moved back since has the same inode).
        """
        if not self.process.dead and self.net.servers.get(self._endpoint) is self:
            if call.refused or (call.over and call.path.endswith("/Rename")):
                return
            serving = _Serving(self, call, deaf=True)
            serving.task = self.process.spawn(serving.run(self._find(call.path), item))

    def over(self, call: Call) -> None:
        self._under_way.pop(call, None)

    def cancel(self, call: Call) -> None:
        if call in self._under_way:
            self.process.call(self._under_way[call].task.cancel)

    def break_all(self) -> None:
        """The process is gone: its kernel resets the connections, where that can be heard."""
        for call in list(self._under_way):
            if self.net.passes(self.process.host, call.process.host):
                self.net.later(self.net.delay_s(), call.end_with, grpc.StatusCode.UNAVAILABLE, "connection reset")
        self._under_way.clear()

    def _begin(self, call: Call, item: bytes | None) -> None:
        serving = self._under_way[call] = _Serving(self, call)
        serving.frames.put_nowait(item)
        serving.task = self.process.spawn(serving.run(self._find(call.path), item))

    def _find(self, path: str) -> Any:
        return next((found for h in self._handlers if (found := h.service(_Details(path))) is not None), None)


class _Serving:
    """One call at its server, and its `grpc.aio.ServicerContext`. `deaf`: nobody waits for its reply."""

    task: asyncio.Task[None]

    def __init__(self, server: SimServer, call: Call, *, deaf: bool = False) -> None:
        self._server, self._net, self._call, self._deaf = server, server.net, call, deaf
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._status: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] | None = None
        self._silent = False
        self._pipe = Pipe(server.net)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._call.metadata

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        self._status = (code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError(details)

    async def run(self, handler: Any, item: bytes | None) -> None:
        left_s = self._call.deadline_s - self._net.loop.time()
        try:
            if left_s <= 0:
                return
            async with asyncio.timeout(left_s):
                await self._serve(handler, item)
        except TimeoutError:
            return  # the caller has given up as well
        except grpc.aio.AbortError:
            assert self._status is not None
            code, details, trailing = self._status
            self._send(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details))
        finally:
            if not self._deaf:
                self._server.over(self._call)

    async def _serve(self, handler: Any, item: bytes | None) -> None:
        if handler is None:
            await self.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if handler.request_streaming:
            self._send(_with(handler.response_serializer, await handler.stream_unary(self._frames(), self)))
            return
        request = _with(handler.request_deserializer, item)
        if not handler.response_streaming:
            reply = await handler.unary_unary(request, self)
            self._call.refused |= isinstance(reply, m.PublishReply) and any(r.HasField("error") for r in reply.results)
            self._send(_with(handler.response_serializer, reply))
            return
        async with contextlib.aclosing(handler.unary_stream(request, self)) as replies:
            async for reply in replies:
                self._send(_with(handler.response_serializer, reply))
                await asyncio.sleep(0)
        self._send(None)

    async def _frames(self) -> AsyncIterator[bytes]:
        while (frame := await self.frames.get()) is not None:
            yield frame

    def _send(self, item: bytes | grpc.aio.AioRpcError | None) -> None:
        """On its way to the caller, behind what was sent before."""
        net, call, process = self._net, self._call, self._server.process
        if isinstance(item, bytes):
            net.watch(call.path, process, call.process, item)
        if self._deaf or self._silent or process.dead:
            return
        fate = net.fate(process, call.process.host)
        if fate is Fate.LOST:
            self._silent = True
            net.trace.add(f"call {call.number} {call.path.rpartition('/')[2]}: reply lost")
            return
        if fate is Fate.BROKEN:
            self._silent = True
            item = grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "connection reset"
            )
            net.trace.add(f"call {call.number} {call.path.rpartition('/')[2]}: connection reset, reply lost")
        self._pipe.send(call.arrive, item)


def _with(serializer: Any, item: Any) -> Any:
    return item if serializer is None else serializer(item)
