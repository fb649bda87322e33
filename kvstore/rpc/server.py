"""gRPC servers: one guard around every handler, bounds, health, and a clear word when the port is taken."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from kvstore.core.errors import InvalidRequest, KvError, Overloaded, Unavailable
from kvstore.core.limits import MAX_INFLIGHT_RPCS, RETRY_AFTER_S, STALL_TIMEOUT_S
from kvstore.rpc.metadata import Caller
from kvstore.rpc.status import to_status
from kvstore.rpc.transport import GRPC, Transport

log = logging.getLogger(__name__)
S = TypeVar("S")
C = TypeVar("C", bound="Servicer")
Q = TypeVar("Q")
A = TypeVar("A")
Context = grpc.aio.ServicerContext[Any, Any]


class _Malformed(NamedTuple):
    """In place of a request whose bytes are none."""

    error: str


class _Parsing(grpc.GenericRpcHandler):
    """Lets the guard see requests that cannot be parsed: gRPC would log each one with a trace, and answer UNKNOWN."""

    def __init__(self, inner: grpc.GenericRpcHandler) -> None:
        self._inner = inner
        self._known: dict[str, Any] = {}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        known = self._known.get(details.method)
        if known is None:
            handler: Any = self._inner.service(details)
            if handler is None:
                return None
            parse = functools.partial(_parse, handler.request_deserializer)
            known = self._known[details.method] = handler._replace(request_deserializer=parse)
        return known


class _Registrar:
    """The part of a server that generated code registers its handlers with."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(tuple(map(_Parsing, handlers)))

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """The same ones again; `grpc.aio` makes no use of them."""


def _parse(deserialize: Callable[[bytes], A], data: bytes) -> A | _Malformed:
    try:
        return deserialize(data)
    except DecodeError as error:
        return _Malformed(str(error))


class _Health(HealthServicer):
    """Without Watch: its streams would last for ever, and take the place of calls."""

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> NoReturn:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask again and again with Check")


class Admission:
    """Calls under way, at most `limit`: the next one is Overloaded before anything has happened."""

    def __init__(self, limit: int = MAX_INFLIGHT_RPCS) -> None:
        self.limit, self.under_way, self.refused = limit, 0, 0

    def __enter__(self) -> None:
        if self.under_way >= self.limit:
            self.refused += 1
            raise Overloaded(f"{self.limit} calls are under way here; retry later", retry_after_s=RETRY_AFTER_S)
        self.under_way += 1

    def __exit__(self, *_: object) -> None:
        self.under_way -= 1


class Servicer(Protocol):
    @property
    def admission(self) -> Admission: ...


def unary(handler: Callable[[C, Q, Caller], Awaitable[A]]) -> Callable[[C, Q, Context], Awaitable[A]]:
    """Make a servicer method of ``async (self, request, caller) -> reply``: any exception ends as a typed status."""

    async def admitted(self: C, request: Q, caller: Caller) -> A:
        with self.admission:
            return await handler(self, request, caller)

    return vital(functools.wraps(handler)(admitted))


def vital(handler: Callable[[S, Q, Caller], Awaitable[A]]) -> Callable[[S, Q, Context], Awaitable[A]]:
    """The same for what keeps the cluster alive: it is served however many others are under way."""

    @functools.wraps(handler)
    async def method(self: S, request: Q, context: Context) -> A:
        try:
            return await handler(self, _whole(request), caller_of(context))
        except Exception as error:  # noqa: BLE001 - the one guard
            await fail(context, error)

    return method


def streaming(handler: Callable[[C, Q, Caller], AsyncIterator[A]]) -> Callable[[C, Q, Context], AsyncIterator[A]]:
    """Like `unary` for a handler that yields messages (or raw frames). Who does not read for `STALL_TIMEOUT_S` loses
    the call.
    """

    @functools.wraps(handler)
    async def method(self: C, request: Q, context: Context) -> AsyncIterator[A]:
        try:
            with self.admission:
                async for item in handler(self, _whole(request), caller_of(context)):
                    with _cancelled_after(STALL_TIMEOUT_S):
                        yield item
        except Exception as error:  # noqa: BLE001 - the one guard
            await fail(context, error)

    return method


def _whole(request: Q | _Malformed) -> Q:
    """Raises InvalidRequest."""
    if isinstance(request, _Malformed):
        raise InvalidRequest(f"the request cannot be parsed: {request.error}")
    return request


@contextmanager
def _cancelled_after(timeout_s: float) -> Iterator[None]:
    """Cancel the call's task while it hands a message over. (`asyncio.timeout` would raise here, where nobody waits:
    the generator is suspended, and gRPC sends.)
    """
    task = asyncio.current_task()
    assert task is not None
    timer = asyncio.get_running_loop().call_later(timeout_s, task.cancel)
    try:
        yield
    finally:
        timer.cancel()


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
    transport: Transport = GRPC,
) -> Server:
    """Start a server on ``host:port``. `register` adds servicers; `raw` the handlers of raw frames.

    Raises Unavailable with one clear line when the address cannot be bound.
    """
    server = transport.server()
    for add in register:
        add(cast("grpc.aio.Server", _Registrar(server)))
    if raw is not None:
        server.add_generic_rpc_handlers((raw,))
    health = _Health()
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
