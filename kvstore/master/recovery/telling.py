"""The workers that are here while names are taken back: who has told all, whose turn it is, and who does not tell."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Final

from kvstore.core.types import BlockId
from kvstore.master.workers.nodes import Node, Nodes
from kvstore.master.workers.told import Registration

log = logging.getLogger(__name__)

MAX_TELLING: Final = 8
"""Workers that send their names at the same time: a page takes the loop for some 30 ms, and its worker waits for it."""


class Worker:
    """One that has registered. `seen`: what of other histories; `is_told`: it has sent everything; `waiting_s`: since
    when it is asked, or since its last page, None when it is not; `is_stuck`: for too long."""

    def __init__(self, new: Registration) -> None:
        self.boot, self.minted, self.seen, self.is_told = new.boot, new.minted, list(new.seen), False
        self.waiting_s: float | None = None
        self.is_stuck = False

    def is_new(self, block: BlockId) -> bool:
        """Whether it came to be under this master: of a put that is under way, and nothing that was ever lost."""
        return block.boot == self.boot and 0 < self.minted <= block.counter


class Telling:
    """`newest_s`: when the last new one came; at first, when it began."""

    def __init__(self, nodes: Nodes, stuck_s: float, now_s: float) -> None:
        """`stuck_s`: how long a worker that is asked may send nothing before it is not waited for any more."""
        self._nodes, self._stuck_s, self.newest_s = nodes, stuck_s, now_s
        self.workers: dict[str, Worker] = {}

    def registered(self, new: Registration, now_s: float) -> None:
        known = self.workers.get(new.node)
        if known is None:
            self.newest_s = now_s
        if known is None or known.boot != new.boot:
            self.workers[new.node] = Worker(new)

    def has_more(self, node: Node) -> bool:
        worker = self.workers.get(node.id)
        return worker is not None and not worker.is_told

    def is_turn(self, node: Node, now_s: float) -> bool:
        """Whether to ask this worker: a few at a time, in the order in which they came. A stuck one takes nobody's
        place, and may begin anew at any time."""
        worker = self.workers[node.id]
        turn = worker.is_stuck or node.id in itertools.islice(self.silent(), MAX_TELLING)
        if turn and worker.waiting_s is None:
            worker.waiting_s = now_s
        return turn

    def heard(self, node: Node, now_s: float) -> None:
        """A page came."""
        worker = self.workers[node.id]
        worker.waiting_s, worker.is_stuck = now_s, False

    def told_all(self, node: Node) -> None:
        """That was its last page."""
        worker = self.workers.get(node.id)
        if worker is not None:
            worker.is_told, worker.is_stuck = True, False

    def look(self, now_s: float) -> None:
        """Give up on whoever has sent nothing for too long."""
        for id in list(self.silent()):
            worker = self.workers[id]
            if worker.waiting_s is not None and now_s >= worker.waiting_s + self._stuck_s:
                worker.is_stuck = True
                log.warning(
                    "worker %s is asked for its names and has sent none for %.0f s: it is not waited for any more, and "
                    "nothing of it is collected; restart it", id, self._stuck_s,
                )  # fmt: skip

    def silent(self) -> Iterator[str]:
        """Live workers that have not told all, and are waited for."""
        for id, worker in self.workers.items():
            node = self._nodes.get(id)
            if not worker.is_told and not worker.is_stuck and node is not None and self._nodes.live(node):
                yield id

    @property
    def told(self) -> int:
        return sum(worker.is_told for worker in self.workers.values())

    @property
    def stuck(self) -> list[str]:
        return sorted(id for id, worker in self.workers.items() if worker.is_stuck)

    @property
    def untold(self) -> set[str]:
        return {id for id, worker in self.workers.items() if not worker.is_told}
