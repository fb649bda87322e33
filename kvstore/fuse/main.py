"""The mount's process: checks, connects, mounts, serves, unmounts."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Final

import pyfuse3
import pyfuse3.asyncio
import uvloop

from kvstore.client.aio import AsyncClient
from kvstore.config import Config, MountConfig, require_mount_dir
from kvstore.core.errors import Denied, KvError, NotDirectory
from kvstore.core.types import Entry
from kvstore.fuse import metrics, mountpoint
from kvstore.fuse.changes import Changes
from kvstore.fuse.circuit import Master
from kvstore.fuse.files import Files
from kvstore.fuse.inodes import EntryCache, Numbers
from kvstore.fuse.local import LocalFiles
from kvstore.fuse.names import TempPatterns
from kvstore.fuse.ops import Operations, Parts
from kvstore.fuse.publishing import Publisher
from kvstore.fuse.sealed import SealedFiles
from kvstore.fuse.space import Space
from kvstore.fuse.staging import StagingArea
from kvstore.fuse.tree import Tree
from kvstore.obs import notify
from kvstore.obs.http import serve
from kvstore.runtime import Runtime, SystemRuntime

log = logging.getLogger(__name__)

THREADS: Final = 16
MIN_TASKS: Final = 16
"""Tasks that stay, each with a buffer of 1 MiB: a new buffer for every burst costs a page fault per 4 KiB."""
MAX_TASKS: Final = 1024
"""Operations at a time. With the master away each may wait for its deadline, and the rest of the mount must go on."""
BUSY_WAIT_S: Final = 5.0
"""How long SIGTERM waits for open files before it detaches the mount."""
SWEEP_S: Final = 2.0
_RETRY_S: Final = 0.2

Announce = Callable[[str], None]
"""Told one line when the mount serves."""


def main(config: Config, announce: Announce = print) -> None:
    """Run until the mount is unmounted, or SIGTERM or SIGINT. Raises KvError when it cannot start."""
    require_mount_dir(config)
    uvloop.run(run(config, announce))


async def run(config: Config, announce: Announce = print) -> None:
    """The same on a running loop. One mount a process: pyfuse3's session is global."""
    mountpoint.check_prerequisites()
    directory = mountpoint.absolute(config.mount.dir)
    cleaned = await asyncio.to_thread(mountpoint.prepare, directory)
    if cleaned:
        log.warning("%s", cleaned)
    runtime = SystemRuntime(THREADS, "mount")
    client = AsyncClient(
        config.mount.master,
        worker_socket=config.mount.worker_socket,
        staging_dir=config.mount.staging_dir or None,
        runtime=runtime,
    )
    try:
        await _serve(config, directory, client, runtime, announce)
    finally:
        await client.close()


async def _serve(config: Config, directory: str, client: AsyncClient, runtime: Runtime, announce: Announce) -> None:
    await client.start()
    cluster = await client.cluster.map()
    master = Master(client.meta)
    root = await _root(master, client.target.path(config.mount.path))
    parts = build(config, client, master, root, cluster.max_block_bytes, runtime)
    operations = Operations(parts)
    http, _ = await serve(config.mount.http_address, metrics.routes(operations, parts, master))
    try:
        _mount(operations, directory, config.mount.allow_other)
        await _until_unmounted(config, directory, client, parts, runtime, announce)
    finally:
        await http.close()
        await master.close()


async def _until_unmounted(
    config: Config, directory: str, client: AsyncClient, parts: Parts, runtime: Runtime, announce: Announce
) -> None:
    sweeper = asyncio.create_task(_sweep(parts.changes, config.mount.temp_ttl_s, runtime))
    stopper = asyncio.create_task(_stop_on_signal(directory, parts.files))
    ready = asyncio.create_task(_when_it_serves(directory, config.mount, client, announce))
    try:
        await pyfuse3.main(min_tasks=MIN_TASKS, max_tasks=MAX_TASKS)
    finally:
        for task in (sweeper, stopper, ready):
            task.cancel()
        await asyncio.gather(sweeper, stopper, ready, return_exceptions=True)
        await asyncio.to_thread(pyfuse3.close)
        await _drop_all(parts)


