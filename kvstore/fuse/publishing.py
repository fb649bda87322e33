"""Local files become published ones: at flush, fsync and last release of an ordinary name, at the rename of a temporary
one.
"""

from __future__ import annotations

from kvstore.client.messages import PublishMode, PublishName
from kvstore.client.sockets import SealedBlock
from kvstore.core.errors import AlreadyExists, NotFound, Stale
from kvstore.core.types import Entry
from kvstore.fuse.local import LocalFiles
from kvstore.fuse.localfile import Key, LocalFile
from kvstore.fuse.saved import Saved
from kvstore.fuse.staging import StagingArea
from kvstore.fuse.tree import AWAY, Tree


class Publisher:
    """Seals and publishes. Every method takes the file's lock where it says so."""

    def __init__(self, tree: Tree, area: StagingArea, local: LocalFiles, saved: Saved) -> None:
        self._tree, self._area, self._local, self._saved = tree, area, local, saved

    async def create(self, file: LocalFile, *, exclusive: bool) -> Entry | None:
        """An ordinary name appears at the master at once, empty, so that everybody sees it.

        Returns the entry that was there already.

        While the master is away only an exclusive create fails: the close publishes, or reports that it could not.
        """
        assert file.key is not None
        try:
            entry, created = await self._publish(file, None, PublishMode.IF_ABSENT, file.key)
        except AWAY:
            if exclusive:
                raise
            return None
        if not created:
            return entry
        file.published = True
        return None

    async def flush(self, file: LocalFile) -> None:
        """Publish what changed. One that has no name any more keeps its bytes to itself."""
        async with file.lock:
            if file.temporary or file.key is None:
                return
            await self._area.notice(file)
            await self._area.find_stores(file)
            if file.published and not file.is_dirty:
                return
            changes, key = file.changes, file.key
            # A name that was removed elsewhere must not come back by a late close.
            mode = PublishMode.IF_PRESENT if file.published else PublishMode.REPLACE
            try:
                await self._seal_and_publish(file, mode, key, keep_attributes=True)
            except (Stale, NotFound):
                self._tree.gone(key)
                self._local.detach(file)
                return
            file.published, file.published_changes = True, changes
            self._saved.touch(file)

    async def rename(self, file: LocalFile, target: Key, *, no_replace: bool) -> None:
        """Publish a temporary version under an ordinary name; on an error it stays what it was."""
        async with file.lock:
            await self._area.notice(file)
            changes = file.changes
            mode = PublishMode.IF_ABSENT if no_replace else PublishMode.REPLACE
            entry, created = await self._seal_and_publish(file, mode, target)
            if no_replace and not created:
                raise AlreadyExists(f"{target[1]!r} exists")
            file.entry, file.published, file.published_changes = entry, True, changes

    async def _seal_and_publish(
        self, file: LocalFile, mode: PublishMode, key: Key, *, keep_attributes: bool = False
    ) -> tuple[Entry, bool]:
        self._tree.master.check()  # a seal may hash all of it
        sealed = await self._area.seal(file)
        # Whoever takes over must publish this very block: of two the master may have seen only the first.
        self._saved.touch(file)
        self._saved.commit()
        try:
            return await self._publish(file, sealed, mode, key, keep_attributes=keep_attributes)
        except Stale:
            if sealed is None:
                raise
        # Either the name is gone, or the block: its worker gave it up, or an earlier attempt whose answer was lost did
        # publish it and somebody has replaced it since. A fresh block tells the two apart.
        file.unseal()
        return await self._publish(file, await self._area.seal(file), mode, key, keep_attributes=keep_attributes)

    async def _publish(
        self, file: LocalFile, sealed: SealedBlock | None, mode: PublishMode, key: Key, *, keep_attributes: bool = False
    ) -> tuple[Entry, bool]:
        directory, name = key
        wanted = PublishName(
            name,
            sealed.address if sealed else None,
            sealed.volume if sealed else 0,
            file.permissions,
            file.uid,
            file.gid,
            file.mtime_ns if file.keep_mtime else 0,
            keep_attributes,
            replace_equal=self._tree.unreadable.has(key, self._tree.now_s()),
        )
        entry, created = await self._tree.master.publish(directory, wanted, mode)
        self._tree.unreadable.discard(key)
        if created and file.permissions == 0 and not keep_attributes:  # 0 stands for 0644 in a Publish
            entry = await self._tree.master.set_attr(directory, name, mode=0)
        self._tree.learn(entry, key)
        self._tree.directory_changed(directory)
        file.entry = entry
        return entry, created
