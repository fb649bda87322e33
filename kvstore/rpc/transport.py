"""What carries calls: gRPC over TCP. Links and servers are made on it; a simulation brings one of its own."""

from __future__ import annotations

from typing import Final, Protocol

import grpc.aio

from kvstore.core.limits import (
    HANDSHAKE_TIMEOUT_S,
    MAX_INFLIGHT_RPCS,
    MAX_MESSAGE_BYTES,
    MAX_STREAMS_PER_CONNECTION,
    RECONNECT_BACKOFF_MS,
    RESERVED_RPCS,
)

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
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),  # two masters on one port must not share it in silence
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_TIMEOUT_S)),
)


class Transport(Protocol):
    def channel(self, endpoint: str) -> grpc.aio.Channel:
        """For calls to ``host:port``; connects by itself, at the first call and again."""

    def server(self) -> grpc.aio.Server: ...


class GrpcTransport:
    """The real one."""

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)

    def server(self) -> grpc.aio.Server:
        return grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_INFLIGHT_RPCS + RESERVED_RPCS)


GRPC: Final = GrpcTransport()
