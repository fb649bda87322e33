"""Which ids of this worker's boots may still be published (rules 10, 11). Pure.

The fence of a boot is its lowest counter that is unpublished and alive. A boot that is not listed is over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvstore.core.types import BlockId


class Fences:
    """``_pending`` maps each boot that is not over to its unpublished counters.

    Counters of the running boot are added as they are minted, so they stay in order; an OrderedDict, because taking
    the first of a plain dict whose front was deleted walks over the holes.
    """

    def __init__(self, boot: int) -> None:
        self.boot = boot
        self._next = 1
        self._pending: dict[int, OrderedDict[int, None]] = {boot: OrderedDict()}

    def mint(self) -> BlockId:
        """A new id, unpublished from now on: the fence cannot pass it while its file is still being sealed."""
        block = BlockId(self.boot, self._next)
        self._next += 1
        self._pending[self.boot][block.counter] = None
        return block

    def add_found(self, blocks: Iterable[BlockId]) -> None:
        """Blocks of earlier boots of this worker, found at start: nobody knows yet what became of them."""
        for block in sorted(blocks):
            if block.boot != self.boot:
                self._pending.setdefault(block.boot, OrderedDict())[block.counter] = None

    def settle(self, block: BlockId) -> None:
        """The id is owned, dead, or its file never came to be: it will not be published from here."""
        pending = self._pending.get(block.boot)
        if pending is not None:
            pending.pop(block.counter, None)
            if not pending and block.boot != self.boot:
                del self._pending[block.boot]

    def is_mine(self, block: BlockId) -> bool:
        """Whether the id is of this worker and may still be unpublished. Not one that came back from a peer when it was
        settled: the master may have forgotten it by then, and would never call it dead.
        """
        return block.counter in self._pending.get(block.boot, ())

    @property
    def next_counter(self) -> int:
        """Of the running boot: no block has it yet."""
        return self._next

    @property
    def count(self) -> int:
        return sum(map(len, self._pending.values()))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(boot, fence) of every boot that is not over."""
        for boot, pending in self._pending.items():
            yield boot, next(iter(pending), self._next)
