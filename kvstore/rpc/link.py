"""One channel to one server, asynchronous (`AsyncLink`) and synchronous (`Link`), with the same five verbs.

A link maps every foreign exception to a `KvError`, gives every call a deadline and its caller's metadata, and retries
nothing: `failover` does. Raw frames pass as `bytes` with no protobuf around them (gRPC refuses memoryviews).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from typing import Any

import grpc
import grpc.aio

from kvstore.core.limits import MAX_MESSAGE_BYTES, RECONNECT_BACKOFF_MS
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import READ_PATH, WRITE_PATH, A, Method, Q
from kvstore.rpc.status import from_rpc_error

_initial, _min, _max = RECONNECT_BACKOFF_MS
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", _initial),
    ("grpc.min_reconnect_backoff_ms", _min),
    ("grpc.max_reconnect_backoff_ms", _max),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class AsyncLink:
    """For asyncio. Make it on the loop that uses it."""

    def __init__(self, endpoint: str, caller: Caller) -> None:
        self.endpoint = endpoint
        self._metadata = caller.to_metadata()
        self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._calls: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<AsyncLink {self.endpoint}>"

    def introduce(self, caller: Caller) -> None:
        """What calls from now on say of their caller: an SDK client learns its node after its links were made."""
        self._metadata = caller.to_metadata()

    async def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        """One unary call. Raises KvError."""
        call = self._calls.get(method.path) or self._make(self._channel.unary_unary, method)
        try:
            reply: A = await call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.endpoint) from None
        return reply

    async def stream(self, method: Method[Q, A], request: Q, timeout_s: float) -> AsyncGenerator[A, None]:
        """A call whose reply is a stream of messages."""
        call = self._calls.get(method.path) or self._make(self._channel.unary_stream, method)
        try:
            async for page in call(request, timeout=timeout_s, metadata=self._metadata):
                yield page
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.endpoint) from None

    async def read_frames(self, request: w.ReadRequest, timeout_s: float) -> AsyncGenerator[bytes, None]:
        """The bytes of a block in order, in frames."""
        call: Any = self._channel.unary_stream(READ_PATH, request_serializer=w.ReadRequest.SerializeToString)
        try:
            async for frame in call(request, timeout=timeout_s, metadata=self._metadata):
                yield frame
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.endpoint) from None

    async def write_frames(self, request: w.WriteRequest, frames: Iterable[bytes], timeout_s: float) -> w.WriteReply:
        """Send a block; `frames` is consumed as the transport takes it."""
        call: Any = self._channel.stream_unary(WRITE_PATH, response_deserializer=w.WriteReply.FromString)
        try:
            reply: w.WriteReply = await call(_with_head(request, frames), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.endpoint) from None
        return reply

    async def close(self) -> None:
        await self._channel.close()

    def _make(self, kind: Any, method: Method[Q, A]) -> Any:
        return self._calls.setdefault(method.path, _callable(kind, method))


class Link:
    """For threads: the synchronous gRPC API, no event loop anywhere. Safe for many threads."""

    def __init__(self, endpoint: str, caller: Caller) -> None:
        self.endpoint = endpoint
        self._metadata = caller.to_metadata()
        self._channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._calls: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<Link {self.endpoint}>"

    def introduce(self, caller: Caller) -> None:
        """See `AsyncLink.introduce`."""
        self._metadata = caller.to_metadata()

    def call(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        call = self._calls.get(method.path) or self._make(self._channel.unary_unary, method)
        try:
            reply: A = call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.endpoint) from None
        return reply

    def stream(self, method: Method[Q, A], request: Q, timeout_s: float) -> Generator[A, None, None]:
        call = self._calls.get(method.path) or self._make(self._channel.unary_stream, method)
        try:
            yield from call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.endpoint) from None

    def read_frames(self, request: w.ReadRequest, timeout_s: float) -> Generator[bytes, None, None]:
        call: Any = self._channel.unary_stream(READ_PATH, request_serializer=w.ReadRequest.SerializeToString)
        try:
            yield from call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.endpoint) from None

    def write_frames(self, request: w.WriteRequest, frames: Iterable[bytes], timeout_s: float) -> w.WriteReply:
        call: Any = self._channel.stream_unary(WRITE_PATH, response_deserializer=w.WriteReply.FromString)
        try:
            reply: w.WriteReply = call(_with_head(request, frames), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.endpoint) from None
        return reply

    def close(self) -> None:
        self._channel.close()

    def _make(self, kind: Any, method: Method[Q, A]) -> Any:
        return self._calls.setdefault(method.path, _callable(kind, method))


def _callable(kind: Any, method: Method[Q, A]) -> Any:
    return kind(
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.reply.FromString,
    )


def _with_head(request: w.WriteRequest, frames: Iterable[bytes]) -> Iterator[bytes]:
    yield request.SerializeToString()
    yield from frames
