"""Fetching a block from a peer: once for all who wait, verified while it streams, kept as a replica where there is
room.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from kvstore.core.errors import Corrupt, KvError, NoSpace, NotFound, Overloaded, Stale, Timeout, Unavailable
from kvstore.core.limits import CONNECT_TIMEOUT_S, MAX_FETCHES, MIB, RETRY_AFTER_S, fetch_timeout_s, open_timeout_s
from kvstore.core.types import Address, Replica
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.entries import address_to_pb
from kvstore.worker.background import Background
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.store import Store
from kvstore.worker.capacity.room import Place
from kvstore.worker.serving.peers import Peer, Peers
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.volumes.held import HeldFiles
from kvstore.worker.volumes.sink import Sink
from kvstore.worker.writes.seal import Sealer
from kvstore.worker.writes.staging import Staging

SCRATCH_BYTES = 256 * MIB
"""Memory for fetched blocks that no volume has room for; they live as long as somebody has them open."""
ROOM_WAIT_FOR_READER_S = 1.0
"""A reader waits no longer for room to keep the block: it can be served without."""
_REASONS = ("corrupt", "timeout", "unavailable", "stale", "no_replica")
"""Why a replica could not be read; those that somebody should look into come first."""
IDLE_TIMEOUT_S = 2.0
"""Between two frames of a peer that has begun to send."""


@dataclasses.dataclass(slots=True, eq=False)
class _Flight:
    """One fetch under way. `scratch_fd` is its result when the block could not be kept."""

    task: asyncio.Task[Block | int]
    waiting: int = 0


class Fetcher:
    """A fetch belongs to the worker and has its own deadline; callers only wait for it."""

    def __init__(
        self,
        node: str,
        store: Store,
        disk: Disk,
        staging: Staging,
        sealer: Sealer,
        peers: Peers,
        held: HeldFiles,
        background: Background,
        place: Place,
    ) -> None:
        self._place = place
        self._node, self._store, self._disk, self._staging = node, store, disk, staging
        self._sealer, self._peers, self._held, self._background = sealer, peers, held, background
        self._flights: dict[Address, _Flight] = {}
        self._scratch_bytes = 0

    async def fetch(
        self, address: Address, replicas: Sequence[Replica], open_block: Callable[[Block], Awaitable[int]]
    ) -> int:
        """A fresh read-only fd of the block, which now is in the scratch share or here, where `open_block` opens it.

        Raises NotFound when no replica has it, else what tells most of what they failed with; never NoSpace.
        """
        if address.length_bytes > self._staging.max_block_bytes:
            raise NotFound(f"{address}: larger than any block", reason="no_replica")
        flight = self._flights.get(address) or self._start(address, replicas)
        flight.waiting += 1
        try:
            return await self._open(await asyncio.shield(flight.task), open_block)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0 and flight.task.done():
                self._release(flight, address)

    def _start(self, address: Address, replicas: Sequence[Replica]) -> _Flight:
        """Raises Overloaded."""
        if len(self._flights) >= MAX_FETCHES:
            raise Overloaded(
                f"{MAX_FETCHES} blocks are being fetched here; retry, or read it remotely", retry_after_s=RETRY_AFTER_S
            )
        flight = self._flights[address] = _Flight(self._background.spawn(self._run(address, replicas)))
        flight.task.add_done_callback(lambda _: self._landed(flight, address))
        return flight

    def _landed(self, flight: _Flight, address: Address) -> None:
        del self._flights[address]
        if flight.waiting == 0:
            self._release(flight, address)

    def _release(self, flight: _Flight, address: Address) -> None:
        """Nobody waits any more: what was only scratch is freed when its readers close it."""
        if flight.task.cancelled() or flight.task.exception():
            return
        scratch_fd = flight.task.result()
        if isinstance(scratch_fd, int):
            self._held.add(scratch_fd, _Scratch(self, address.length_bytes))

    async def _open(self, result: Block | int, open_block: Callable[[Block], Awaitable[int]]) -> int:
        try:
            return self._disk.reopen_read(result) if isinstance(result, int) else await open_block(result)
        except OSError as error:
            raise Unavailable(f"opening the fetched block: {error.strerror}") from None
        except NotFound as error:
            raise Unavailable(f"the fetched block went at once: {error.message}") from None

    async def _run(self, address: Address, replicas: Sequence[Replica]) -> Block | int:
        try:
            async with asyncio.timeout(fetch_timeout_s(address.length_bytes)):
                return await self._try_all(address, replicas)
        except TimeoutError:
            raise Timeout(f"{address}: not fetched within {fetch_timeout_s(address.length_bytes):.0f} s") from None

    async def _try_all(self, address: Address, replicas: Sequence[Replica]) -> Block | int:
        failures: list[KvError] = []
        for replica in replicas:
            if replica.node == self._node:
                continue  # our own map is the newer one
            try:
                return await self._try(address, replica.endpoint)
            except KvError as error:
                failures.append(error)
        raise _verdict(address, failures)

    async def _try(self, address: Address, endpoint: str) -> Block | int:
        peer = self._peers.get(endpoint)
        peer.breaker.check()  # before room is made for nothing
        fetched = await self._receive(peer, address)
        self._store.counters.fetches += 1
        return fetched

    async def _receive(self, peer: Peer, address: Address) -> Block | int:
        if not self._store.in_service:
            return await self._receive_to_scratch(peer, address)
        try:
            return await self._receive_to_keep(peer, address)
        except NoSpace:
            return await self._receive_to_scratch(peer, address)

    async def _receive_to_keep(self, peer: Peer, address: Address) -> Block:
        async with self._staging.private(address.length_bytes, ROOM_WAIT_FOR_READER_S, place=self._place) as (
            staged,
            sink,
        ):
            try:
                sink.guard = partial(self._store.despite_full_disk, staged.volume)
                await self._stream(peer, address, sink)
                state = sink.state()
            except OSError as error:
                raise self._store.explain(staged.volume, error, "writing a fetched block") from None
            known = self._store.get(address.block)
            return known if known is not None else await self._sealer.install_replica(staged, address, state)

    async def _receive_to_scratch(self, peer: Peer, address: Address) -> int:
        if self._scratch_bytes + address.length_bytes > SCRATCH_BYTES:
            raise Overloaded(
                f"{address}: no room to keep it, and the scratch share is in use; retry, or read it remotely",
                retry_after_s=RETRY_AFTER_S,
            )
        self._scratch_bytes += address.length_bytes
        try:
            return await self._fill_scratch(peer, address)
        except BaseException:
            self.free_scratch(address.length_bytes)
            raise

    async def _fill_scratch(self, peer: Peer, address: Address) -> int:
        try:
            sink = Sink(self._store.runtime, self._disk, self._disk.create_in_memory())
            try:
                await self._stream(peer, address, sink)
                return self._disk.reopen_read(sink.fd)
            finally:
                await self._background.run(sink.close())
        except OSError as error:
            raise Unavailable(f"keeping a fetched block in memory: {error.strerror}") from None

    async def _stream(self, peer: Peer, address: Address, sink: Sink) -> None:
        """The peer's bytes into the sink. Raises Corrupt when they are not the block, OSError of the sink."""
        endpoint = peer.link.endpoint
        with peer.breaker.call(fetch_timeout_s(address.length_bytes)):
            async for frame in self._frames(peer, address):
                if sink.length_bytes + len(frame) > address.length_bytes:
                    raise Corrupt(f"{endpoint} sent more than {address}", fault=endpoint)
                await sink.write(frame)
        if sink.length_bytes != address.length_bytes or sink.digest() != address.hash:
            raise Corrupt(f"{endpoint} sent something else than {address}", fault=endpoint)

    async def _frames(self, peer: Peer, address: Address) -> AsyncIterator[bytes]:
        """Frames, each in time: the first after the peer has perhaps read and verified a cold block."""
        request = w.ReadRequest(address=address_to_pb(address))
        patience = CONNECT_TIMEOUT_S + open_timeout_s(address.length_bytes)
        stream = peer.link.read_frames(request, fetch_timeout_s(address.length_bytes))
        async with contextlib.aclosing(stream) as frames:
            while True:
                try:
                    async with asyncio.timeout(patience):
                        frame = await anext(frames, None)
                except TimeoutError:
                    endpoint = peer.link.endpoint
                    raise Timeout(f"{endpoint}: silent for {patience:.1f} s", fault=endpoint) from None
                if frame is None:
                    return
                yield frame
                patience = IDLE_TIMEOUT_S

    def free_scratch(self, length_bytes: int) -> None:
        """Its last reader has closed it, or it was never filled."""
        self._scratch_bytes -= length_bytes


@dataclasses.dataclass(slots=True)
class _Scratch:
    """A block in the scratch share that somebody reads."""

    fetcher: Fetcher
    length_bytes: int

    def resized(self, size_bytes: int) -> None:
        """Nobody writes it."""

    def released(self) -> None:
        self.fetcher.free_scratch(self.length_bytes)


def _verdict(address: Address, failures: Sequence[KvError]) -> KvError:
    """The one error for the caller, of the kind and with the reason of the failure that tells most.

    NotFound when every replica said that it has not got it, else what is worth trying elsewhere.
    """
    text = f"{address}: no replica could be read" + "".join(f"; {failure}" for failure in failures)
    if not failures:
        return NotFound(text, reason="no_replica")
    worst = min(failures, key=_rank)  # the first of equals
    kind = NotFound if isinstance(worst, Stale) else type(worst)
    return kind(text, reason=worst.reason, fault=worst.fault)


def _rank(failure: KvError) -> int:
    """Damage before silence before absence; what is none of these (Overloaded, Denied) before absence too."""
    return _REASONS.index(failure.reason) if failure.reason in _REASONS else _REASONS.index("unavailable")
