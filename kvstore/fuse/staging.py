"""The bytes of local files: staging files of a worker (or temporary ones), written here or by passthrough, hashed,
sealed.

Everything holds the file's lock while it waits. In plain mode every write of an application passes through `write`, and
the only writable fd is ours. With passthrough (rule 5) the kernel writes to the staging file by itself: `observe` sees
what it did, every flush hashes anew, and while somebody still has the file open for writing a copy is sealed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from typing import Final, NoReturn

from kvstore.client.blocks import AsyncBlocks
from kvstore.client.files import reopened
from kvstore.client.sockets import SealedBlock
from kvstore.client.staging import Staging
from kvstore.core.errors import KvError, NoSpace, NotFound, Stale, Timeout, TooLarge, Unavailable
from kvstore.core.hashing import BlockHasher
from kvstore.core.limits import KIB
from kvstore.filecut import cut, is_cut
from kvstore.fuse.backing import PLAIN, Backing
from kvstore.fuse.filebytes import check_whole, copied, empty, hash_of, write_all
from kvstore.fuse.localfile import Hashed, LocalFile
from kvstore.fuse.reservations import Reservations
from kvstore.fuse.spares import Spares
from kvstore.fuse.threads import on_fd
from kvstore.runtime import Runtime

log = logging.getLogger(__name__)

SMALL_WRITE_BYTES: Final = 64 * KIB
"""Always written on the loop: the way to a thread and back costs more (about 150 µs)."""
SLOW_WRITE_S: Final = 0.005
THREADS_FOR_S: Final = 1.0
"""Bigger ones too while the page cache takes them (0.3 ms a MiB; 30 % more MB/s).

