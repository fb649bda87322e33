"""Staging files: blocks that are being written. Each belongs to a session and is never used twice (rule 5)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from functools import partial
from typing import NamedTuple

from kvstore.core.errors import InvalidRequest, KvError, NoSpace, NotFound, Overloaded, Stale, TooLarge
from kvstore.core.limits import MAX_OPEN_STAGING_PER_SESSION, ROOM_WAIT_S
from kvstore.filecut import cut_path, is_cut_path
from kvstore.worker.background import Background
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.blocks.store import Store
from kvstore.worker.capacity.room import NOWHERE, Place, Room
from kvstore.worker.volumes.disk import Disk, disk_bytes
from kvstore.worker.volumes.held import HeldBytes, HeldFiles, unlink_watched
from kvstore.worker.volumes.sink import Sink
from kvstore.worker.volumes.volume import WORKER_SESSION, Volume
from kvstore.worker.writes.givenup import GivenUp
from kvstore.worker.writes.sessions import Sessions

log = logging.getLogger(__name__)
OVERGROWN_WAIT_S = 0.5
"""For room for what was written without leave: the cap is passed meanwhile. Eviction takes 10 to 50 ms, and the probe
that finds out whether an unlinked file is still open runs twice.
"""
PRIVATE = WORKER_SESSION
"""Session of fetches, copies and uploads."""


@dataclasses.dataclass(slots=True, eq=False)
class Staged:
    session: int
    handle: int
    volume: Volume
    counted: int
    """Bytes in the volume's books for it: the larger of reservation and actual size."""
    granted: int = 0
    """Bytes that it may have. A client may have written more (passthrough): that is counted, not granted."""
    busy: bool = False
    """Being sealed or aborted."""
    cut: KvError | None = None
    """Why its bytes were thrown away (`filecut`): it can only be aborted."""

    @property
    def path(self) -> str:
        return self.volume.staging_path(self.session, self.handle)

    def check_whole(self) -> None:
        """Raises NoSpace or TooLarge when it was cut."""
        if self.cut is not None:
            raise type(self.cut)(
                f"staging {self.handle:x} was emptied and cannot be sealed any more: {self.cut.message}; abort it, and "
                "write the block again when there is room"
            )


class Opened(NamedTuple):
    staged: Staged
    fd: int


