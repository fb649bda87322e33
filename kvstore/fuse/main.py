"""The mount's process: connects, serves, ends. Plain, it mounts by itself; under a keeper, the keeper has mounted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Final

import pyfuse3
import pyfuse3.asyncio
import uvloop

from kvstore.client.aio import AsyncClient
from kvstore.config import Config, require_mount_dir
from kvstore.core.errors import AlreadyExists, KvError, NotDirectory
from kvstore.core.types import Entry
from kvstore.fuse import metrics, mountpoint, plain
from kvstore.fuse.assembly import build, new_saved
from kvstore.fuse.attached import Keeper, TakeOver, die_with
from kvstore.fuse.circuit import Master
from kvstore.fuse.ops import Operations, Parts
from kvstore.fuse.restore import restore
from kvstore.fuse.saved import Facts, Recovered, Saved, SavedState
from kvstore.keeper.channel import Inheritance
from kvstore.obs import notify
from kvstore.obs.http import serve
from kvstore.runtime import Runtime, SystemRuntime

log = logging.getLogger(__name__)

THREADS: Final = 16
MIN_TASKS: Final = 16
"""Tasks that stay, each with a buffer of 1 MiB: a new buffer for every burst costs a page fault per 4 KiB."""
MAX_TASKS: Final = 1024
"""Operations at a time. With the master away each may wait for its deadline, and the rest of the mount must go on."""
SWEEP_S: Final = 2.0
DROP_TIMEOUT_S: Final = 5.0

Announce = Callable[[str], None]
"""Told one line when the mount serves."""


def main(config: Config, why_plain: str = "", announce: Announce = print) -> None:
    """Run until the mount is unmounted, or SIGTERM or SIGINT. Raises KvError when it cannot start.

    `why_plain`: why there is no passthrough, for the ready line.
    """
    require_mount_dir(config)
    inheritance = Inheritance.from_environment()
    if inheritance is not None:
        die_with(os.getppid())
    uvloop.run(Mount(config, inheritance, why_plain, announce).run())


class Mount:
    """One mount a process: pyfuse3's session is global."""

    def __init__(self, config: Config, inheritance: Inheritance | None, why_plain: str, announce: Announce) -> None:
        self._config, self._why_plain, self._announce = config, why_plain, announce
        self._directory = mountpoint.absolute(config.mount.dir)
        self._keeper = Keeper(inheritance) if inheritance else None

    async def run(self) -> None:
        config, runtime = self._config, SystemRuntime(THREADS, "mount")
        saved = new_saved(self._keeper)
        client = AsyncClient(
            config.mount.master,
            worker_socket=config.mount.worker_socket,
            staging_dir=config.mount.staging_dir or None,
            runtime=runtime,
            session=self._keeper.inheritance.session if self._keeper else None,
        )
        try:
            await self._serve(client, saved, runtime)
        finally:
            await client.close()

    async def _serve(self, client: AsyncClient, saved: Saved, runtime: Runtime) -> None:
        """A successor asks the master nothing: it may be away just now. It reads what was saved twice: for the facts,
        and for the rest when its predecessor has written the last of it.
        """
        recovered = saved.recover() if isinstance(saved, SavedState) else None
        facts = recovered.facts if recovered else None
        await client.start(known_cluster=facts.cluster if facts else "")
        master = Master(client.meta)
        if facts is None:
            facts = await _learn(client, master, self._config)
        master.shows(facts.root.inode, client.target.path(self._config.mount.path))
        parts = build(self._config, client, master, facts, saved, self._keeper, runtime)
        operations = Operations(parts)
        http, _ = await serve(self._config.mount.http_address, metrics.routes(operations, parts, master))
        try:
            await self._start(operations, parts, client, facts)
            await self._until_the_end(parts, client, runtime)
        finally:
            await http.close()
            await master.close()

    async def _start(self, operations: Operations, parts: Parts, client: AsyncClient, facts: Facts) -> None:
        pyfuse3.asyncio.enable()
        if self._keeper is None:
            plain.mount(operations, self._directory, self._config.mount)
            return
        taken = await self._keeper.take()
        if isinstance(parts.saved, SavedState):
            await self._take_over(operations, parts, client, taken, parts.saved.recover())
        parts.saved.facts(facts)
        parts.saved.commit()
        pyfuse3.init(operations, f"/dev/fd/{self._keeper.inheritance.fuse_fd}", set())

    async def _take_over(
        self, operations: Operations, parts: Parts, client: AsyncClient, taken: TakeOver, recovered: Recovered
    ) -> None:
        await restore(operations, parts, client.blocks, client.worker, recovered, taken)
        if recovered.facts is not None:
            files, handles = len(recovered.files), len(taken.table.opens)
            log.info("took over", extra={"files": files, "handles": handles, "repeated": len(taken.table.again)})

    async def _until_the_end(self, parts: Parts, client: AsyncClient, runtime: Runtime) -> None:
        tasks = [
            asyncio.create_task(_sweep(parts, self._config.mount.temp_ttl_s, runtime)),
            asyncio.create_task(self._when_it_serves(client)),
        ]
        if self._keeper is None:
            tasks.append(asyncio.create_task(plain.stop_on_signal(self._directory, self._config.mount.busy_wait_s)))
        else:
            self._keeper.on_end(pyfuse3.terminate)
            tasks.append(asyncio.create_task(self._keeper.beat()))
        try:
            await pyfuse3.main(min_tasks=MIN_TASKS, max_tasks=MAX_TASKS)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._keeper is None:
                await asyncio.to_thread(pyfuse3.close)
            await _drop_all(parts)

    async def _when_it_serves(self, client: AsyncClient) -> None:
        # A question that comes back proves that the kernel has our INIT reply, which sets the read-ahead to 128 KiB.
        await asyncio.to_thread(os.stat, self._directory)
        mounted = mountpoint.find(self._directory)
        if mounted is None or not mountpoint.set_read_ahead(mounted, self._config.mount.read_ahead_bytes):
            log.warning("read-ahead stays at the kernel's 128 KiB (raising it needs root): reads will be slower")
        if self._keeper is None:
            line = self._ready_line(client)
            self._announce(line if notify.is_supervised() else f"{line}; stop: umount {self._directory}")
            notify.ready(mount=self._directory)
        else:
            self._keeper.serving(self._ready_line(client), {"mount": self._directory})

    def _ready_line(self, client: AsyncClient) -> str:
        mount = self._config.mount
        if self._keeper is not None:
            mode = "passthrough"
        else:
            cache = "direct I/O" if mount.direct_io else "kernel cache"
            mode = f"plain FUSE, {cache}; no passthrough: {self._why_plain}"
        worker = f"local worker on node {client.node}" if client.node else "no local worker: staging in temporary files"
        what = f"mounted {mount.path} of {mount.master} at {self._directory}"
        return f"{what} ({mode}; {worker})"