Once one took `SLOW_WRITE_S` the kernel is holding writers back for the disk, and for so long they go to threads, so
that nobody else waits for it.
"""


class StagingArea:
    """The bytes of local files. `max_block_bytes`: a file is one block."""

    def __init__(self, blocks: AsyncBlocks, runtime: Runtime, max_block_bytes: int, backing: Backing = PLAIN) -> None:
        self._blocks, self._runtime, self.backing = blocks, runtime, backing
        self._reservations = Reservations(blocks, runtime, max_block_bytes)
        self.spares = Spares(blocks, runtime)
        self._threads_until_s = 0.0

    async def begin(self, file: LocalFile, *, truncate: bool) -> None:
        """Passthrough: it has a staging file with its bytes, which the kernel may write from here on.

        Nothing here waits for room (rule 25): a reservation follows in the background, and the flush has the last word.
        The caller's handle is counted. Raises what a file failed with that somebody else still has open.
        """
        async with file.lock:
            file.observe()  # another writer may have it
            if file.failed is not None and file.handles > 1:
                raise file.failed  # whatever is written goes where theirs goes: to the file that was dropped
            keep_bytes = 0 if truncate else file.size_bytes
            if file.staged is None:
                await self._restage(file, keep_bytes, keep_bytes)
                self._reservations.ahead(file)
                file.seen = None
            if file.seen is None:  # also one that `copy` has filled
                file.look()
            if truncate:
                empty(file.fd)
                file.changed(0, self._runtime.wall_ns())
                file.look()

    async def notice(self, file: LocalFile) -> None:
        """Take over what passthrough writes did. Raises TooLarge or NoSpace when they went too far: then it is empty.

        The caller holds the lock.
        """
        await self._reservations.settled(file)
        file.observe()
        await self._check(file)
        if file.seen is None or file.staged is None:
            return
        try:
            await self._reservations.fit(file, file.staged)
        except (TooLarge, NoSpace) as error:
            await self._fail(file, error)  # at once: it counts with all that was written

    async def _check(self, file: LocalFile) -> None:
        """Raises NoSpace or TooLarge for a file that grew too far, also when its worker found that out and cut it: then
        its size may be anything, as whoever writes it goes on behind the hole.
        """
        if file.failed is not None:
            raise file.failed
        if file.block_fd >= 0 and is_cut(file.block_fd):
            await self._fail(file, await self._why_cut(file))

    async def _why_cut(self, file: LocalFile) -> NoSpace | TooLarge:
        """Its worker's own words, if it can be asked."""
        try:
            if file.staged is not None:
                await self._blocks.reserve(file.staged, file.reserved_bytes, evict=False)
            check_whole(file.block_fd)
        except (NoSpace, TooLarge) as error:
            return error
        except KvError as error:
            log.debug("a file was cut, and its worker does not say why: %s", error.message)
        return NoSpace("the file grew beyond the room that its worker has, and was emptied")

    async def _fail(self, file: LocalFile, error: NoSpace | TooLarge) -> NoReturn:
        """Its bytes go. Marked as cut, it cannot be published by a successor of this process either."""
        file.changed(0, self._runtime.wall_ns())
        file.failed = error
        if file.staged is not None:
            with contextlib.suppress(PermissionError):  # the worker's files are another user's
                cut(file.staged.fd)
            empty(file.staged.fd)
        await self._abandon(file)
        raise error

    async def write(self, file: LocalFile, offset: int, data: bytes) -> int:
        """Write all of `data`, or (but for an overwrite) nothing. Raises TooLarge, NoSpace, OSError."""
        end = offset + len(data)
        async with file.lock:
            if file.failed is not None:
                raise file.failed
            fd = await self._make_writable(file, file.size_bytes, end)
            # Bytes that come in order are hashed while the processor's cache has them: at the flush it would be another
            # pass.
            hasher, file.hasher = file.hasher if offset == file.size_bytes else None, None
            before_bytes = file.size_bytes
            file.changed(max(before_bytes, end), self._runtime.wall_ns())
            try:
                await self._write_or_make_room(file, fd, offset, data, hasher)
            except (OSError, KvError):  # cancelled, its thread may still be writing: then it counts as written
                self._cut_back(file, fd, before_bytes)
                raise
            file.hasher = hasher
        return len(data)

    def _cut_back(self, file: LocalFile, fd: int, size_bytes: int) -> None:
        """A write failed: what it has added, a part of its bytes or a hole, is nobody's."""
        grew = file.size_bytes > size_bytes
        file.changed(size_bytes, self._runtime.wall_ns())
        if grew:
            os.ftruncate(fd, size_bytes)

    async def _write_or_make_room(
        self, file: LocalFile, fd: int, offset: int, data: bytes, hasher: BlockHasher | None
    ) -> None:
        try:
            await self._write(fd, offset, data, hasher)
        except OSError as error:
            if error.errno != errno.ENOSPC or file.staged is None:
                raise
            # Others have filled the disk, and the worker does not know yet: it looks, and makes room, once.
            await self._reservations.make_room(file, file.staged)
            await self._write(fd, offset, data, hasher)

    async def _write(self, fd: int, offset: int, data: bytes, hasher: BlockHasher | None) -> None:
        start_s = self._runtime.monotonic_s()
        if len(data) > SMALL_WRITE_BYTES and start_s < self._threads_until_s:
            await on_fd(self._runtime, fd, write_all, offset, data, hasher)
            return
        write_all(fd, offset, data, hasher)
        if (end_s := self._runtime.monotonic_s()) - start_s > SLOW_WRITE_S:
            self._threads_until_s = end_s + THREADS_FOR_S

    async def truncate(self, file: LocalFile, size_bytes: int) -> None:
        """Make it exactly so long; what is added is zeros.

        Raises what it failed with. Emptied, it begins anew, unless somebody has it open by passthrough: the kernel
        would go on writing to the file that was dropped.
        """
        async with file.lock:
            file.observe()
            if file.failed is not None and (size_bytes or (self.backing.passthrough and file.handles)):
                raise file.failed
            if size_bytes == 0 and file.staged is None:
                file.set_block(-1)
            else:
                fd = await self._make_writable(file, min(size_bytes, file.size_bytes), size_bytes)
                os.ftruncate(fd, size_bytes)
            file.hasher = None
            file.changed(size_bytes, self._runtime.wall_ns())
            if file.seen is not None:
                file.look()

    async def read(self, file: LocalFile, offset: int, size_bytes: int) -> bytes:
        async with file.lock:
            if file.fd < 0:
                return b""
            return await on_fd(self._runtime, file.fd, os.pread, size_bytes, offset)

    async def copy(self, source: LocalFile, target: LocalFile) -> None:
        """Fill empty `target` with the bytes of `source`."""
        async with source.lock, target.lock:
            source.observe()
            fd = await self._make_writable(target, 0, source.size_bytes)
            await copied(self._runtime, source.fd, fd, source.size_bytes)
            target.hasher = None
            target.changed(source.size_bytes, self._runtime.wall_ns())

    async def sync(self, file: LocalFile) -> None:
        """Put the staging file's bytes on the disk."""
        async with file.lock:
            await self._check(file)
            if file.staged is not None:
                await on_fd(self._runtime, file.fd, os.fdatasync)
                await self._check(file)

    async def hash(self, file: LocalFile) -> None:
        """Hash it now, so that a rename need not."""
        async with file.lock:
            await self.notice(file)
            if file.staged is not None and file.size_bytes and not file.mapped:
                await self._hash(file, again=file.seen is not None)

    async def find_stores(self, file: LocalFile) -> None:
        """Passthrough: stores to a shared map leave no trace but in the bytes. Compare them with what was published.

        The caller holds the lock.
        """
        published = file.entry.address if file.entry else None
        if file.mapped and file.staged is not None and file.size_bytes and published and not file.is_dirty:
            hashed = await self._hash(file, again=True)
            if hashed.hash != published.hash:
                file.changed(file.size_bytes, self._runtime.wall_ns())

    async def seal(self, file: LocalFile) -> SealedBlock | None:
        """A block of what it holds; None when it is empty. It can be read and written on: the next change makes a copy.

        The caller holds the lock.
        """
        await self.notice(file)
        await self._give_up(file)
        if file.size_bytes == 0:
            if file.seen is None or file.handles == 0:
                await self._abandon(file)
            return None
        if file.sealed is None:
            try:
                file.sealed = await self._seal_somewhere(file)
            except (NoSpace, TooLarge) as error:
                if file.block_fd >= 0 and is_cut(file.block_fd):  # since the check; else it may be tried again
                    await self._fail(file, error)
                raise
        return file.sealed

    async def _seal_somewhere(self, file: LocalFile) -> SealedBlock:
        seal = self._seal_copy if file.seen is not None and file.writers else self._seal
        try:
            return await seal(file)
        except (NotFound, Stale, Timeout, Unavailable) as error:
            # The worker restarted, or went, and took the staging file along: the bytes are still behind our fd.
            log.warning("staging file lost (%s); its bytes are staged again", error.message)
            return await self._seal_elsewhere(file)

    async def drop(self, file: LocalFile) -> None:
        """Nobody needs its bytes any more."""
        async with file.lock:
            await self._abandon(file)
            file.unseal()
            await self._give_up(file)

    async def _give_up(self, file: LocalFile) -> None:
        """Nobody else can tell that they are of no use: they would stay as long as this mount does."""
        blocks, file.unpublished = file.unpublished, []
        if not blocks:
            return
        try:
            await self._blocks.give_up(blocks)
        except KvError as error:
            log.debug("blocks not given up (%s): the end of the session clears them up", error.message)

    async def _abandon(self, file: LocalFile) -> None:
        staged, file.staged, file.reserved_bytes, file.seen = file.staged, None, 0, None
        file.set_block(-1)
        self.backing.drop(file.id)
        if staged is not None:
            await self._abort(staged)

    async def _abort(self, staged: Staging) -> None:
        try:
            await self._blocks.abort(staged)
        except KvError as error:
            log.debug("staging file not aborted (%s): the end of the session clears it up", error.message)

    async def _make_writable(self, file: LocalFile, keep_bytes: int, size_bytes: int) -> int:
        """The fd of a staging file with room for `size_bytes`, holding the first `keep_bytes` of what the file has."""
        self._reservations.check(size_bytes)
        if file.staged is None:
            await self._restage(file, keep_bytes, size_bytes)
        elif size_bytes > file.reserved_bytes:
            await self._reservations.grow(file, file.staged, size_bytes)
        return file.fd

    async def _restage(self, file: LocalFile, keep_bytes: int, size_bytes: int) -> None:
        if self.backing.passthrough and not size_bytes:
            room, staged = 0, self.spares.take() or await self._blocks.stage(0)
        else:
            room, staged = await self._reservations.stage(max(keep_bytes, size_bytes))
        try:
            if keep_bytes:
                await copied(self._runtime, file.block_fd, staged.fd, keep_bytes)
            file.set_block(reopened(staged.fd, os.O_RDONLY))
        except BaseException:
            await self._abort(staged)
            raise
        file.staged, file.reserved_bytes, file.hashed = staged, room, None
        file.hasher = None if keep_bytes else BlockHasher()
        self.backing.keep(file.id, file.block_fd)

    async def _hash(self, file: LocalFile, *, again: bool = False) -> Hashed:
        if again or file.hashed is None or file.hashed.changes != file.changes:
            changes, size, mtime_ns = file.changes, file.size_bytes, os.fstat(file.fd).st_mtime_ns
            if file.hasher is not None and file.hasher.length_bytes == size:
                digest = file.hasher.digest()
            else:
                digest = await hash_of(self._runtime, file.fd, size)
            file.hashed = Hashed(changes, size, mtime_ns, digest)
        return file.hashed

    async def _seal(self, file: LocalFile) -> SealedBlock:
        if file.staged is None:
            await self._restage(file, file.size_bytes, file.size_bytes)
        assert file.staged is not None
        # A map may have been written since the flush without any trace: then the worker hashes what it seals.
        hashed = None if file.mapped else await self._hash(file)
        staged, file.staged, file.reserved_bytes, file.seen = file.staged, None, 0, None
        file.fixed = self.backing.passthrough and file.handles > 0
        self._reservations.sealed(file)
        try:
            if hashed is None:
                return await self._blocks.seal(staged, file.size_bytes)
            return await self._blocks.seal(staged, hashed.size_bytes, hash=hashed.hash, mtime_ns=hashed.mtime_ns)
        except BaseException:
            await self._abort(staged)
            raise

    async def _seal_copy(self, file: LocalFile) -> SealedBlock:
        assert file.staged is not None
        return await self._blocks.seal_copy(file.staged)

    async def _seal_elsewhere(self, file: LocalFile) -> SealedBlock:
        """From the bytes behind our fd, in a new staging file. Whoever still writes the old one goes on there."""
        if file.staged is None:
            return await self._seal(file)
        copy = await self._blocks.stage(file.size_bytes)
        try:
            await copied(self._runtime, file.block_fd, copy.fd, file.size_bytes)
            return await self._blocks.seal(copy, file.size_bytes)
        except BaseException:
            await self._abort(copy)
            raise
