"""Which pins hold. They may take a bounded share of each volume, so that the rest of the store keeps some room.

First come, first served: a block whose pin finds no room in the share waits, and is a block like any other meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvstore.core.types import BlockId
from kvstore.worker.blocks.block import Block
from kvstore.worker.volumes.volume import Volume

LOOK: Final = 256
"""How many waiting pins that do not fit are passed over for smaller ones behind them."""
MAX_ADMITTED: Final = 4096
"""Pins that take hold on one volume in one go: a few milliseconds."""


class _Shelf:
    """The pins of one volume. `held_bytes` and `waiting_bytes` are bytes on disk, without the names beside the blocks:
    those come and go while a pin holds.
    """

    def __init__(self, volume: Volume, share: float) -> None:
        self.volume, self._share = volume, share
        self.held: set[BlockId] = set()
        self.waiting: OrderedDict[BlockId, Block] = OrderedDict()
        self.held_bytes = self.waiting_bytes = 0

    def __contains__(self, block: Block) -> bool:
        return block.id in self.held or block.id in self.waiting

    def has_room(self, block: Block) -> bool:
        return self.held_bytes + block.data_bytes <= self.volume.books.capacity * self._share

    def hold(self, block: Block) -> None:
        block.pinned = True
        self.held.add(block.id)
        self.held_bytes += block.data_bytes

    def wait(self, block: Block) -> None:
        block.pinned = False
        self.waiting[block.id] = block
        self.waiting_bytes += block.data_bytes

    def drop(self, block: Block) -> None:
        block.pinned = False
        if block.id in self.held:
            self.held.discard(block.id)
            self.held_bytes -= block.data_bytes
        elif self.waiting.pop(block.id, None) is not None:
            self.waiting_bytes -= block.data_bytes

    def admit(self) -> list[Block]:
        """Let waiting ones take hold; returns them."""
        admitted: list[Block] = []
        room = self.volume.books.capacity * self._share - self.held_bytes
        passed = 0
        for block in self.waiting.values():
            if block.data_bytes <= room:
                admitted.append(block)
                room -= block.data_bytes
            else:
                passed += 1
            if passed == LOOK or len(admitted) == MAX_ADMITTED:
                break
        for block in admitted:
            self.drop(block)
            self.hold(block)
        return admitted


class Pins:
    """Sets `Block.pinned` of the blocks it is told of. Changed on the loop only."""

    def __init__(self, volumes: Sequence[Volume], share: float) -> None:
        self._shelves = {volume.id: _Shelf(volume, share) for volume in volumes}

    def pin(self, block: Block) -> None:
        """It is to be pinned, as far as the share of its volume allows."""
        shelf = self._shelves[block.volume.id]
        if block in shelf:
            return
        if shelf.waiting or not shelf.has_room(block):
            shelf.wait(block)
        else:
            shelf.hold(block)

    def unpin(self, block: Block) -> None:
        """It is not to be pinned any more, or is gone."""
        self._shelves[block.volume.id].drop(block)

    def moved(self, block: Block, source: Volume) -> None:
        """It lies in `block.volume` now: the pin counts there."""
        shelf = self._shelves[source.id]
        if block in shelf:
            shelf.drop(block)
            self.pin(block)

    def admit(self) -> list[Block]:
        """Give what room there is to those that wait; returns the blocks whose pin holds from now on."""
        return [block for shelf in self._shelves.values() if shelf.waiting for block in shelf.admit()]

    def pinned_bytes(self, tier: str) -> int:
        """On disk. Any thread."""
        return sum(shelf.held_bytes for shelf in self._shelves.values() if shelf.volume.tier == tier)

    def unpinned_bytes(self, tier: str) -> int:
        """Of blocks that wait for their pin to take hold. Any thread."""
        return sum(shelf.waiting_bytes for shelf in self._shelves.values() if shelf.volume.tier == tier)
