"""A worker's raw frames, served in the test's process: sends and takes what the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from kvstore.core.errors import KvError
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.methods import READ_PATH, WORKER_GIVE_UP, WRITE_PATH
from kvstore.rpc.server import Server, fail, serve

Frames = Sequence[bytes] | KvError
"""What a read brings: frames, or the error it ends with."""


class FakeFrames(grpc.GenericRpcHandler):
    """`read` answers a ReadRequest with frames or an error, `write` a WriteRequest and its bytes with a reply or one.

    `reads`, `writes` and `given_up` list what came.
    """

    def __init__(
        self,
        read: Callable[[w.ReadRequest], Frames] | None = None,
        write: Callable[[w.WriteRequest, bytes], w.WriteReply | KvError] | None = None,
    ) -> None:
        self._read, self._write = read, write
        self.reads: list[w.ReadRequest] = []
        self.writes: list[w.WriteRequest] = []
        self.given_up: list[w.GiveUpRequest] = []

    async def serve(self) -> Server:
        server = await serve("127.0.0.1:0", [], raw=self)
        await server.set_serving(True)
        return server

    def service(self, details: Any) -> Any:
        if details.method == READ_PATH:
            return grpc.unary_stream_rpc_method_handler(self._serve_read)
        if details.method == WRITE_PATH:
            return grpc.stream_unary_rpc_method_handler(self._serve_write)
        if details.method == WORKER_GIVE_UP.path:
            return grpc.unary_unary_rpc_method_handler(self._serve_give_up)
        return None

    async def _serve_give_up(self, data: bytes, context: Any) -> bytes:
        self.given_up.append(w.GiveUpRequest.FromString(data))
        return w.GiveUpReply().SerializeToString()

    async def _serve_read(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        request = w.ReadRequest.FromString(data)
        self.reads.append(request)
        assert self._read is not None
        frames = self._read(request)
        if isinstance(frames, KvError):
            await fail(context, frames)
        for frame in frames:
            yield frame

    async def _serve_write(self, frames: AsyncIterator[bytes], context: Any) -> bytes:
        head = w.WriteRequest.FromString(await anext(frames))
        self.writes.append(head)
        data = b"".join([frame async for frame in frames])
        assert self._write is not None
        reply = self._write(head, data)
        if isinstance(reply, KvError):
            await fail(context, reply)
        return reply.SerializeToString()
