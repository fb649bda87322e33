"""How hot the blocks of this worker are, and what is remembered of evicted ones. Changed on the loop only."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.core.bursts import Bursts
from kvstore.core.ghosts import Content, Ghosts
from kvstore.core.heat import Clock, Heat, Ranking
from kvstore.core.types import BlockId
from kvstore.worker.blocks.block import Block
from kvstore.worker.volumes.volume import Volume

NOBODY: Final = 0
"""A client without a session (a peer): its touches make no burst."""


class Known(NamedTuple):
    """What is remembered of a block that is here."""

    heat: Heat
    idle_s: float = 0.0
    """Since its last use, as far as a worker ran."""


class Remembered(NamedTuple):
    """What a restart takes over; scores as a clock at 0 has them."""

    blocks: dict[BlockId, Known]
    ghosts: Sequence[tuple[Content, Heat]]
    probation: float


FOUND: Final = Known(Heat(-1.0, False))
"""As a clock at 0 has it: of a block that was found at start, and of which nothing is remembered."""


class _Orders(NamedTuple):
    """The blocks of one volume, each in one of the three."""

    free: Ranking[BlockId]
    pinned: Ranking[BlockId]
    unowned: Ranking[BlockId]

    def fit(self, block: Block) -> Ranking[BlockId]:
        """Where it belongs."""
        if not block.owned:
            return self.unowned
        return self.pinned if block.pinned else self.free

    def now(self, block: Block) -> Ranking[BlockId]:
        """Where it is; where it belongs when it is nowhere."""
        return next((ranking for ranking in self if block.id in ranking), self.fit(block))


class HeatMap:
    """The order of the blocks of each volume, by heat; all volumes share one clock.

    Those that nobody owns yet, and those whose pin holds, have orders of their own: they stay however cold they become,
    and whoever looks for victims would have to pass them all.
    """

    def __init__(self, volumes: Sequence[Volume]) -> None:
        capacity = sum(volume.books.capacity for volume in volumes)
        self.clock, self.ghosts = Clock(capacity), Ghosts(capacity)
        self._bursts: Bursts[int] = Bursts()
        self._orders = {volume.id: _Orders(Ranking(), Ranking(), Ranking()) for volume in volumes}
        self._remembered: dict[BlockId, Known] = {}

    def came(self, block: Block, client: int, now_s: float) -> None:
        """It was written, or brought from a peer."""
        self._set(block, self.ghosts.admit(content_of(block), self._moment(client, now_s)))
        self.clock.admit(block.used_bytes)

    def found(self, block: Block) -> None:
        """It was here at start; its last use was so long before it was found."""
        heat, idle_s = self._remembered.pop(block.id, FOUND)
        self._set(block, self._as_of_now(heat))
        block.used_s -= idle_s

    def touch(self, block: Block, client: int, now_s: float) -> None:
        """It was opened or read."""
        self._set(block, self.of(block).touched(self._moment(client, now_s)))

    def moved(self, block: Block, source: Volume) -> None:
        """It lies in `block.volume` now, no longer in `source`."""
        self._enter(block, self._orders[source.id])

    def repinned(self, block: Block) -> None:
        """`block.pinned` may have changed."""
        self._enter(block, self._orders[block.volume.id])

    def reowned(self, block: Block) -> None:
        """`block.owned` may have changed."""
        self._enter(block, self._orders[block.volume.id])

    def gone(self, block: Block) -> None:
        self._orders[block.volume.id].now(block).discard(block.id)

    def evicted(self, block: Block) -> None:
        """It goes for want of room: should its content come back, it is not new."""
        self.ghosts.add(content_of(block), self.of(block))

    def of(self, block: Block) -> Heat:
        score = self._orders[block.volume.id].now(block).score(block.id)
        return Heat(self.clock.now if score is None else score, block.proven)

    def coldest(self, volume: Volume, *, pinned: bool = True) -> Iterator[BlockId]:
        """The owned ones from the coldest up, `pinned` ones too or not. Not to be changed while it is iterated."""
        orders = self._orders[volume.id]
        rankings = [orders.free.coldest()]
        if pinned and orders.pinned:
            rankings.append(orders.pinned.coldest())
        return (block for block, _ in heapq.merge(*rankings, key=operator.itemgetter(1)))

    def known(self, block: Block, clock: float, now_s: float) -> Known:
        """What a restart takes over of a block: as things stood when the clock was at `clock`."""
        return Known(aged(self.of(block), clock), now_s - block.used_s)

    def recall(self, remembered: Remembered) -> None:
        """What a former process knew; before the blocks are found."""
        self._remembered = dict(remembered.blocks)
        self.ghosts.probation = remembered.probation
        for content, heat in remembered.ghosts:
            self.ghosts.add(content, self._as_of_now(heat))

    def all_found(self) -> None:
        """Whatever is not here by now has gone."""
        self._remembered.clear()

    def resize(self, volumes: Iterable[Volume]) -> None:
        """A volume failed."""
        capacity = sum(volume.books.capacity for volume in volumes)
        if capacity > 0:
            self.clock.resize(capacity)
            self.ghosts.resize(capacity)

    def _moment(self, client: int, now_s: float) -> float:
        if client == NOBODY:
            return self.clock.now
        return self._bursts.touch(client, now_s, self.clock.now)

    def _as_of_now(self, heat: Heat) -> Heat:
        return heat._replace(score=heat.score + self.clock.now)

    def _set(self, block: Block, heat: Heat) -> None:
        self._orders[block.volume.id].now(block).set(block.id, heat.score)
        block.proven = heat.proven

    def _enter(self, block: Block, before: _Orders) -> None:
        """It may belong elsewhere than where it is. One that is nowhere (it has gone) stays so."""
        old, new = before.now(block), self._orders[block.volume.id].fit(block)
        score = old.score(block.id)
        if score is not None and old is not new:
            old.discard(block.id)
            new.set(block.id, score)


def aged(heat: Heat, clock: float) -> Heat:
    """As a clock at 0 has it."""
    return heat._replace(score=heat.score - clock)


def content_of(block: Block) -> Content:
    return Content(block.address.length_bytes, block.address.hash)
