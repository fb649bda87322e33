"""Links to other workers, one each, with a breaker beside it (rule 29)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from kvstore.pb import worker_pb2 as w
from kvstore.rpc.breaker import AsyncBreaker
from kvstore.rpc.link import AsyncLink
from kvstore.rpc.methods import WORKER_STAT

MAX_PEERS: Final = 256
"""Channels kept; addresses of pods come and go."""
FORSAKEN_S: Final = 60.0
"""A peer that is silent and that nobody has asked for in so long is probed no more."""


class Peer:
    """`breaker` goes around every call on `link`; while it is open only its own probes ask the peer."""

    def __init__(self, link: AsyncLink, now_s: float) -> None:
        self.link, self.used_s = link, now_s
        self.breaker = AsyncBreaker(f"the peer at {link.endpoint}", [link.endpoint], self._ping)

    async def close(self) -> None:
        await self.breaker.close()
        await self.link.close()

    async def _ping(self, timeout_s: float) -> None:
        await self.link.call(WORKER_STAT, w.WorkerStatRequest(), timeout_s)


class Peers:
    """`_peers`: endpoint → peer, the one unused longest first. `now_s` is the monotonic clock."""

    def __init__(self, connect: Callable[[str], AsyncLink], now_s: Callable[[], float]) -> None:
        self._connect, self._now_s = connect, now_s
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, endpoint: str) -> Peer:
        """The peer at an endpoint; the one unused longest goes when there are too many."""
        peer = self._peers.get(endpoint)
        if peer is None:
            self._drop(self._forsaken())
            peer = self._peers[endpoint] = Peer(self._connect(endpoint), self._now_s())
            if len(self._peers) > MAX_PEERS:
                self._drop([next(iter(self._peers))])
        self._peers.move_to_end(endpoint)
        peer.used_s = self._now_s()
        return peer

    async def close(self) -> None:
        await asyncio.gather(*(peer.close() for peer in self._peers.values()), *self._closing)

    def _forsaken(self) -> list[str]:
        since_s = self._now_s() - FORSAKEN_S
        return [each for each, peer in self._peers.items() if peer.used_s < since_s and not peer.breaker.closed]

    def _drop(self, endpoints: Iterable[str]) -> None:
        for endpoint in endpoints:
            task = asyncio.get_running_loop().create_task(self._peers.pop(endpoint).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
