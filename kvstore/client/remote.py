"""Blocks over the network, for who has no local worker: `AsyncRemote` and `Remote`.

`store` sends frames to a worker that `core.placement` picks from the cached map; `load` takes a block from a live
replica into the caller's buffer and compares its hash before it returns. Another worker is tried after every failure
that is the worker's own (`ELSEWHERE`, `is_elsewhere`). A `store` is safe to repeat: nobody can see a block before its
publish.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, suppress
from typing import NamedTuple

from kvstore.client.cluster import MAX_TRIES, AsyncCluster, Cluster, candidates, in_order, pick
from kvstore.client.deadline import Deadline
from kvstore.client.elsewhere import ELSEWHERE, is_elsewhere
from kvstore.client.sockets import SealedBlock
from kvstore.core.errors import Corrupt, KvError, NotFound
from kvstore.core.hashing import BlockHasher
from kvstore.core.limits import MAX_BATCH, METADATA_TIMEOUT_S, fetch_timeout_s
from kvstore.core.placement import Candidate
from kvstore.core.types import Address, Replica
from kvstore.pb import worker_pb2 as w
from kvstore.rpc import methods
from kvstore.rpc.entries import address_from_pb, address_to_pb


class Described(NamedTuple):
    """What a worker knows of a block that it has."""

    node: str
    tier: str
    heat: float
    """Touches just now that it is worth: 1 after the first, halved with each turnover of the worker."""
    idle_s: float
    """Since its last use there."""
    expires_s: float | None
    """From now, unless it is used; None: it has no TTL."""
    pinned: bool
    """And the pin holds there."""


def described(replica: Replica, reply: w.DescribeReply) -> list[Described]:
    return [
        Described(replica.node, b.tier, b.heat, b.idle_s, b.expires_s if b.expires_s >= 0 else None, b.pinned)
        for b in reply.blocks
        if b.here
    ]


Frames = Callable[[], Iterable[bytes]]
"""Makes the frames of a block anew for every attempt."""


class Sink:
    """A buffer that frames fill in order, hashed as they come."""

    def __init__(self, address: Address, view: memoryview) -> None:
        self._address, self._view = address, view
        self._hasher = BlockHasher()

    def add(self, frame: bytes) -> None:
        at = self._hasher.length_bytes
        if at + len(frame) > len(self._view):
            raise Corrupt(f"more than the {len(self._view)} bytes of block {self._address} came")
        self._view[at : at + len(frame)] = frame
        self._hasher.update(frame)

    def finish(self, endpoint: str) -> None:
        """Raises Corrupt unless this is the block that was asked for."""
        if self._hasher.length_bytes != self._address.length_bytes or self._hasher.digest() != self._address.hash:
            raise Corrupt(f"{endpoint} sent other bytes than block {self._address}", fault=endpoint)


def step_timeout_s(deadline: Deadline, length_bytes: int, others: int) -> float:
    """For one attempt: what is left, but while there are others to ask no more than the transfer should take."""
    return deadline.at_most(fetch_timeout_s(length_bytes)) if others else deadline.left_s


class AsyncRemote:
    """For asyncio."""

    def __init__(self, cluster: AsyncCluster, session: int) -> None:
        self._cluster, self._session = cluster, session
        self._giving_up: set[asyncio.Task[None]] = set()

    async def store(self, length_bytes: int, digest: int, frames: Frames, *, timeout_s: float) -> SealedBlock:
        """Send a block to a worker; where it is then."""
        deadline, tried = Deadline(timeout_s), set[str]()
        request = w.WriteRequest(session=self._session, length_bytes=length_bytes, hash=digest)
        while True:
            cluster = await self._cluster.map(timeout_s=deadline.left_s)
            endpoint = pick(cluster, self._cluster.breakers.closed, length_bytes, tried)
            tried.add(endpoint)
            try:
                step_s = step_timeout_s(deadline, length_bytes, len(cluster.nodes) - len(tried))
                with self._cluster.call(endpoint, step_s):
                    reply = await self._cluster.link(endpoint).write_frames(request, frames(), step_s)
                return stored(reply, length_bytes, digest, endpoint)
            except KvError as error:
                last_try(error, deadline, tried, candidates(cluster, self._cluster.breakers.closed, tried))

    async def load(self, address: Address, replicas: Sequence[Replica], view: memoryview, *, timeout_s: float) -> None:
        """Fill the view (of the block's length). Raises the last replica's error, NotFound when there is none."""
        deadline, request = Deadline(timeout_s), w.ReadRequest(address=address_to_pb(address))
        error: KvError = no_replica(address)
        order = in_order(replicas, self._cluster.breakers.closed, random.getrandbits(64))
        for others, replica in zip(range(len(order) - 1, -1, -1), order, strict=True):
            step_s = step_timeout_s(deadline, address.length_bytes, others)
            try:
                with self._cluster.call(replica.endpoint, step_s):
                    await self._load_from(replica.endpoint, request, Sink(address, view), step_s)
                return
            except (*ELSEWHERE, NotFound) as failed:
                error = failed
        raise error

    def give_up(self, blocks: Sequence[SealedBlock]) -> None:
        """Tell the workers that have these that nobody will publish them, in the background until `close`. One that
        cannot be told has them until the session's grace is over.
        """
        task = asyncio.get_running_loop().create_task(self._give_up(blocks))
        self._giving_up.add(task)
        task.add_done_callback(self._giving_up.discard)

    async def close(self) -> None:
        tasks = list(self._giving_up)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_up(self, blocks: Sequence[SealedBlock]) -> None:
        for endpoint, request in give_up_requests(self._session, blocks):
            with suppress(KvError), self._cluster.call(endpoint, METADATA_TIMEOUT_S):
                await self._cluster.link(endpoint).call(methods.WORKER_GIVE_UP, request, METADATA_TIMEOUT_S)

    async def describe(self, address: Address, replicas: Sequence[Replica], *, timeout_s: float) -> list[Described]:
        """What each worker with a replica knows of the block; one that cannot be asked is left out."""
        deadline, request = Deadline(timeout_s), w.DescribeRequest(addresses=[address_to_pb(address)])
        found: list[Described] = []
        for replica in in_order(replicas, self._cluster.breakers.closed, 0):
            step_s = deadline.at_most(METADATA_TIMEOUT_S)  # one that is silent leaves time for the others
            with suppress(KvError), self._cluster.call(replica.endpoint, step_s):
                link = self._cluster.link(replica.endpoint)
                reply = await link.call(methods.WORKER_DESCRIBE, request, step_s)
                found += described(replica, reply)
        return found

    async def _load_from(self, endpoint: str, request: w.ReadRequest, sink: Sink, timeout_s: float) -> None:
        async with aclosing(self._cluster.link(endpoint).read_frames(request, timeout_s)) as frames:
            async for frame in frames:
                sink.add(frame)
        sink.finish(endpoint)


class Remote:
    """For threads: the methods of `AsyncRemote`, see there."""

    def __init__(self, cluster: Cluster, session: int) -> None:
        self._cluster, self._session = cluster, session

    def store(self, length_bytes: int, digest: int, frames: Frames, *, timeout_s: float) -> SealedBlock:
        deadline, tried = Deadline(timeout_s), set[str]()
        request = w.WriteRequest(session=self._session, length_bytes=length_bytes, hash=digest)
        while True:
            cluster = self._cluster.map(timeout_s=deadline.left_s)
            endpoint = pick(cluster, self._cluster.breakers.closed, length_bytes, tried)
            tried.add(endpoint)
            try:
                step_s = step_timeout_s(deadline, length_bytes, len(cluster.nodes) - len(tried))
                with self._cluster.call(endpoint, step_s):
                    reply = self._cluster.link(endpoint).write_frames(request, frames(), step_s)
                return stored(reply, length_bytes, digest, endpoint)
            except KvError as error:
                last_try(error, deadline, tried, candidates(cluster, self._cluster.breakers.closed, tried))

    def load(self, address: Address, replicas: Sequence[Replica], view: memoryview, *, timeout_s: float) -> None:
        deadline, request = Deadline(timeout_s), w.ReadRequest(address=address_to_pb(address))
        error: KvError = no_replica(address)
        order = in_order(replicas, self._cluster.breakers.closed, random.getrandbits(64))
        for others, replica in zip(range(len(order) - 1, -1, -1), order, strict=True):
            step_s = step_timeout_s(deadline, address.length_bytes, others)
            try:
                with self._cluster.call(replica.endpoint, step_s):
                    self._load_from(replica.endpoint, request, Sink(address, view), step_s)
                return
            except (*ELSEWHERE, NotFound) as failed:
                error = failed
        raise error

    def give_up(self, blocks: Sequence[SealedBlock]) -> None:
        """Waits for each worker, `METADATA_TIMEOUT_S` at most."""
        for endpoint, request in give_up_requests(self._session, blocks):
            with suppress(KvError), self._cluster.call(endpoint, METADATA_TIMEOUT_S):
                self._cluster.link(endpoint).call(methods.WORKER_GIVE_UP, request, METADATA_TIMEOUT_S)

    def describe(self, address: Address, replicas: Sequence[Replica], *, timeout_s: float) -> list[Described]:
        deadline, request = Deadline(timeout_s), w.DescribeRequest(addresses=[address_to_pb(address)])
        found: list[Described] = []
        for replica in in_order(replicas, self._cluster.breakers.closed, 0):
            step_s = deadline.at_most(METADATA_TIMEOUT_S)  # one that is silent leaves time for the others
            with suppress(KvError), self._cluster.call(replica.endpoint, step_s):
                reply = self._cluster.link(replica.endpoint).call(methods.WORKER_DESCRIBE, request, step_s)
                found += described(replica, reply)
        return found

    def _load_from(self, endpoint: str, request: w.ReadRequest, sink: Sink, timeout_s: float) -> None:
        with closing(self._cluster.link(endpoint).read_frames(request, timeout_s)) as frames:
            for frame in frames:
                sink.add(frame)
        sink.finish(endpoint)


def last_try(error: KvError, deadline: Deadline, tried: set[str], others: Sequence[Candidate]) -> None:
    """Raises the error when no other worker is to be asked."""
    if not is_elsewhere(error) or deadline.passed or len(tried) >= MAX_TRIES or not others:
        raise error


def stored(reply: w.WriteReply, length_bytes: int, digest: int, endpoint: str) -> SealedBlock:
    """What the worker made of the frames. Raises Corrupt when it is not what was sent."""
    address = address_from_pb(reply.address)
    if (address.length_bytes, address.hash) != (length_bytes, digest):
        raise Corrupt(f"{endpoint} stored other bytes than were sent", fault=endpoint)
    return SealedBlock(address, reply.volume, endpoint)


def give_up_requests(session: int, blocks: Sequence[SealedBlock]) -> Iterator[tuple[str, w.GiveUpRequest]]:
    """By endpoint, in portions that fit into a call."""
    by_endpoint: dict[str, list[Address]] = {}
    for block in blocks:
        by_endpoint.setdefault(block.endpoint, []).append(block.address)
    for endpoint, addresses in by_endpoint.items():
        for i in range(0, len(addresses), MAX_BATCH):
            portion = map(address_to_pb, addresses[i : i + MAX_BATCH])
            yield endpoint, w.GiveUpRequest(session=session, addresses=portion)


def no_replica(address: Address) -> NotFound:
    return NotFound(f"no live replica of block {address}", reason="no_replica")
