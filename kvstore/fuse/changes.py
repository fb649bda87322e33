"""Changes of names and attributes: mkdir, rmdir, unlink, rename, setattr. Keys are (inode of the directory at the
master, name).
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from kvstore.client.messages import RemoveKind, RenameName
from kvstore.core.errors import AlreadyExists, NotEmpty, NotFound
from kvstore.core.types import Entry
from kvstore.fuse.files import Files
from kvstore.fuse.inodes import Cached
from kvstore.fuse.local import LocalFiles
from kvstore.fuse.localfile import Key, LocalFile
from kvstore.fuse.notoffered import refuse
from kvstore.fuse.publishing import Publisher
from kvstore.fuse.saved import Saved
from kvstore.fuse.sealed import SealedFiles
from kvstore.fuse.tree import Tree
from kvstore.runtime import Runtime


class Wanted(NamedTuple):
    """What setattr changes; None stays."""

    mode: int | None
    uid: int | None
    gid: int | None
    mtime_ns: int | None

    @property
    def is_empty(self) -> bool:
        return self == (None, None, None, None)


class Changes:
    """Whatever alters the tree. `is_temporary` tells which keys are names of this mount alone."""

    def __init__(
        self, tree: Tree, local: LocalFiles, sealed: SealedFiles, files: Files, publisher: Publisher, saved: Saved,
        runtime: Runtime,
    ) -> None:  # fmt: skip
        self._tree, self._local, self._sealed, self._files, self._publisher = tree, local, sealed, files, publisher
        self._saved, self._runtime = saved, runtime

    async def mkdir(self, key: Key, mode: int, uid: int, gid: int) -> Cached:
        entry = await self._tree.master.mkdir(*key, mode, uid, gid)
        self._tree.directory_changed(key[0])
        return self._tree.learn(entry, key)

    async def rmdir(self, key: Key) -> None:
        cached = await self._tree.by_name(key)
        if cached.entry.is_dir and self._local.temps.listed(cached.entry.inode):
            raise NotEmpty("temporary files are in it")
        await self._remove(key, RemoveKind.DIRECTORY)

    async def unlink(self, key: Key) -> None:
        file = self._local.by_key.get(key)
        if file is not None and not file.published:  # made while the master was away
            self._local.detach(file)
            return
        async with _locked(file):
            entry = await self._remove(key, RemoveKind.FILE)
            self._lost_name(entry)
            self._local.detach_key(key)

    async def unlink_temporary(self, key: Key, process: int) -> None:
        gone = self._local.temps.unlink(key, process)
        if not gone:
            raise NotFound(f"no temporary file {key[1]!r}")
        for file in gone:
            await self._unname(file)

    async def rename_temporary(
        self, source: Key, target: Key, process: int, *, to_temporary: bool, no_replace: bool
    ) -> None:
        """A temporary name becomes another one, or is published under an ordinary one."""
        file = self._local.temps.to_rename(source, process)
        if file is None:
            raise NotFound(f"no temporary file {source[1]!r}")
        if to_temporary:
            await self._move_temporary(file, source, target, no_replace)
        elif self._local.temps.is_ready(source, file):
            await self._publish_temporary(file, source, target, no_replace)
        else:  # still being written: published by its close
            self._local.temps.remove(source, file)
            file.published = False
            self._local.move(file, target)

    async def rename(self, source: Key, target: Key, *, no_replace: bool, only_files: bool) -> None:
        """Both names are ordinary ones. `only_files`: a directory is refused."""
        moved, replaced = self._local.by_key.get(source), self._local.by_key.get(target)
        if moved is not None and not moved.published:
            await self._publisher.flush(moved)
        async with _locked(moved, replaced):
            there = self._tree.cache.by_name(target)
            if there is not None and there.entry.is_dir and self._local.temps.listed(there.entry.inode):
                raise NotEmpty("temporary files are in it")
            entry = await self._rename_at_master(source, target, no_replace, only_files)
            if there is not None and there.entry.inode != entry.inode:
                self._lost_name(there.entry)
            if moved is not None:
                self._local.move(moved, target)
            else:
                self._local.detach_key(target)

    async def set_attributes(self, inode: int, wanted: Wanted) -> Cached:
        """Of a published file or a directory."""
        if wanted.is_empty:
            return await self._tree.by_inode(inode)
        entry = await self._tree.master.set_attr(inode, **wanted._asdict())
        opened = self._sealed.get(inode)
        if opened is not None:
            opened.entry = entry._replace(replicas=opened.entry.replicas)
        cached = self._tree.learn_attributes(entry)
        writer = self._local.by_key.get(cached.key) if cached.key else None
        if writer is not None:
            self._set(writer, wanted)
        return cached

    async def set_local_attributes(self, file: LocalFile, wanted: Wanted) -> None:
        """Of a local file; what the master has of it changes at once."""
        async with file.lock:
            file.observe()
            if file.published and file.key is not None and not wanted.is_empty:
                directory, name = file.key
                entry = await self._tree.master.set_attr(directory, name, **wanted._asdict())
                self._tree.learn(entry, file.key)
                file.entry = entry
            self._set(file, wanted)

    def _set(self, file: LocalFile, wanted: Wanted) -> None:
        if wanted.mode is not None:
            file.mode = (file.mode & ~0o7777) | wanted.mode
        file.uid = file.uid if wanted.uid is None else wanted.uid
        file.gid = file.gid if wanted.gid is None else wanted.gid
        if wanted.mtime_ns is not None:
            file.mtime_ns, file.keep_mtime = wanted.mtime_ns, True
        file.ctime_ns = self._runtime.wall_ns()
        self._saved.touch(file)

    async def expire(self, temp_ttl_s: float) -> None:
        """Drop temporary versions that nobody renamed, and local files that nobody opened after all."""
        now_s = self._runtime.monotonic_s()
        for file in self._local.temps.expire(now_s, temp_ttl_s):
            await self._unname(file)
        for file in list(self._local.abandoned(now_s)):
            await self._files.discard(file)

    async def _move_temporary(self, file: LocalFile, source: Key, target: Key, no_replace: bool) -> None:
        if no_replace and self._local.temps.lookup(target) is not None:
            raise AlreadyExists(f"{target[1]!r} exists")
        ready = self._local.temps.is_ready(source, file)
        for other in self._local.temps.take_ready(target):
            if other is not file:
                await self._unname(other)
        self._local.temps.remove(source, file)
        file.key = file.temp_key = target
        if ready:
            self._local.temps.closed(target, file, self._runtime.monotonic_s())
        else:
            self._local.temps.opened(target, file)
        self._saved.touch(file)

    async def _publish_temporary(self, file: LocalFile, source: Key, target: Key, no_replace: bool) -> None:
        there = self._tree.cache.by_name(target)
        # Taken out first: another rename of this name that comes meanwhile must find another version.
        self._local.temps.remove(source, file)
        file.renaming = True
        try:
            await self._publisher.rename(file, target, no_replace=no_replace)
        except BaseException:
            self._local.temps.closed(source, file, self._runtime.monotonic_s())
            raise
        finally:
            file.renaming = False
            self._saved.touch(file)
        if there is not None and there.entry.inode != (file.entry.inode if file.entry else 0):
            self._lost_name(there.entry)
        self._local.move(file, target)
        if file.handles == 0:
            await self._files.discard(file)

    async def _rename_at_master(self, source: Key, target: Key, no_replace: bool, only_files: bool) -> Entry:
        for fresh in (False, True):
            if fresh:
                self._tree.gone(source)
            cached = await self._tree.by_name(source)
            if only_files and cached.entry.is_dir:
                refuse(errno.EXDEV)
            name = RenameName(*source, *target, no_replace=no_replace, inode=cached.entry.inode)
            try:
                await self._tree.master.rename(name)
            except NotFound:
                if fresh:
                    raise
                continue
            break
        self._tree.gone(source)
        self._tree.learn(cached.entry, target)
        self._tree.directory_changed(source[0])
        self._tree.directory_changed(target[0])
        return cached.entry

    async def _remove(self, key: Key, kind: RemoveKind) -> Entry:
        """Carries the inode it means, so that it can be retried (rule 21); what is remembered may be an older one."""
        for fresh in (False, True):
            if fresh:
                self._tree.gone(key)
            cached = await self._tree.by_name(key)
            try:
                await self._tree.master.remove(*key, kind, cached.entry.inode)
            except NotFound:
                if fresh:
                    raise
                continue
            break
        self._tree.gone(key)
        self._tree.cache.forget_inode(cached.entry.inode)
        self._tree.directory_changed(key[0])
        return cached.entry

    def _lost_name(self, entry: Entry) -> None:
        opened = self._sealed.get(entry.inode)
        if opened is not None:
            opened.removed = True
            self._saved.removed(entry.inode, still_open=True)

    async def _unname(self, file: LocalFile) -> None:
        file.key = None
        self._saved.touch(file)
        if file.handles == 0:
            await self._files.discard(file)


@asynccontextmanager
async def _locked(*files: LocalFile | None) -> AsyncIterator[None]:
    """Their locks, always in the same order."""
    async with AsyncExitStack() as stack:
        for file in sorted({f.inode: f for f in files if f is not None}.values(), key=lambda f: f.inode):
            await stack.enter_async_context(file.lock)
        yield
