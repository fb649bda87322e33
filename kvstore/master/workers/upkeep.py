"""What the master does on its own, a bounded step at a time: close graves, forget volumes and nodes that do not come
back."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from kvstore.master.namespace import blocks
from kvstore.master.storage.change import Change
from kvstore.master.workers.nodes import Nodes

log = logging.getLogger(__name__)

GRAVES_PER_STEP: Final = 1024
REPLICAS_PER_STEP: Final = 512
"""A step is a tick's: 512 replicas with their entries take about 10 ms."""
AGE_EVERY_S: Final = 60.0
"""How often the absence of volumes is written down. Only time in which a master looked counts, never the wall clock."""


class Upkeep:
    """`_grave` is where the sweep goes on; `_aged_s` how long ago absences were written down."""

    def __init__(self, nodes: Nodes, tick_s: float, forget_after_s: float) -> None:
        self._nodes, self._tick_s, self._forget_after_s = nodes, tick_s, forget_after_s
        self._grave = b""
        self._aged_s = 0.0

    def step(self, change: Change) -> None:
        """Once a tick."""
        self._grave = blocks.sweep_graves(change, self._nodes.cluster, self._grave, GRAVES_PER_STEP)
        self._aged_s += self._tick_s
        if self._aged_s >= min(AGE_EVERY_S, self._forget_after_s):
            self._age(change, self._aged_s)
            self._aged_s = 0.0
        self._forget_volume(change)
        self._forget_nodes(change)

    def _age(self, change: Change, elapsed_s: float) -> None:
        live = self._nodes.cluster.live
        for volume, row in list(self._nodes.volumes.items()):
            gone_s = 0.0 if volume in live else row.gone_s + elapsed_s
            self._nodes.put_volume(change, volume, msgspec.structs.replace(row, gone_s=gone_s))

    def _forget_volume(self, change: Change) -> None:
        """One step of one volume: its replicas go, and with the last ones their entries."""
        live = self._nodes.cluster.live
        for volume, row in self._nodes.volumes.items():
            if row.gone_s >= self._forget_after_s and volume not in live:
                if blocks.forget_volume(change, volume, REPLICAS_PER_STEP):
                    log.warning("volume %016x of node %s is forgotten: gone for %.0f s", volume, row.node, row.gone_s)
                    self._nodes.drop_volume(change, volume)
                return

    def _forget_nodes(self, change: Change) -> None:
        homes = set(self._nodes.cluster.homes.values())
        for node in list(self._nodes):
            if node.id not in homes and node.missed * self._tick_s >= self._forget_after_s:
                log.warning("node %s is forgotten", node.id)
                self._nodes.drop(change, node)
