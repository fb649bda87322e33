"""The cluster as a client sees it: the cached map, one channel a worker, a breaker a channel (`AsyncCluster`,
`Cluster`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from kvstore.client.deadline import Deadline
from kvstore.client.flight import AsyncFlight, Flight
from kvstore.client.messages import ClusterMap
from kvstore.client.meta import AsyncMeta, Meta
from kvstore.client.weakly import weakly, weakly_async
from kvstore.core.errors import KvError, Unavailable
from kvstore.core.limits import MAX_BLOCK_BYTES, METADATA_TIMEOUT_S
from kvstore.core.placement import Candidate, choose
from kvstore.core.types import TIERS, Replica
from kvstore.pb import worker_pb2 as w
from kvstore.rpc.breaker import AsyncBreaker, Breakers, ThreadBreaker
from kvstore.rpc.link import AsyncLink, Link
from kvstore.rpc.metadata import Caller
from kvstore.rpc.methods import WORKER_STAT
from kvstore.rpc.transport import GRPC, Transport

log = logging.getLogger(__name__)

MAP_TTL_S = 5.0
"""Free bytes need no better: two choices forgive old ones, and a worker that is full answers NoSpace."""
OLDER_TTL_S = 1.0
"""How long the map from before is used without asking, after the master did not answer."""
RENEW_TIMEOUT_S = 1.0
"""Spent on a new map when there is the one from before, and never more than half of the caller's time."""
MAX_TRIES = 3
"""Workers tried for one put."""


def in_order(replicas: Sequence[Replica], works: Callable[[str], bool], random_u64: int) -> list[Replica]:
    """Replicas in the order in which to ask: links that work first, then fast tiers; equals turn by the number.

    One replica a worker: it knows itself which of its volumes is the best.
    """
    turn = random_u64 % len(replicas) if replicas else 0
    turned = [*replicas[turn:], *replicas[:turn]]
    turned.sort(key=lambda r: (not works(r.endpoint), TIERS.index(r.tier) if r.tier in TIERS else len(TIERS)))
    return list({r.endpoint: r for r in reversed(turned)}.values())[::-1]


def candidates(cluster: ClusterMap, works: Callable[[str], bool], tried: set[str]) -> list[Candidate]:
    """Workers that may take a new block; those behind an open breaker only when there are no others."""
    nodes = [n for n in cluster.nodes if n.live and not n.draining and n.endpoint and n.endpoint not in tried]
    working = [n for n in nodes if works(n.endpoint)] or nodes
    return [Candidate(n.id, n.endpoint, n.free_bytes) for n in working]


def pick(cluster: ClusterMap, works: Callable[[str], bool], length_bytes: int, tried: set[str]) -> str:
    """Endpoint of the worker for a new block. Raises Unavailable when no worker is left."""
    first, second = random.getrandbits(64), random.getrandbits(64)
    chosen = choose(candidates(cluster, works, tried), length_bytes, first, second)
    if chosen is None:
        raise Unavailable("no live worker to take the block; see `kvstore nodes list`")
    return chosen.endpoint


class _Cached:
    """The last map and when it is too old."""

    def __init__(self) -> None:
        self.map: ClusterMap | None = None
        self._until_s = 0.0

    def fresh(self) -> ClusterMap | None:
        return self.map if time.monotonic() < self._until_s else None

    def take(self, cluster: ClusterMap) -> ClusterMap:
        self.map, self._until_s = cluster, time.monotonic() + MAP_TTL_S
        return cluster

    def patience_s(self, timeout_s: float) -> float:
        """How long a caller waits for a map. One that has to have it, as long as it can."""
        return timeout_s if self.map is None else min(timeout_s / 2, RENEW_TIMEOUT_S)

    def or_older(self, error: KvError) -> ClusterMap:
        """The map from before, while the master does not answer. Raises the error when there is none."""
        if self.map is None:
            raise error
        self._until_s = max(self._until_s, time.monotonic() + OLDER_TTL_S)
        log.debug("the cluster map cannot be renewed, the one from before is used: %s", error)
        return self.map