def build(
    config: Config, client: AsyncClient, master: Master, root: Entry, max_block_bytes: int, runtime: Runtime
) -> Parts:
    """Wire the parts of a mount together."""
    numbers = Numbers(root.inode)
    cache = EntryCache(config.client.metadata_ttl_s, config.mount.stale_max_s)
    tree = Tree(master, cache, runtime)
    tree.learn(root, None)
    local, sealed = LocalFiles(numbers), SealedFiles(client.blocks, runtime)
    area = StagingArea(client.blocks, runtime, max_block_bytes)
    publisher = Publisher(tree, area, local)
    files = Files(tree, local, sealed, area, publisher, runtime, direct_io=config.mount.direct_io)
    changes = Changes(tree, local, sealed, files, publisher, runtime)
    space = Space(master, root.inode, runtime)
    return Parts(numbers, tree, local, sealed, files, changes, space, TempPatterns(config.mount.temp_patterns))


async def _root(master: Master, path: str) -> Entry:
    """The directory that the mount shows, made if it is not there."""
    entry = await master.make_directories(path)
    if not entry.is_dir:
        raise NotDirectory(f"/{path} is not a directory of the store; choose another --path")
    return entry


def _mount(operations: Operations, directory: str, allow_other: bool) -> None:
    pyfuse3.asyncio.enable()
    options = {"default_permissions", f"fsname={mountpoint.FS_NAME}", f"subtype={mountpoint.FS_NAME}"}
    if allow_other:
        options.add("allow_other")
    try:
        pyfuse3.init(operations, directory, options)
    except RuntimeError as error:
        raise Denied(
            f"cannot mount on {directory} ({error}): it takes root or CAP_SYS_ADMIN, or fusermount3 with "
            "user_allow_other in /etc/fuse.conf (or allow_other = false)"
        ) from None


async def _when_it_serves(directory: str, config: MountConfig, client: AsyncClient, announce: Announce) -> None:
    # A question that comes back proves that the kernel has our INIT reply, which sets the read-ahead to 128 KiB.
    await asyncio.to_thread(os.stat, directory)
    mounted = mountpoint.find(directory)
    if mounted is None or not mountpoint.set_read_ahead(mounted, config.read_ahead_bytes):
        log.warning("read-ahead stays at the kernel's 128 KiB (raising it needs root): reads will be slower")
    announce(_ready_line(config, directory, client))
    notify.ready(mount=directory)


def _ready_line(config: MountConfig, directory: str, client: AsyncClient) -> str:
    how = f"local worker on node {client.node}" if client.node else "no local worker: staging in temporary files"
    cache = "direct I/O" if config.direct_io else "kernel cache"
    what = f"mounted {config.path} of {config.master} at {directory}"
    return f"{what} (plain FUSE, {cache}, {how}); stop: umount {directory}"


async def _sweep(changes: Changes, temp_ttl_s: float, runtime: Runtime) -> None:
    while True:
        await runtime.sleep(SWEEP_S)
        try:
            await changes.expire(temp_ttl_s)
        except KvError as error:
            log.warning("sweeping temporary files: %s", error.message)


async def _stop_on_signal(directory: str, files: Files) -> None:
    """Unmount at the first SIGTERM or SIGINT; `pyfuse3.main` returns by itself then."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    notify.stopping()
    for _ in range(int(BUSY_WAIT_S / _RETRY_S)):
        if await asyncio.to_thread(mountpoint.unmount, directory):
            return
        await asyncio.sleep(_RETRY_S)
    log.warning("%s is busy (%d open files): detached; it ends for its users now", directory, len(files.handles))
    await asyncio.to_thread(mountpoint.detach, directory)
    pyfuse3.terminate()


async def _drop_all(parts: Parts) -> None:
    """Staging files go at once rather than with the session's grace."""
    for file in parts.local.all():
        try:
            async with asyncio.timeout(BUSY_WAIT_S):
                await parts.files.discard(file)
        except (KvError, TimeoutError, OSError) as error:
            log.debug("staging file left to the session's end: %s", error)
