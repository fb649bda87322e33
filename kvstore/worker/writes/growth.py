"""Staging files that grow without asking: by passthrough the kernel writes them by itself, and nobody is told.

Ten times a second all files of clients are measured. What fits is granted. Where a volume is over its cap by what was
written without leave, blocks are evicted. Where that frees too little, or not in time, the file that took most without
leave is *cut* (`filecut`), and then the next one, until the rest fits. A cut file is emptied again at each look, and
can only be aborted: reserve and seal say why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from kvstore.config.units import format_size
from kvstore.core.errors import KvError, NoSpace, TooLarge
from kvstore.worker.background import Background
from kvstore.worker.blocks.store import Store
from kvstore.worker.capacity.room import Room
from kvstore.worker.volumes.disk import Disk, disk_bytes
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.writes.staging import OVERGROWN_WAIT_S, Staged, Staging

log = logging.getLogger(__name__)
INTERVAL_S: Final = 0.1
"""Between two looks. A writer at 1 GB/s takes 100 MB meanwhile: by so much a cap can be passed (`free_floor` keeps the
disk from being full then).
"""
EVICTING_SHARE: Final = 0.75
"""Of a volume: for a file that takes more, and has not asked, nothing is evicted. Nobody knows how long it will become,
and one that fits nowhere must not cost the whole cache first.
"""
PAUSE: Final = 9
"""Times what a look took (8 ms for 1,000 files): however many there are, looks have no more than a tenth of a core."""


class Growth:
    """`_relieving`: volumes for which room is being made; `_cutting`: files that are being emptied. Neither holds up a
    look.
    """

    def __init__(self, store: Store, disk: Disk, staging: Staging, room: Room, background: Background) -> None:
        self._store, self._disk, self._staging, self._room, self._background = store, disk, staging, room, background
        self._relieving: set[int] = set()
        self._cutting: set[Staged] = set()

    async def run(self) -> None:
        await self._store.scanned.wait()  # until then the books do not know what is there
        runtime, took_s = self._store.runtime, 0.0
        while True:
            await runtime.sleep(max(INTERVAL_S, PAUSE * took_s))
            start_s = runtime.monotonic_s()
            await self.look()
            took_s = runtime.monotonic_s() - start_s

    async def look(self) -> None:
        """Measure all, grant what fits, and see to it that something is done about the rest."""
        files = self._staging.of_clients()
        if not files:
            return
        sizes = await self._store.runtime.in_thread(self._measure, [staged.path for staged in files])
        for staged, size_bytes in zip(files, sizes, strict=True):
            if not staged.busy:  # else its bytes are settled elsewhere, and nobody may touch them
                self._measured(staged, size_bytes)
        for volume in {staged.volume.id: staged.volume for staged in files}.values():
            self._settle(volume)

    def _measure(self, paths: Iterable[str]) -> list[int]:
        """What each takes; 0 for one that went, or cannot be looked at: `Staging.look` sees to failing volumes."""
        sizes = []
        for path in paths:
            try:
                sizes.append(self._disk.stat(path).used_bytes)
            except OSError:
                sizes.append(0)
        return sizes

    def _measured(self, staged: Staged, size_bytes: int) -> None:
        if staged.cut is not None:
            if size_bytes:
                self._start_cutting(staged, staged.cut)
        elif size_bytes > disk_bytes(limit := self._staging.max_block_bytes):
            self._start_cutting(staged, TooLarge(f"it grew beyond the {limit} bytes that a block has at most"))
        else:
            self._staging.count(staged, size_bytes)

    def _settle(self, volume: Volume) -> None:
        overgrown = self._overgrown(volume)
        if not overgrown or volume.id in self._relieving:
            return
        if volume.books.missing(0) <= 0:
            for staged in overgrown:
                staged.granted = staged.counted
        else:
            self._relieving.add(volume.id)
            self._background.start(self._relieve(volume))

    def _overgrown(self, volume: Volume) -> list[Staged]:
        files = self._staging.of_clients()
        return [s for s in files if s.volume is volume and s.cut is None and s.counted > s.granted]

    async def _relieve(self, volume: Volume) -> None:
        """Bring a volume down to its cap."""
        try:
            await self._staging.look(volume)  # its disk may have more free by now
            books = volume.books
            largest = max((staged.counted for staged in self._overgrown(volume)), default=0)
            hopeless = books.missing(0) > books.blocks + books.held or largest > books.capacity * EVICTING_SHARE
            try:
                await self._room.grow(volume, lambda: 0, 0 if hopeless else OVERGROWN_WAIT_S)
            except NoSpace:
                await self._cut_largest(volume)
        finally:
            self._relieving.discard(volume.id)
        if volume.in_service:
            self._settle(volume)

    async def _cut_largest(self, volume: Volume) -> None:
        while volume.books.missing(0) > 0 and (overgrown := self._overgrown(volume)):
            worst = max(overgrown, key=lambda staged: staged.counted - staged.granted)
            await self._cut(worst, NoSpace(f"it was written beyond its reservation, and {_full(volume)}"))

    def _start_cutting(self, staged: Staged, why: KvError) -> None:
        if staged not in self._cutting:
            self._background.start(self._cut(staged, why))

    async def _cut(self, staged: Staged, why: KvError) -> None:
        if staged in self._cutting:
            return
        self._cutting.add(staged)
        try:
            if staged.cut is None:
                log.warning("staging %x of %s is cut: %s", staged.handle, format_size(staged.counted), why.message)
            await self._staging.cut(staged, why)
        finally:
            self._cutting.discard(staged)


def _full(volume: Volume) -> str:
    return f"{volume.path} has no room for it ({volume.books.describe()})"
