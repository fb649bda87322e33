"""One channel to one server, asynchronous (`AsyncLink`) and synchronous (`Link`), with the same five verbs.

A link maps every foreign exception to a `KvError`, gives every call a deadline and its caller's metadata, and retries
nothing: `failover` does. Raw frames pass as `bytes` with no protobuf around them (gRPC refuses memoryviews).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from kvstore.core.errors import Unavailable
from kvstore.pb import worker_pb2 as w
from kvstore.rpc import fork
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import READ_PATH, WRITE_PATH, A, Method, Q
from kvstore.rpc.status import from_rpc_error
from kvstore.rpc.transport import CHANNEL_OPTIONS, GRPC, Transport

REPLACE_AFTER_S = 0.1
"""A channel younger than this had no fair chance yet: many threads that fail at once make one new channel."""
_of_the_parent: list[object] = []
"""In the child of a fork, for ever: the end of the last channel of a process joins gRPC's poller, a thread that only
the parent has.
"""


class AsyncLink:
    """For asyncio. Make it on the loop that uses it. In the child of a fork it is of no use, and its end harmless."""

    def __init__(self, endpoint: str, caller: Caller, transport: Transport = GRPC) -> None:
        self.endpoint = endpoint
        self._metadata = caller.to_metadata()
        self._channel = transport.channel(endpoint)
        self._calls: dict[str, Any] = {}
        fork.watch(self)

    def __repr__(self) -> str:
        return f"<AsyncLink {self.endpoint}>"

    def introduce(self, caller: Caller) -> None:
        """What calls from now on say of their caller: an SDK client learns its node after its links were made."""
        self._metadata = caller.to_metadata()

    async def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        """One unary call. Raises KvError."""
        call = self._calls.get(method.path) or self._make(self._channel.unary_unary, method)
        with self._mapped():
            reply: A = await call(request, timeout=timeout_s, metadata=self._metadata)
        return reply

    async def stream(self, method: Method[Q, A], request: Q, timeout_s: float) -> AsyncGenerator[A, None]:
        """A call whose reply is a stream of messages."""
        call = self._calls.get(method.path) or self._make(self._channel.unary_stream, method)
        with self._mapped():
            async for page in call(request, timeout=timeout_s, metadata=self._metadata):
                yield page

    async def read_frames(self, request: w.ReadRequest, timeout_s: float) -> AsyncGenerator[bytes, None]:
        """The bytes of a block in order, in frames."""
        call: Any = self._channel.unary_stream(READ_PATH, request_serializer=w.ReadRequest.SerializeToString)
        with self._mapped():
            async for frame in call(request, timeout=timeout_s, metadata=self._metadata):
                yield frame

    async def write_frames(self, request: w.WriteRequest, frames: Iterable[bytes], timeout_s: float) -> w.WriteReply:
        """Send a block; `frames` is consumed as the transport takes it."""
        call: Any = self._channel.stream_unary(WRITE_PATH, response_deserializer=w.WriteReply.FromString)
        with self._mapped():
            reply: w.WriteReply = await call(_with_head(request, frames), timeout=timeout_s, metadata=self._metadata)
        return reply

    async def close(self) -> None:
        await self._channel.close()

    def forget(self) -> None:
        """In the child of a fork, see `kvstore.rpc.fork`."""
        _of_the_parent.append(self._channel)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """What a call raises becomes a KvError, even the CancelledError with which the end of a channel ends calls."""
        try:
            yield
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.endpoint) from None
        except grpc.aio.UsageError as error:
            raise Unavailable(f"{self.endpoint}: {error}", fault=self.endpoint) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # it is the caller who was cancelled
            raise Unavailable(f"{self.endpoint}: the channel was closed", fault=self.endpoint) from None

    def _make(self, kind: Any, method: Method[Q, A]) -> Any:
        return self._calls.setdefault(method.path, _callable(kind, method))


class Link:
    """For threads: the synchronous gRPC API, no event loop anywhere. Safe for many threads.

    A channel whose connection failed is replaced, not waited for: in grpc 1.78's synchronous API its own attempts to
    reconnect time out for up to 4 s after the server is back, a new channel connects at once (tried).
    """

    def __init__(self, endpoint: str, caller: Caller) -> None:
        self.endpoint = endpoint
        self._metadata = caller.to_metadata()
        self._wire = _Wire(endpoint)
        self._retired: _Wire | None = None
        self._closed = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Link {self.endpoint}>"

    def introduce(self, caller: Caller) -> None:
        """See `AsyncLink.introduce`."""
        self._metadata = caller.to_metadata()

    def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        with self._mapped() as wire:
            call = wire.calls.get(method.path) or wire.make(wire.channel.unary_unary, method)
            reply: A = call(request, timeout=timeout_s, metadata=self._metadata)
            return reply

    def stream(self, method: Method[Q, A], request: Q, timeout_s: float) -> Generator[A, None, None]:
        with self._mapped() as wire:
            call = wire.calls.get(method.path) or wire.make(wire.channel.unary_stream, method)
            yield from call(request, timeout=timeout_s, metadata=self._metadata)

    def read_frames(self, request: w.ReadRequest, timeout_s: float) -> Generator[bytes, None, None]:
        with self._mapped() as wire:
            call: Any = wire.channel.unary_stream(READ_PATH, request_serializer=w.ReadRequest.SerializeToString)
            yield from call(request, timeout=timeout_s, metadata=self._metadata)

    def write_frames(self, request: w.WriteRequest, frames: Iterable[bytes], timeout_s: float) -> w.WriteReply:
        with self._mapped() as wire:
            call: Any = wire.channel.stream_unary(WRITE_PATH, response_deserializer=w.WriteReply.FromString)
            reply: w.WriteReply = call(_with_head(request, frames), timeout=timeout_s, metadata=self._metadata)
            return reply

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._wire.channel.close()
        if self._retired:
            self._retired.channel.close()

    @contextmanager
    def _mapped(self) -> Iterator[_Wire]:
        """The channel for one call; what it raises becomes a KvError."""
        wire = self._wire
        try:
            yield wire
        except grpc.RpcError as error:
            known = from_rpc_error(error, self.endpoint)
            if isinstance(known, Unavailable) and known.fault == self.endpoint:
                self._replace(wire)
            raise known from None
        except ValueError as error:  # of a closed channel
            raise Unavailable(f"{self.endpoint}: {error}", fault=self.endpoint) from None

    def _replace(self, failed: _Wire) -> None:
        """Once for all who saw it fail, and not too often. The old one serves what is under way until the next time."""
        with self._lock:
            if self._closed or self._wire is not failed or failed.age_s < REPLACE_AFTER_S:
                return
            retired, self._retired, self._wire = self._retired, failed, _Wire(self.endpoint)
        if retired:
            retired.channel.close()


class _Wire:
    """A channel and its callables."""

    def __init__(self, endpoint: str) -> None:
        self.channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self.calls: dict[str, Any] = {}
        self._made_s = time.monotonic()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._made_s

    def make(self, kind: Any, method: Method[Q, A]) -> Any:
        return self.calls.setdefault(method.path, _callable(kind, method))


def _callable(kind: Any, method: Method[Q, A]) -> Any:
    return kind(
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.reply.FromString,
    )


def _with_head(request: w.WriteRequest, frames: Iterable[bytes]) -> Iterator[bytes]:
    yield request.SerializeToString()
    yield from frames
