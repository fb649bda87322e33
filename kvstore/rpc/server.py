"""gRPC servers: one guard around every handler, bounds, health, and a clear word when the port is taken."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from kvstore.core.errors import KvError, Unavailable
from kvstore.core.limits import MAX_INFLIGHT_RPCS, MAX_MESSAGE_BYTES
from kvstore.rpc.metadata import Caller
from kvstore.rpc.status import to_status

log = logging.getLogger(__name__)
S = TypeVar("S")
Q = TypeVar("Q")
A = TypeVar("A")
Context = grpc.aio.ServicerContext[Any, Any]

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),  # two masters on one port must not share it in silence
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def unary(handler: Callable[[S, Q, Caller], Awaitable[A]]) -> Callable[[S, Q, Context], Awaitable[A]]:
    """Make a servicer method of ``async (self, request, caller) -> reply``: any exception ends as a typed status."""

    @functools.wraps(handler)
    async def method(self: S, request: Q, context: Context) -> A:
        try:
            return await handler(self, request, caller_of(context))
        except Exception as error:  # noqa: BLE001 - the one guard
            await fail(context, error)

    return method


def streaming(handler: Callable[[S, Q, Caller], AsyncIterator[A]]) -> Callable[[S, Q, Context], AsyncIterator[A]]:
    """The same for a handler that yields messages (or raw frames)."""

    @functools.wraps(handler)
    async def method(self: S, request: Q, context: Context) -> AsyncIterator[A]:
        try:
            async for item in handler(self, request, caller_of(context)):
                yield item
        except Exception as error:  # noqa: BLE001 - the one guard
            await fail(context, error)

    return method


def caller_of(context: Context) -> Caller:
    return Caller.from_metadata(context.invocation_metadata() or ())


async def fail(context: Context, error: Exception) -> NoReturn:
    """End the call with the error's status; what is no KvError is logged with its trace and hidden."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, KvError):
        log.error("internal error in a handler", exc_info=error)
        error = KvError("internal error; the server's log has the trace")
    status, details, trailing = to_status(error)
    await context.abort(status, details, trailing)


class Server:
    """A running server. `endpoint` is ``host:port`` with the port that was really bound (0 asks for any)."""

    def __init__(self, server: grpc.aio.Server, health: HealthServicer, host: str, port: int) -> None:
        self._server, self._health = server, health
        self.host, self.port = host, port

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers for the empty service name."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)

    async def stop(self, grace_s: float = 1.0) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def serve(
    listen: str,
    register: Sequence[Callable[[grpc.aio.Server], None]],
    raw: grpc.GenericRpcHandler | None = None,
) -> Server:
    """Start a server on ``host:port``. `register` adds servicers; `raw` the handlers of raw frames.

    Raises Unavailable with one clear line when the address cannot be bound.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_INFLIGHT_RPCS)
    for add in register:
        add(server)
    if raw is not None:
        server.add_generic_rpc_handlers((raw,))
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    host = listen.rpartition(":")[0]
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {listen}: is another process there? ({error})") from None
    await server.start()
    return Server(server, health, host, port)


async def stop_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
