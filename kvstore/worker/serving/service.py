"""The gRPC face of the worker: `Stat`, `Describe`, `GiveUp`, and raw frames (identity serializers, see `rpc.link`)."""

# ruff: noqa: N802 - the names of the methods are the wire's

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from kvstore.core.errors import Denied, InvalidRequest
from kvstore.core.limits import MAX_BATCH, MAX_BULK_STREAMS
from kvstore.core.types import Address
from kvstore.pb import worker_pb2 as w
from kvstore.pb import worker_pb2_grpc
from kvstore.pb.common_pb2 import Address as Wire
from kvstore.rpc import server
from kvstore.rpc.entries import address_from_pb
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import READ_PATH, WRITE_PATH
from kvstore.worker.serving.bulk import Bulk

Context = server.Context
SERVICE, READ = READ_PATH.strip("/").split("/")
WRITE = WRITE_PATH.rpartition("/")[2]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """`stat` answers for the worker, `describe` for some of its blocks, `give_up` ends some of a session; `cluster`
    says which one it belongs to now.
    """

    def __init__(
        self,
        stat: Callable[[], w.WorkerStatReply],
        describe: Callable[[Sequence[Address]], Sequence[w.BlockInfo]],
        give_up: Callable[[int, Sequence[Address]], None],
        bulk: Bulk,
        cluster: Callable[[], str],
    ) -> None:
        self._stat, self._describe, self._give_up, self._bulk, self._cluster = stat, describe, give_up, bulk, cluster
        self.admission = server.Admission(MAX_BULK_STREAMS)

    def add_to(self, grpc_server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(self, grpc_server)

    def raw_handlers(self) -> grpc.GenericRpcHandler:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            READ: grpc.unary_stream_rpc_method_handler(self.read),
            WRITE: grpc.stream_unary_rpc_method_handler(self.write),
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    @server.vital
    async def Stat(self, request: w.WorkerStatRequest, caller: Caller) -> w.WorkerStatReply:
        self._welcome(caller)
        return self._stat()

    @server.vital
    async def Describe(self, request: w.DescribeRequest, caller: Caller) -> w.DescribeReply:
        self._welcome(caller)
        return w.DescribeReply(blocks=self._describe(_addresses(request.addresses)))

    @server.vital
    async def GiveUp(self, request: w.GiveUpRequest, caller: Caller) -> w.GiveUpReply:
        self._welcome(caller)
        self._give_up(request.session or caller.session, _addresses(request.addresses))
        return w.GiveUpReply()

    @server.streaming
    async def read(self, data: bytes, caller: Caller) -> AsyncIterator[bytes]:
        self._welcome(caller)
        async for frame in self._bulk.read(data, caller):
            yield frame

    async def write(self, frames: AsyncIterator[bytes], context: Context) -> bytes:
        try:
            caller = server.caller_of(context)
            self._welcome(caller)
            with self.admission:
                reply = await self._bulk.write(aiter(frames), caller)
            return reply.SerializeToString()
        except Exception as error:  # noqa: BLE001 - the one guard
            await server.fail(context, error)

    def _welcome(self, caller: Caller) -> None:
        """Addresses of pods are reused: a caller of another cluster means somebody else (rule 16)."""
        mine = self._cluster()
        if mine and caller.cluster and caller.cluster != mine:
            raise Denied(f"this worker belongs to cluster {mine}, the caller to {caller.cluster}")


def _addresses(wire: Sequence[Wire]) -> list[Address]:
    """Raises InvalidRequest for more than one call may carry."""
    if len(wire) > MAX_BATCH:
        raise InvalidRequest(f"{len(wire)} blocks are too many for one call; at most {MAX_BATCH}")
    return [address_from_pb(each) for each in wire]