class AsyncCluster:
    """For asyncio. `caller` goes with every call to a worker."""

    def __init__(self, meta: AsyncMeta, caller: Caller, transport: Transport = GRPC) -> None:
        self.breakers = Breakers(self._breaker)
        self._meta, self._caller, self._transport = meta, caller, transport
        self._cached = _Cached()
        self._asking: AsyncFlight[ClusterMap] = AsyncFlight()
        self._links: dict[str, AsyncLink] = {}
        self._weak_ask = weakly_async(self._ask)

    @property
    def max_block_bytes(self) -> int:
        """As the master said last."""
        return self._cached.map.max_block_bytes if self._cached.map else MAX_BLOCK_BYTES

    async def map(self, *, timeout_s: float = METADATA_TIMEOUT_S) -> ClusterMap:
        """At most `MAP_TTL_S` old, or older while the master does not answer. Raises KvError when there never was
        one.
        """
        if cluster := self._cached.fresh():
            return cluster
        try:
            return await self._asking.run(self._renew, self._cached.patience_s(timeout_s))
        except KvError as error:
            return self._cached.or_older(error)

    def introduce(self, caller: Caller) -> None:
        """What new links say of their caller."""
        self._caller = caller

    def link(self, endpoint: str) -> AsyncLink:
        """The channel to a worker, made at its first use."""
        link = self._links.get(endpoint)
        if link is None:
            link = self._links[endpoint] = AsyncLink(endpoint, self._caller, self._transport)
        return link

    def call(self, endpoint: str, timeout_s: float) -> AbstractContextManager[None]:
        """Put around one call to a worker: its breaker."""
        return self.breakers.of(endpoint).call(timeout_s)

    async def close(self) -> None:
        await asyncio.gather(*(breaker.close() for breaker in self.breakers.drop()))
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))

    def _breaker(self, endpoint: str) -> AsyncBreaker:
        return AsyncBreaker(_name(endpoint), [endpoint], partial(self._weak_ask, endpoint), owner=self)

    async def _renew(self, deadline: Deadline) -> ClusterMap:
        if cluster := self._cached.fresh():  # brought while this caller came
            return cluster
        cluster = self._cached.take(await self._meta.cluster_map(timeout_s=deadline.left_s))
        await self._prune({n.endpoint for n in cluster.nodes})
        return cluster

    async def _prune(self, endpoints: set[str]) -> None:
        links = [self._links.pop(endpoint) for endpoint in self._links.keys() - endpoints]
        await asyncio.gather(*(breaker.close() for breaker in self.breakers.drop(endpoints)))
        await asyncio.gather(*(link.close() for link in links))

    async def _ask(self, endpoint: str, timeout_s: float) -> None:
        """On its link of now: one that left the map for a while has another one since."""
        await self.link(endpoint).call(WORKER_STAT, w.WorkerStatRequest(), timeout_s)


class Cluster:
    """For threads: the methods of `AsyncCluster`, see there."""

    def __init__(self, meta: Meta, caller: Caller) -> None:
        self.breakers = Breakers(self._breaker)
        self._meta, self._caller = meta, caller
        self._cached = _Cached()
        self._asking: Flight[ClusterMap] = Flight()
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}
        self._weak_ask = weakly(self._ask)

    @property
    def max_block_bytes(self) -> int:
        """As the master said last."""
        return self._cached.map.max_block_bytes if self._cached.map else MAX_BLOCK_BYTES

    def map(self, *, timeout_s: float = METADATA_TIMEOUT_S) -> ClusterMap:
        if cluster := self._cached.fresh():
            return cluster
        try:
            return self._asking.run(self._renew, self._cached.patience_s(timeout_s))
        except KvError as error:
            return self._cached.or_older(error)

    def introduce(self, caller: Caller) -> None:
        self._caller = caller

    def link(self, endpoint: str) -> Link:
        with self._lock:
            link = self._links.get(endpoint)
            if link is None:
                link = self._links[endpoint] = Link(endpoint, self._caller)
            return link

    def call(self, endpoint: str, timeout_s: float) -> AbstractContextManager[None]:
        return self.breakers.of(endpoint).call(timeout_s)

    def close(self) -> None:
        for breaker in self.breakers.drop():
            breaker.close()
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()

    def _breaker(self, endpoint: str) -> ThreadBreaker:
        return ThreadBreaker(_name(endpoint), [endpoint], partial(self._weak_ask, endpoint), owner=self)

    def _renew(self, deadline: Deadline) -> ClusterMap:
        if cluster := self._cached.fresh():
            return cluster
        cluster = self._cached.take(self._meta.cluster_map(timeout_s=deadline.left_s))
        self._prune({n.endpoint for n in cluster.nodes})
        return cluster

    def _prune(self, endpoints: set[str]) -> None:
        with self._lock:
            gone = [self._links.pop(e) for e in self._links.keys() - endpoints]
        for breaker in self.breakers.drop(endpoints):
            breaker.close()
        for link in gone:
            link.close()

    def _ask(self, endpoint: str, timeout_s: float) -> None:
        self.link(endpoint).call(WORKER_STAT, w.WorkerStatRequest(), timeout_s)


def _name(endpoint: str) -> str:
    return f"the worker at {endpoint}"
