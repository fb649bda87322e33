"""The scrubber reads every block of the worker again and again, at a bounded rate: damage that nobody comes for would
else be found when the last good replica is gone.

In the order of the block ids, a block at a time, a piece of 1 MiB at a time. Each piece is read by an open of its own,
so that no block is held, and leaves the page cache as it was. What looks wrong is left to the `Verifier`, which reads
it once more and knows what to do. A scrub is no use: it renews no heat.

Where it is outlives the process, in the file ``scrub`` of the first disk volume (at most a minute old): a version byte
(1), then a msgpack array of the fields of `Round`. Whatever is wrong with that file, a new round begins. Its times are
the wall clock's, a hint across restarts; while it lives the scrubber follows the monotonic one alone.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from kvstore import pagecache
from kvstore.core.errors import Corrupt, KvError
from kvstore.core.hashing import PIECE_BYTES, combine
from kvstore.core.types import BlockId
from kvstore.filehash import hash_segment
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.store import Store
from kvstore.worker.blocks.verify import Verifier
from kvstore.worker.volumes.disk import Disk, Stamp
from kvstore.worker.volumes.volume import Volume

log = logging.getLogger(__name__)

VERSION: Final = 1
NAME: Final = "scrub"
MAX_BYTES: Final = 4096
SAVE_INTERVAL_S: Final = 60.0
BATCH: Final = 4096
"""Ids that are looked up at a time: half a day's worth of large blocks, a minute's of small ones."""
IDLE_S: Final = 1.0
"""Between two looks while there is nothing to do."""
YIELD_S: Final = 0.05
"""Between two looks while readers wait for cold blocks of their own."""
MAX_YIELD_S: Final = 1.0
"""So long a piece gives way: a worker that never rests is scrubbed all the same, by 1 MiB a second."""
NS: Final = 1_000_000_000


class Limits(NamedTuple):
    """How fast, and how often. `bytes_per_s` 0: not at all."""

    bytes_per_s: float
    interval_s: float
    """At least, between the starts of two rounds."""


class Round(msgspec.Struct, array_like=True, frozen=True):
    """How far the scrubber has come. A round visits every block once."""

    began_ns: int
    """As `Scrubber` counts time."""
    last_began_ns: int = 0
    """Of the round before, which was completed; 0: there was none."""
    at: BlockId = BlockId(0, 0)
    """The last block it has visited."""
    over: bool = False

    @property
    def oldest_ns(self) -> int:
        """No block that is still to be visited was verified before this."""
        return self.last_began_ns or self.began_ns

    def not_after(self, now_ns: int) -> Round:
        """With nothing in it that is still to come: the clock that wrote it was ahead."""
        began_ns = min(self.began_ns, now_ns)
        return msgspec.structs.replace(self, began_ns=began_ns, last_began_ns=min(self.last_began_ns, began_ns))


class _Piece(NamedTuple):
    stamp: Stamp
    hash: int


class _Changed(Exception):
    """The block went, moved, or is not what it was when the scrub of it began."""


class Scrubber:
    def __init__(self, store: Store, disk: Disk, verifier: Verifier, limits: Limits) -> None:
        self._store, self._disk, self._verifier, self._limits = store, disk, verifier, limits
        self._runtime = store.runtime
        self._epoch_ns = self._runtime.wall_ns() - round(self._runtime.monotonic_s() * NS)
        self._round = Round(self._now_ns())
        self._saved: Round | None = self._round
        self._next_s = self._next_save_s = 0.0

    @property
    def oldest_age_s(self) -> float:
        """Every block was read by the scrubber, or came, within this time; in the first round: since that began."""
        return max(0.0, (self._now_ns() - self._round.oldest_ns) / NS)

    async def run(self) -> None:
        """Until cancelled."""
        if not self._limits.bytes_per_s:
            return
        await self._store.scanned.wait()
        await self._load()
        while True:
            if self._round.over:
                await self._runtime.sleep(IDLE_S)
                self._begin_round()
            else:
                await self._batch()
            await self._save_in_time()

    def _begin_round(self) -> None:
        now_ns = self._now_ns()
        if now_ns >= self._round.began_ns + round(self._limits.interval_s * NS):
            self._round = Round(now_ns, self._round.began_ns)

    def _now_ns(self) -> int:
        """The wall clock as it was when the scrubber was made, and the time since: jumps do not count."""
        return self._epoch_ns + round(self._runtime.monotonic_s() * NS)

    async def _batch(self) -> None:
        """The next blocks of the round, or its end."""
        batch = await self._runtime.in_thread(_after, self._round.at, list(self._store.all()))
        if not batch:
            self._round = msgspec.structs.replace(self._round, over=True)
        for id in batch:
            block = self._store.get(id)
            if block is not None and not block.leaving and not block.moving:
                await self.scrub(block)
            self._round = msgspec.structs.replace(self._round, at=id)
            await self._save_in_time()

    async def scrub(self, block: Block) -> None:
        """Read one block, and have it verified when it looks wrong: it is in quarantine then, and the master told."""
        counters = self._store.counters
        try:
            if not await self._looks_good(block):
                await self._verifier.verify(block)
            counters.scrubbed_blocks += 1
        except _Changed:
            return
        except Corrupt:
            counters.scrub_corruptions += 1
        except KvError as error:
            log.debug("%s was not scrubbed: %s", block.path, error)

    async def _looks_good(self, block: Block) -> bool:
        """Raises _Changed."""
        path, used_s, length_bytes = block.path, block.used_s, block.address.length_bytes
        first: Stamp | None = None
        hashes = []
        for offset in range(0, length_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, length_bytes - offset)
            await self._wait_for_turn(size)
            if self._store.get(block.id) is not block or block.leaving or block.moving or block.path != path:
                raise _Changed
            try:
                piece = await self._runtime.in_thread(self._read, path, offset, size, lambda: block.used_s == used_s)
            except OSError:
                return False
            first = first or piece.stamp
            if piece.stamp != first or first.size_bytes != length_bytes:
                return False
            hashes.append(piece.hash)
            self._store.counters.scrubbed_bytes += size
        return combine(hashes, length_bytes) == block.address.hash

    def _read(self, path: str, offset: int, size_bytes: int, is_cold: Callable[[], bool]) -> _Piece:
        """What of it was not in memory leaves it again, unless somebody came for the block meanwhile. Blocks."""
        fd = self._disk.open_read(path)
        try:
            pagecache.read_no_further(fd)
            absent = pagecache.absent_runs(fd, offset, size_bytes)
            stamp = self._disk.fstat(fd).stamp
            (piece,) = hash_segment(self._disk.read_into, fd, offset, size_bytes)
            if is_cold():
                pagecache.drop(fd, absent)
            return _Piece(stamp, piece)
        finally:
            self._disk.close(fd)

    async def _wait_for_turn(self, size_bytes: int) -> None:
        """The rate, and then readers."""
        now_s = self._runtime.monotonic_s()
        start_s = max(now_s, self._next_s)
        self._next_s = start_s + size_bytes / self._limits.bytes_per_s
        if start_s > now_s:
            await self._runtime.sleep(start_s - now_s)
        give_up_s = start_s + MAX_YIELD_S
        while self._verifier.is_busy and self._runtime.monotonic_s() < give_up_s:
            await self._runtime.sleep(YIELD_S)

    async def _load(self) -> None:
        if (home := self._home()) is None:
            return
        try:
            self._saved = await self._runtime.in_thread(_load, home)
        except OSError as error:
            self._store.explain(home, error, "reading how far its blocks are scrubbed")
        if self._saved is not None:
            self._round = self._saved.not_after(self._now_ns())

    async def _save_in_time(self) -> None:
        now_s = self._runtime.monotonic_s()
        if now_s >= self._next_save_s:
            self._next_save_s = now_s + SAVE_INTERVAL_S
            await self.save()

    async def save(self) -> None:
        """How far it has come, where that is news."""
        round = self._round
        if round is self._saved or (home := self._home()) is None:
            return
        data = bytes((VERSION,)) + msgspec.msgpack.encode(round)
        try:
            await self._runtime.in_thread(home.disk.replace_durably, f"{home.path}/{NAME}", data)
            self._saved = round
        except OSError as error:
            self._store.explain(home, error, "saving how far its blocks are scrubbed")

    def _home(self) -> Volume | None:
        """The volume that has the file: memory would forget it."""
        return next((volume for volume in self._store.in_service if volume.tier != "mem"), None)


def _after(at: BlockId, blocks: Iterable[Block]) -> list[BlockId]:
    """The next ones in order. In a thread: a million blocks take half a second."""
    return heapq.nsmallest(BATCH, (block.id for block in blocks if block.id > at))


def _load(volume: Volume) -> Round | None:
    try:
        fd = volume.disk.open_read(f"{volume.path}/{NAME}")
    except FileNotFoundError:
        return None
    try:
        data = volume.disk.read(fd, MAX_BYTES, 0)
        if data[:1] != bytes((VERSION,)):
            raise msgspec.DecodeError("not of this version")
        return msgspec.msgpack.decode(data[1:], type=Round)
    except msgspec.DecodeError as error:
        log.warning("%s/%s is of no use (%s); all blocks are scrubbed anew", volume.path, NAME, error)
        return None
    finally:
        volume.disk.close(fd)
