"""A mount's parts, put together."""

from __future__ import annotations

from kvstore.client.aio import AsyncClient
from kvstore.config import Config
from kvstore.core.types import Entry
from kvstore.fuse.attached import Keeper
from kvstore.fuse.attrs import Attributes, Owner
from kvstore.fuse.backing import PLAIN
from kvstore.fuse.changes import Changes
from kvstore.fuse.circuit import Master
from kvstore.fuse.files import Files
from kvstore.fuse.inodes import EntryCache, Numbers
from kvstore.fuse.local import LocalFiles
from kvstore.fuse.localfile import LocalFile
from kvstore.fuse.names import NO_STATE, State, TempPatterns
from kvstore.fuse.ops import Parts
from kvstore.fuse.publishing import Publisher
from kvstore.fuse.readopens import ReadOpens
from kvstore.fuse.saved import NOTHING_SAVED, DirectoryRecord, Facts, Saved, SavedState
from kvstore.fuse.sealed import SealedFiles
from kvstore.fuse.space import Space
from kvstore.fuse.staging import StagingArea
from kvstore.fuse.tree import Tree
from kvstore.fuse.xattrs import ExtendedAttributes
from kvstore.runtime import Runtime


def build(
    config: Config, client: AsyncClient, master: Master, facts: Facts, saved: Saved, keeper: Keeper | None,
    runtime: Runtime,
) -> Parts:  # fmt: skip
    mount = config.mount
    numbers = Numbers(facts.root.inode, keeper.inheritance.generation if keeper else 0)
    tree = _tree(config, master, facts.root, runtime)
    tree.cache.on_directory = lambda cached: saved.directory(
        cached.entry.inode, DirectoryRecord(cached.entry, cached.key)
    )
    local, sealed = LocalFiles(numbers, saved), SealedFiles(client.blocks, runtime)
    if isinstance(saved, SavedState):
        saved.state_of = lambda file: _state_of(local, file)
    area = StagingArea(client.blocks, runtime, facts.max_block_bytes, keeper or PLAIN)
    publisher = Publisher(tree, area, local, saved)
    readopens = ReadOpens(tree, sealed)
    files = Files(tree, local, sealed, readopens, area, publisher, saved, runtime, direct_io=mount.direct_io)
    changes = Changes(tree, local, sealed, files, publisher, saved, runtime)
    attributes = Attributes(Owner(mount.uid, mount.gid, mount.umask_bits))
    space, patterns = Space(master, facts.root.inode, runtime), TempPatterns(mount.temp_patterns)
    xattrs = ExtendedAttributes(tree, master, client)
    return Parts(
        numbers, tree, local, sealed, readopens, files, changes, space, patterns, attributes, saved, area, xattrs
    )  # fmt: skip


def new_saved(keeper: Keeper | None) -> Saved:
    return SavedState(keeper.inheritance.state_fd, keeper.replace_state) if keeper else NOTHING_SAVED


def _tree(config: Config, master: Master, root: Entry, runtime: Runtime) -> Tree:
    strict = config.mount.consistency == "strict"
    ttl_s, stale_s = (0.0, 0.0) if strict else (config.client.metadata_ttl_s, config.mount.stale_max_s)
    tree = Tree(master, EntryCache(ttl_s, stale_s), runtime)
    tree.learn(root, None)
    return tree


def _state_of(local: LocalFiles, file: LocalFile) -> State:
    return local.temps.state_of(file.key, file) if file.temporary and file.key is not None else NO_STATE