class Staging:
    """All staging files of this worker: (session, handle) → file."""

    def __init__(
        self, store: Store, disk: Disk, room: Room, held: HeldFiles, background: Background, max_block_bytes: int
    ) -> None:
        self._store, self._disk, self._room, self._held, self._background = store, disk, room, held, background
        self.max_block_bytes = max_block_bytes
        self._by_session: dict[int, dict[int, Staged]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_session.values()))

    def handles(self, session: int) -> list[int]:
        """Of all files that this session has in staging."""
        return list(self._by_session.get(session, ()))

    def of_clients(self) -> list[Staged]:
        """Files that somebody else may be writing just now, and of which nothing else is under way."""
        return [s for s in self._all() if s.session != PRIVATE and not s.busy and s.volume.in_service]

    def overgrown_bytes(self, volume: Volume) -> int:
        """Written without leave: more is granted for it, or it goes again. Nothing is evicted for it ahead."""
        return sum(max(0, s.counted - s.granted) for s in self._all() if s.volume is volume)

    def find(self, session: int, handle: int) -> Staged:
        """Raises NotFound for what was sealed, aborted or expired; Stale while it is being sealed."""
        staged = self._by_session.get(session, {}).get(handle)
        if staged is None:
            raise NotFound(
                f"staging {handle:x}: sealed, aborted or expired; write the block again", reason="no_staging"
            )
        if staged.busy:
            raise Stale(f"staging {handle:x}: a seal or abort of it is under way")
        return staged

    async def create(
        self, session: int, size_bytes: int, wait_s: float = ROOM_WAIT_S, *, place: Place = NOWHERE
    ) -> Opened:
        """A new file with a reservation, and a read-write fd that the caller closes. `place`: see `Room.take`.

        Raises TooLarge, NoSpace after `wait_s`, Overloaded, Unavailable.
        """
        self._check_size(size_bytes)
        if session != PRIVATE and len(self._by_session.get(session, ())) >= MAX_OPEN_STAGING_PER_SESSION:
            raise Overloaded(
                f"a session has at most {MAX_OPEN_STAGING_PER_SESSION} files in staging; seal or abort some"
            )
        return await self._new(session, await self._room.take(size_bytes, wait_s, place), size_bytes)

    async def _new(self, session: int, volume: Volume, size_bytes: int) -> Opened:
        """`size_bytes` are in the volume's books for it."""
        size = disk_bytes(size_bytes)
        staged = Staged(session, self._store.runtime.random_u64(), volume, size, size)
        self._by_session.setdefault(session, {})[staged.handle] = staged
        try:
            create = partial(volume.with_directories, lambda: self._disk.create(staged.path))
            in_thread = partial(self._store.runtime.in_thread, create)
            fd = await self._store.despite_full_disk(volume, in_thread)
        except OSError as error:
            self._forget(staged)
            volume.books.give_back(staged.counted)
            raise self._store.explain(volume, error, "making a staging file") from None
        return Opened(staged, fd)

    @contextlib.asynccontextmanager
    async def private(
        self, size_bytes: int, wait_s: float = ROOM_WAIT_S, *, place: Place = NOWHERE
    ) -> AsyncIterator[tuple[Staged, Sink]]:
        """A file of the worker's own; what is not installed in the end leaves nothing. Raises like `create`."""
        async with self._private(self.create(PRIVATE, size_bytes, wait_s, place=place)) as made:
            yield made

    @contextlib.asynccontextmanager
    async def private_on(self, volume: Volume, size_bytes: int) -> AsyncIterator[tuple[Staged, Sink]]:
        """The same on this volume, if it has room as it is. Raises NoSpace at once, and like `create`."""
        self._room.take_on(volume, size_bytes)
        async with self._private(self._new(PRIVATE, volume, size_bytes)) as made:
            yield made

    @contextlib.asynccontextmanager
    async def _private(self, create: Coroutine[None, None, Opened]) -> AsyncIterator[tuple[Staged, Sink]]:
        making = self._background.spawn(create)
        try:
            staged, fd = await asyncio.shield(making)
        except asyncio.CancelledError:
            self._background.start(self._undo(making))
            raise
        sink = Sink(self._store.runtime, self._disk, fd)
        try:
            yield staged, sink
        finally:
            await self._background.run(self._finish(staged, sink))

    async def _finish(self, staged: Staged, sink: Sink) -> None:
        await sink.close()
        if not staged.busy:
            await self.drop(staged)

    async def _undo(self, making: asyncio.Task[Opened]) -> None:
        staged, fd = await making
        self._disk.close(fd)
        await self.drop(staged)

    async def reserve(self, staged: Staged, size_bytes: int, *, evict: bool = True) -> None:
        """Make the reservation `size_bytes` in all; what is written counts in any case.

        Raises TooLarge, NoSpace; without `evict` at once where that much is not free.
        """
        staged.check_whole()
        self._check_size(size_bytes)
        need = disk_bytes(size_bytes)
        if need > staged.granted:
            await self._extend(staged, need, ROOM_WAIT_S if evict else 0)
        elif need < staged.counted:
            await self._reduce(staged, need)

    async def _extend(self, staged: Staged, need: int, wait_s: float) -> None:
        def missing_bytes() -> int:
            if staged.busy:  # what it counts is settled elsewhere
                raise Stale(f"staging {staged.handle:x}: it was sealed or aborted meanwhile")
            staged.check_whole()
            return max(0, need - staged.counted)

        if missing_bytes() == 0:  # written already, without leave: the cap is passed as long as this waits
            wait_s = min(wait_s, OVERGROWN_WAIT_S)
        await self._room.grow(staged.volume, missing_bytes, wait_s)
        staged.counted, staged.granted = max(need, staged.counted), max(need, staged.granted)

    async def _reduce(self, staged: Staged, need: int) -> None:
        staged.granted = need  # before anything waits: whoever extends it meanwhile has the last word
        try:
            written = await self._store.runtime.in_thread(lambda: self._disk.stat(staged.path).used_bytes)
        except OSError as error:
            raise self._store.explain(staged.volume, error, "looking at a staging file") from None
        staged.check_whole()
        if not staged.busy:
            counted = min(staged.counted, max(staged.granted, written))
            staged.volume.books.give_back(staged.counted - counted)
            staged.counted = counted
            self._store.on_free()

    def count(self, staged: Staged, size_bytes: int) -> None:
        """So much it takes on the disk now, whether it was granted or not."""
        if (more := size_bytes - staged.counted) > 0:
            staged.volume.books.take(more)
            staged.counted = size_bytes

    async def cut(self, staged: Staged, why: KvError) -> None:
        """Throw its bytes away, also what was written after it was cut before. Nothing happens to a `busy` one."""
        if not staged.busy:
            staged.cut = staged.cut or why  # before anything waits: a seal that comes now is refused
            await self._background.run(self._cut(staged))

    async def _cut(self, staged: Staged) -> None:
        try:
            await self._store.runtime.in_thread(cut_path, staged.path)
        except FileNotFoundError:
            return  # aborted meanwhile
        except OSError as error:
            log.warning("%s", self._store.explain(staged.volume, error, "emptying a staging file"))
            return
        if not staged.busy:
            staged.volume.books.give_back(staged.counted)
            staged.counted = staged.granted = 0
            self._store.on_free()

    async def abort(self, staged: Staged) -> None:
        """Unlink it. Its bytes stay in the books while a writer still has it open."""
        staged.busy = True
        await self._background.run(self._discard(staged))

    async def _discard(self, staged: Staged) -> None:
        """Unlink a file that is already `busy`, and forget it."""
        try:
            fd, size = await self._store.runtime.in_thread(self._unlink, staged)
        except OSError as error:
            staged.busy = False
            raise self._store.explain(staged.volume, error, "removing a staging file") from None
        self._forget(staged)
        books = staged.volume.books
        books.give_back(staged.counted - size)
        if fd is not None:
            books.hold(staging=size)
            self._hold(fd, staged, HeldBytes(books, size, self._store.on_free))
        self._store.on_free()

    def _hold(self, fd: int, staged: Staged, held: HeldBytes) -> None:
        if staged.session == PRIVATE:
            self._held.add(fd, held)
            return
        is_cut = staged.cut is not None
        self._held.add(fd, GivenUp(fd, held, self._store.runtime, self._background, is_cut=is_cut))

    def _unlink(self, staged: Staged) -> tuple[int | None, int]:
        """An fd that watches whoever has it open, and the bytes that still count; (None, 0) when they are free."""
        fd = unlink_watched(self._disk, staged.path)
        if fd is None or staged.cut:
            return fd, 0
        try:
            return fd, self._disk.fstat(fd).used_bytes
        except OSError:  # it is gone all the same, and counts as before
            return fd, staged.counted

    def became_block(self, staged: Staged, used_bytes: int) -> None:
        """Its file was renamed to an address, and takes so much on the disk."""
        self._forget(staged)
        staged.volume.books.settle(staged.counted, used_bytes)

    async def look(self, volume: Volume) -> None:
        """Bring the books of a volume up to what its files really take and its disk really has.

        A volume that was removed or replaced goes out of service.
        """
        files = [s for s in self._all() if s.volume is volume and not s.busy]
        in_motion = volume.books.in_motion
        try:
            free, actual = await self._store.runtime.in_thread(self._look, volume, [s.path for s in files])
        except OSError as error:
            self._store.explain(volume, error, "looking at its files")
            return
        # What was given away or settled meanwhile may be neither in `free` nor among the files.
        unwritten = volume.books.in_motion - in_motion
        for staged, size in zip(files, actual, strict=True):
            if staged.cut is None:  # of a cut one nothing counts: it goes again
                if not staged.busy:
                    volume.books.staging += max(0, size - staged.counted)
                    staged.counted = max(staged.counted, size)
                unwritten += max(0, staged.counted - size)  # of a busy one, too: it was written after this look
        volume.books.look(free, unwritten)

    def _look(self, volume: Volume, files: Iterable[str]) -> tuple[int, list[int]]:
        volume.check()
        sizes = []
        for file in files:
            try:
                sizes.append(self._disk.stat(file).used_bytes)
            except FileNotFoundError:
                sizes.append(0)
        return self._disk.free_bytes(volume.path), sizes

    async def restore(self) -> None:
        """Before anything is served: files of earlier starts. A session may come back for its own; the worker's own
        go.
        """
        for volume in self._store.in_service:
            try:
                found = await self._store.read_directories(volume, partial(_scan, volume))
            except OSError as error:  # what lies there would be in no books, and would never go
                self._store.fail(volume, f"reading its staging directory: {error.strerror}")
                continue
            for staged in found:
                self._by_session.setdefault(staged.session, {})[staged.handle] = staged
            await self.look(volume)
            for staged in found:
                staged.granted = staged.counted  # what was granted is forgotten: no more than it has
        for staged in tuple(self._by_session.get(PRIVATE, {}).values()):
            await self._drop_orphan(staged)

    async def expire(self, sessions: Sessions, now_s: float) -> None:
        """Drop what sessions that are over left behind."""
        over = [s for s in self._by_session if s != PRIVATE and sessions.is_over(s, now_s)]
        for staged in [f for session in over for f in self._by_session[session].values()]:
            await self._drop_orphan(staged)

    async def _drop_orphan(self, staged: Staged) -> None:
        """Its writer is gone."""
        size_bytes = await self._store.runtime.in_thread(self._used_bytes, staged.path)
        # Not one that was sealed or aborted, be it while this or the ones before were looked at.
        if not staged.busy and await self.drop(staged):
            self._store.counters.tiers[staged.volume.tier].unlink(Reason.ORPHAN, size_bytes)

    def _used_bytes(self, path: str) -> int:
        """0 for a file that cannot be asked: its abort finds out why."""
        try:
            return self._disk.stat(path).used_bytes
        except OSError:
            return 0

    async def drop(self, staged: Staged) -> bool:
        """`abort` where nobody waits for the result; whether it went."""
        try:
            await self.abort(staged)
        except KvError as error:
            log.warning("a staging file stays: %s", error)
            return False
        return True

    def _all(self) -> list[Staged]:
        return [staged for files in self._by_session.values() for staged in files.values()]

    def _forget(self, staged: Staged) -> None:
        files = self._by_session.get(staged.session, {})
        files.pop(staged.handle, None)
        if not files:
            self._by_session.pop(staged.session, None)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes < 0:
            raise InvalidRequest(f"a size of {size_bytes} bytes makes no sense")
        if size_bytes > self.max_block_bytes:
            raise TooLarge(f"a block of {size_bytes} bytes is too large; at most {self.max_block_bytes}")


def _scan(volume: Volume) -> list[Staged]:
    """The files that lie in its staging directory, not measured yet. Blocks; raises OSError."""
    found = [Staged(session, handle, volume, 0) for session, handle in volume.scan_staging()]
    for staged in found:
        if is_cut_path(staged.path):
            staged.cut = NoSpace("it was written beyond its reservation before the worker started anew")
    return found
