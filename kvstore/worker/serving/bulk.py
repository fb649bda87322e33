"""Blocks as raw frames, for whoever is not on this node. `service` puts these behind gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvstore.core.errors import Corrupt, InvalidRequest, KvError, Timeout, TooLarge
from kvstore.core.hashing import BlockHasher
from kvstore.core.limits import FRAME_BYTES, STALL_TIMEOUT_S, fetch_timeout_s, open_timeout_s
from kvstore.core.types import Address, Replica
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.entries import address_from_pb, address_to_pb
from kvstore.rpc.metadata import Caller
from kvstore.worker.blocks.store import Store
from kvstore.worker.blocks.verify import FILE_ERRNOS
from kvstore.worker.reports.report import REPORT_INTERVAL_S
from kvstore.worker.serving.opener import Opener
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.writes.seal import Sealer
from kvstore.worker.writes.sessions import Sessions
from kvstore.worker.writes.staging import Staging

M = TypeVar("M", bound=Message)
SHIELD_S = 2 * REPORT_INTERVAL_S
"""A block that a peer has just read stays: the peer is about to name itself a replica (rule 12)."""


class Bulk:
    def __init__(
        self, store: Store, disk: Disk, sessions: Sessions, staging: Staging, sealer: Sealer, opener: Opener
    ) -> None:
        self._store, self._disk, self._sessions = store, disk, sessions
        self._staging, self._sealer, self._opener = staging, sealer, opener

    async def read(self, data: bytes, caller: Caller) -> AsyncIterator[bytes]:
        """`data` is a ReadRequest; yields the bytes asked for in frames of at most FRAME_BYTES.

        Raises NotFound, Stale, Corrupt, Unavailable, Timeout; InvalidRequest for a range outside of the block.
        """
        request = _parse(w.ReadRequest, data)
        address = address_from_pb(request.address)
        first, end = request.offset_bytes, request.offset_bytes + request.size_bytes
        end = end if request.size_bytes else address.length_bytes
        if not first <= end <= address.length_bytes:
            raise InvalidRequest(f"bytes {first} to {end} are not in a block of {address.length_bytes}")
        replicas = [Replica(r.volume, r.tier, r.node, r.endpoint) for r in request.replicas]
        timeout_s = fetch_timeout_s(address.length_bytes) if replicas else open_timeout_s(address.length_bytes)
        opened = await self._opener.open(address, replicas, timeout_s)
        volume = self._volume_of(address) if opened.local else None
        hasher = BlockHasher() if end - first == address.length_bytes else None
        reader = _Reader(self._store, self._disk, opened.fd, first, end, hasher)
        try:
            async for frame in reader:
                yield frame
                self._store.counters.read_bytes += len(frame)
            if hasher is not None and hasher.digest() != address.hash:
                await self._opener.doubt(address)
        except OSError as error:
            if volume is None:
                raise Corrupt(f"{address}: reading failed: {error.strerror}") from None
            if error.errno in FILE_ERRNOS:  # this file, not its drive: it goes to quarantine if that is so
                await self._opener.doubt(address)
            raise self._store.explain(volume, error, f"reading {address}") from None
        finally:
            await reader.close()
        if block := self._store.get(address.block):
            block.shielded_until_s = self._store.runtime.monotonic_s() + SHIELD_S

    async def write(self, frames: AsyncIterator[bytes], caller: Caller) -> w.WriteReply:
        """The first frame is a WriteRequest, the others are the block's bytes. It belongs to the request's session.

        Raises InvalidRequest, TooLarge, NoSpace, Timeout, Corrupt when the bytes are not what the request said.
        """
        request = _parse(w.WriteRequest, await _next(frames) or b"")
        session = request.session or caller.session
        if not session:
            raise InvalidRequest("a write names its session")
        if not request.length_bytes > 0:
            raise InvalidRequest("an empty file is no block: publish the name without an address")
        if request.length_bytes > self._staging.max_block_bytes:
            raise TooLarge(f"{request.length_bytes} bytes are too many; at most {self._staging.max_block_bytes}")
        self._sessions.enter(session)
        try:
            return await self._receive(request, session, frames)
        finally:
            self._sessions.leave(session, self._store.runtime.monotonic_s())  # its grace begins

    def _volume_of(self, address: Address) -> Volume | None:
        """Where the block lies now, None when it went."""
        block = self._store.get(address.block)
        return block.volume if block is not None else None

    async def _receive(self, request: w.WriteRequest, session: int, frames: AsyncIterator[bytes]) -> w.WriteReply:
        async with self._staging.private(request.length_bytes) as (staged, sink):
            sink.guard = partial(self._store.despite_full_disk, staged.volume)
            try:
                while (frame := await _next(frames)) is not None:
                    if sink.length_bytes + len(frame) > request.length_bytes:
                        raise InvalidRequest(f"more than the {request.length_bytes} bytes that were announced")
                    await sink.write(frame)
                state = sink.state()
            except OSError as error:
                raise self._store.explain(staged.volume, error, "writing a block") from None
            if sink.length_bytes != request.length_bytes:
                raise InvalidRequest(f"{sink.length_bytes} of {request.length_bytes} bytes arrived")
            digest = sink.digest()
            if digest != request.hash:
                raise Corrupt("the bytes that arrived differ from their hash; send them again")
            block = await self._sealer.install(staged, session, digest, request.length_bytes, state)
        return w.WriteReply(address=address_to_pb(block.address), volume=block.volume.id)


class _Reader:
    """Frames of a file, read in threads, one ahead of what was asked for.

    What is sent whole is hashed on its way: the one place that sees a block which was sealed under a wrong hash, or
    whose memory went bad, before its peers all take this replica for good. It costs 0.02 of the 0.65 ms of a frame.
    """

    def __init__(self, store: Store, disk: Disk, fd: int, first: int, end: int, hasher: BlockHasher | None) -> None:
        self._store, self._disk, self._fd, self._at, self._end = store, disk, fd, first, end
        self._hasher = hasher
        self._ahead: asyncio.Future[bytes] | None = None

    def __aiter__(self) -> _Reader:
        return self

    async def __anext__(self) -> bytes:
        ahead = self._ahead or self._read()
        if ahead is None:
            raise StopAsyncIteration
        frame = await ahead
        if not frame:
            raise KvError("a block became shorter while it was read")
        self._at += len(frame)
        self._ahead = self._read()
        return frame

    async def close(self) -> None:
        if self._ahead is not None:
            await asyncio.wait([self._ahead])
        self._disk.close(self._fd)

    def _read(self) -> asyncio.Future[bytes] | None:
        size = min(FRAME_BYTES, self._end - self._at)
        if size == 0:
            return None
        return asyncio.ensure_future(self._store.runtime.in_thread(self._take, size, self._at))

    def _take(self, size_bytes: int, offset: int) -> bytes:
        frame = self._disk.read(self._fd, size_bytes, offset)
        if self._hasher is not None:
            self._hasher.update(frame)
        return frame


async def _next(frames: AsyncIterator[bytes]) -> bytes | None:
    """The next frame, None at the end. Raises Timeout when the sender has stopped in the middle."""
    try:
        async with asyncio.timeout(STALL_TIMEOUT_S):
            return await anext(frames, None)
    except TimeoutError:
        raise Timeout(f"no frame came for {STALL_TIMEOUT_S:g} s; send the block again") from None


def _parse(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidRequest(f"the first frame is not a {kind.__name__}") from None