async def _learn(client: AsyncClient, master: Master, config: Config) -> Facts:
    cluster = await client.cluster.map()
    return Facts(await _root(master, client.target.path(config.mount.path)), cluster.cluster, cluster.max_block_bytes)


async def _root(master: Master, path: str) -> Entry:
    """The directory that the mount shows, made if it is not there."""
    try:
        entry = await master.make_directories(path)
    except (AlreadyExists, NotDirectory):
        entry = None
    if entry is None or not entry.is_dir:
        raise NotDirectory(f"mount.path: /{path} is a file of the store, or lies below one; name a directory")
    return entry


async def _sweep(parts: Parts, temp_ttl_s: float, runtime: Runtime) -> None:
    while True:
        await runtime.sleep(SWEEP_S)
        try:
            await parts.changes.expire(temp_ttl_s)
            await parts.area.spares.sweep()
        except KvError as error:
            log.warning("sweeping temporary files: %s", error.message)


async def _drop_all(parts: Parts) -> None:
    """Staging files go at once rather than with the session's grace."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROP_TIMEOUT_S):
            await parts.area.spares.close()
    for file in parts.local.all():
        try:
            async with asyncio.timeout(DROP_TIMEOUT_S):
                await parts.files.discard(file)
        except (KvError, TimeoutError, OSError) as error:
            log.debug("staging file left to the session's end: %s", error)
    with contextlib.suppress(OSError):
        parts.saved.commit()
