"""Links to other workers, one each, with a breaker beside it (rule 29)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Callable

from kvstore.core.breaker import Breaker
from kvstore.core.errors import KvError, Timeout, Unavailable
from kvstore.rpc.link import AsyncLink

MAX_PEERS = 256
"""Channels kept; addresses of pods come and go."""


@dataclasses.dataclass(slots=True, eq=False)
class Peer:
    link: AsyncLink
    breaker: Breaker

    def blame(self, error: KvError, now_s: float) -> None:
        """Open the breaker for what the link itself failed at; an answer, even a bad one, means that the peer lives."""
        if isinstance(error, Unavailable | Timeout) and error.fault == self.link.endpoint:
            self.breaker.failed(now_s)
        else:
            self.breaker.succeeded()


class Peers:
    def __init__(self, connect: Callable[[str], AsyncLink]) -> None:
        self._connect = connect
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, endpoint: str) -> Peer:
        """The peer at an endpoint; the one unused longest goes when there are too many."""
        peer = self._peers.get(endpoint)
        if peer is None:
            peer = self._peers[endpoint] = Peer(self._connect(endpoint), Breaker())
            if len(self._peers) > MAX_PEERS:
                self._close_later(self._peers.popitem(last=False)[1])
        self._peers.move_to_end(endpoint)
        return peer

    async def close(self) -> None:
        await asyncio.gather(*(peer.link.close() for peer in self._peers.values()), *self._closing)

    def _close_later(self, peer: Peer) -> None:
        task = asyncio.get_running_loop().create_task(peer.link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
