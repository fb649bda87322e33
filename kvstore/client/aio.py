"""`AsyncClient`: the SDK for asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from kvstore.client import arguments, files, url
from kvstore.client.blocks import AsyncBlocks
from kvstore.client.cache import MetadataCache
from kvstore.client.cluster import AsyncCluster
from kvstore.client.deadline import Deadline, seconds
from kvstore.client.files import Buffer, Progress, no_progress
from kvstore.client.flow import AsyncFlow
from kvstore.client.jobs import (
    MAX_RACES,
    MKDIR_WORDS,
    Flags,
    GetJob,
    Put,
    PutJob,
    Puts,
    Sizes,
    Values,
    as_miss,
    is_race,
    of_block,
    or_raise,
    readable,
    told,
    whole,
)
from kvstore.client.local import AsyncLocalWorker
from kvstore.client.lost import LostNames
from kvstore.client.messages import ClusterMap, RemoveKind, RemoveName, RenameName, Statfs
from kvstore.client.meta import AsyncMeta, more_batches_s
from kvstore.client.policies import Holding, Policy, below
from kvstore.client.remote import Described
from kvstore.client.sockets import SealedBlock
from kvstore.client.wiring import AsyncParts
from kvstore.core.errors import KvError
from kvstore.core.limits import METADATA_TIMEOUT_S, START_TIMEOUT_S, fetch_timeout_s, store_timeout_s
from kvstore.core.types import Entry
from kvstore.rpc.transport import GRPC, Transport
from kvstore.runtime import Runtime

MAX_STORES = 8
"""Values of one put_many that are staged and written at the same time."""


class AsyncClient:
    """A store, for one event loop: make it there, use it from any of its tasks. See `connect` for the arguments; a
    process that takes over from another one, as a mount's does, gives the `session` of that one.

    Connects at the first call, and again by itself after the master or the local worker restarted. Every call takes
    `timeout_s`, the deadline of the whole call (default: the client's, plus time for the bytes that it moves), and
    raises only `KvError`s.
    """

    def __init__(
        self,
        store_url: str,
        *,
        worker_socket: str | None = None,
        timeout_s: float = METADATA_TIMEOUT_S,
        metadata_ttl_s: float = 1.0,
        staging_dir: str | None = None,
        runtime: Runtime | None = None,
        session: int | None = None,
        transport: Transport = GRPC,
    ) -> None:
        self.timeout_s = seconds(timeout_s)
        socket_path = url.worker_socket(worker_socket)
        own = None if session is None else arguments.session(session)
        self._parts = AsyncParts(url.parse(store_url), socket_path, staging_dir, runtime, own, transport)
        self._cache = MetadataCache(seconds(metadata_ttl_s, "metadata_ttl_s"))
        self._lost = LostNames()
        self._flow = AsyncFlow(self._parts, self._cache)

    def __repr__(self) -> str:
        return f"<AsyncClient {self._parts.target}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def target(self) -> url.Target:
        """The master's addresses, and the root of this client's paths."""
        return self._parts.target

    @property
    def session(self) -> int:
        """64 random bits that own what this client stages."""
        return self._parts.session

    @property
    def node(self) -> str:
        """Node of the local worker, "" without one or before the first connection to it."""
        return self._parts.blocks.node

    @property
    def meta(self) -> AsyncMeta:
        """The master's calls; their paths begin at the root of the store, not at this client's."""
        return self._parts.meta

    @property
    def worker(self) -> AsyncLocalWorker | None:
        """The local worker; None without a socket."""
        return self._parts.worker

    @property
    def blocks(self) -> AsyncBlocks:
        """Blocks as files."""
        return self._parts.blocks

    @property
    def cluster(self) -> AsyncCluster:
        """The cached map, and the channels to workers."""
        return self._parts.cluster

    async def start(self, *, known_cluster: str = "", timeout_s: float | None = None) -> None:
        """Learn the cluster, and meet the local worker; every call does it if need be. Raises why it cannot.

        Who knows the cluster's id (`ClusterMap.cluster`) from before gives it: then the master is not asked.
        """
        await self._parts.start(Deadline.of(timeout_s, START_TIMEOUT_S), known_cluster)

    async def close(self) -> None:
        """End all connections; the client cannot be used again. What it staged goes after the session's grace."""
        await self._parts.close()

    # ---- values ----

    async def put(self, path: str, data: Buffer, *, if_absent: bool = False, timeout_s: float | None = None) -> Put:
        """Store bytes under a path; missing directories are made. With `if_absent` an existing file stays as it is.

        `data` is any contiguous buffer, and must not change until the call is over.
        """
        (result,) = await self.put_many([(path, data)], if_absent=if_absent, timeout_s=timeout_s)
        return or_raise(result)

    async def put_many(
        self,
        items: Mapping[str, Buffer] | Iterable[tuple[str, Buffer]],
        *,
        if_absent: bool = False,
        timeout_s: float | None = None,
    ) -> Puts:
        """Many puts, published in one call. Per item its `Put`, or its error, which does not hold up the others."""
        pairs = arguments.items(items)
        names = [self.target.path(path) for path, _ in pairs]
        views = [files.view_of(data) for _, data in pairs]
        extra_s = store_timeout_s(sum(map(len, views))) + more_batches_s(len(views))
        deadline = self._deadline(timeout_s, extra_s)
        job = PutJob(names, [len(v) for v in views], self._lost, if_absent=if_absent)
        bound = asyncio.Semaphore(MAX_STORES)

        async def store(index: int) -> SealedBlock:
            async with bound:
                return await self.blocks.store(views[index], timeout_s=deadline.left_s)

        await self._flow.put(job, store, deadline)
        return job.done()

    async def get(self, path: str, *, timeout_s: float | None = None) -> bytes:
        """The bytes of a path. Raises NotFound with its `reason`, whatever keeps them away."""
        job = await self._get([path], None, timeout_s)
        return whole(job.results[0])

    async def get_into(self, path: str, buffer: Buffer, *, timeout_s: float | None = None) -> int:
        """Read into a writable buffer that is large enough; the number of bytes. After an error it holds anything."""
        job = await self._get([path], arguments.buffers([buffer], 1), timeout_s)
        whole(job.results[0])
        return job.length(0)

    async def get_many(self, paths: Sequence[str], *, timeout_s: float | None = None) -> Values:
        """Per path its bytes, or None for a miss, whatever its cause."""
        return (await self._get(arguments.paths(paths), None, timeout_s)).values()

    async def get_many_into(
        self, paths: Sequence[str], buffers: Sequence[Buffer], *, timeout_s: float | None = None
    ) -> Sizes:
        """Per path the number of bytes read into its buffer, or None for a miss."""
        paths = arguments.paths(paths)
        views = arguments.buffers(buffers, len(paths))
        return (await self._get(paths, views, timeout_s)).sizes()

    # ---- names ----

    async def exists(self, path: str, *, timeout_s: float | None = None) -> bool:
        return (await self.exists_many([path], timeout_s=timeout_s))[0]

    async def exists_many(self, paths: Sequence[str], *, timeout_s: float | None = None) -> Flags:
        """Whether each path is there, as of at most `metadata_ttl_s` ago; False when nobody can tell."""
        job = GetJob([self.target.path(p) for p in arguments.paths(paths)], self._cache, self._lost)
        await self._flow.look_up(job, self._deadline(timeout_s, more_batches_s(len(paths))))
        return job.found()

    async def stat(self, path: str = "", *, timeout_s: float | None = None) -> Entry:
        """What a path names, as of now (not from the cache). Raises NotFound, NotDirectory."""
        name, deadline = self.target.path(path), self._deadline(timeout_s)
        await self._parts.start(deadline)
        (row,) = await self.meta.lookup([name], timeout_s=deadline.left_s)
        self._lost.looked_up([name], [row])
        return or_raise(told(row, path))

    async def list(
        self, path: str = "", *, after: str = "", limit: int = 0, timeout_s: float | None = None
    ) -> AsyncGenerator[tuple[str, Entry], None]:
        """Names in a directory in order, each with its entry; `timeout_s` is how long nothing may come."""
        name, deadline = self.target.path(path), self._deadline(timeout_s)
        arguments.text(after, "after")
        arguments.integer(limit, "limit")
        await self._parts.start(deadline)
        rows = self.meta.list(name, after=after, limit=limit, timeout_s=deadline.timeout_s)
        async with aclosing(rows):
            async for row in rows:
                yield row

    async def remove(self, path: str, *, kind: RemoveKind = RemoveKind.ANY, timeout_s: float | None = None) -> None:
        """Remove a file or an empty directory. Raises NotFound, NotEmpty, and by `kind` IsDirectory, NotDirectory."""
        name, deadline, kind = self.target.path(path), self._deadline(timeout_s), arguments.kind(kind)

        async def remove(inode: int) -> KvError | None:
            return (await self.meta.remove([RemoveName(name, kind, inode)], timeout_s=deadline.left_s))[0]

        await self._change(path, (name,), remove, deadline)

    async def rename(self, path: str, to: str, *, no_replace: bool = False, timeout_s: float | None = None) -> None:
        """Move a file or directory; a file (or an empty directory) at `to` is replaced unless `no_replace`."""
        name, new, deadline = self.target.path(path), self.target.path(to), self._deadline(timeout_s)

        async def rename(inode: int) -> KvError | None:
            meant = RenameName(0, name, 0, new, no_replace, inode)
            return (await self.meta.rename([meant], timeout_s=deadline.left_s))[0]

        await self._change(path, (name, new), rename, deadline)

    async def mkdir(
        self, path: str, *, parents: bool = False, mode: int = 0o755, timeout_s: float | None = None
    ) -> Entry:
        """Make a directory. With `parents` missing ones above it too, and an existing one is fine."""
        name, deadline = self.target.path(path), self._deadline(timeout_s)
        arguments.integer(mode, "mode", 0o7777)
        await self._parts.start(deadline)
        try:
            (row,) = await self.meta.mkdir([name], parents=parents, mode=mode, timeout_s=deadline.left_s)
        finally:
            self._cache.changed(name)
        return or_raise(told(row, path, MKDIR_WORDS))

    async def statfs(self, path: str = "", *, timeout_s: float | None = None) -> Statfs:
        """Capacity of the cluster; files and directories of the whole store."""
        name, deadline = self.target.path(path), self._deadline(timeout_s)
        await self._parts.start(deadline)
        return await self.meta.statfs(name, timeout_s=deadline.left_s)

    async def set_policy(
        self, path: str, *, quota_bytes: int | None = None, ttl_s: float | None = None, pinned: bool | None = None,
        timeout_s: float | None = None,
    ) -> Holding:  # fmt: skip
        """Quota and sliding TTL of a directory, pin of a directory or a file: None leaves it, 0 and False take it away.
        What holds for the path then. Raises NotFound, NotDirectory, InvalidRequest."""
        name, deadline = self.target.path(path), self._deadline(timeout_s)
        await self._parts.start(deadline)
        policies, left_s = self.meta.policies, deadline.left_s
        holding = await policies.set(name, quota_bytes=quota_bytes, ttl_s=ttl_s, pinned=pinned, timeout_s=left_s)
        return holding.named(self.target.root)

    async def policies(self, path: str = "", *, timeout_s: float | None = None) -> Holding:
        """What holds for a path. Raises NotFound, NotDirectory."""
        name, deadline = self.target.path(path), self._deadline(timeout_s)
        await self._parts.start(deadline)
        return (await self.meta.policies.of(name, timeout_s=deadline.left_s)).named(self.target.root)

    async def all_policies(self, *, timeout_s: float | None = None) -> Sequence[Policy]:
        """Of the whole store, in order of their paths."""
        deadline = self._deadline(timeout_s)
        await self._parts.start(deadline)
        return below(self.target.root, await self.meta.policies.all(timeout_s=deadline.left_s))

    async def describe(self, entry: Entry, *, timeout_s: float | None = None) -> Sequence[Described]:
        """What the workers with a replica of a file know of its block: tier, heat, when it expires. Nobody's heat rises
        by it; workers that cannot be asked are left out."""
        deadline = self._deadline(timeout_s)
        await self._parts.start(deadline)
        if entry.address is None:
            return []
        return await self._parts.remote.describe(entry.address, entry.replicas, timeout_s=deadline.left_s)

    async def cluster_map(self, *, timeout_s: float | None = None) -> ClusterMap:
        """Nodes, volumes and counters as of now."""
        deadline = self._deadline(timeout_s)
        await self._parts.start(deadline)
        return await self.meta.cluster_map(timeout_s=deadline.left_s)

    # ---- files ----

    async def put_file(
        self,
        path: str,
        source: str | os.PathLike[str],
        *,
        if_absent: bool = False,
        progress: Progress = no_progress,
        timeout_s: float | None = None,
    ) -> Put:
        """Store a local file, a piece at a time. Raises OSError for what is wrong with the local file."""
        name, size = self.target.path(path), files.regular_size(arguments.local_path(source, "source"))
        deadline = self._deadline(timeout_s, store_timeout_s(size))
        job = PutJob([name], [size], self._lost, if_absent=if_absent)

        async def store(_: int) -> SealedBlock:
            return await self._flow.store_file(source, size, progress, deadline)

        await self._flow.put(job, store, deadline)
        return or_raise(job.done()[0])

    async def get_file(
        self,
        path: str,
        target: str | os.PathLike[str],
        *,
        progress: Progress = no_progress,
        timeout_s: float | None = None,
    ) -> int:
        """Write a value to a local file, there as a whole or not at all; its size. Raises like `get`, and OSError."""
        deadline, target = self._deadline(timeout_s), arguments.local_path(target, "target")
        entry = readable(await self.stat(path, timeout_s=deadline.left_s), path)
        deadline.allow(fetch_timeout_s(entry.length_bytes))
        try:
            fd = await self.blocks.open(entry, timeout_s=deadline.left_s)
        except KvError as error:
            self._lost.failed(self.target.path(path), error)
            raise as_miss(of_block(error)) from None
        await self._flow.load_file(fd, target, entry.length_bytes, progress, deadline)
        return entry.length_bytes

    # ---- inside ----

    def _deadline(self, timeout_s: float | None, extra_s: float = 0.0) -> Deadline:
        return Deadline.of(timeout_s, self.timeout_s + extra_s, self.timeout_s)

    async def _get(self, paths: Sequence[str], views: Sequence[memoryview] | None, timeout_s: float | None) -> GetJob:
        job = GetJob([self.target.path(p) for p in paths], self._cache, self._lost, views)
        await self._flow.get(job, self._deadline(timeout_s, more_batches_s(len(paths))))
        return job

    async def _change(
        self, path: str, names: Sequence[str], change: Callable[[int], Awaitable[KvError | None]], deadline: Deadline
    ) -> None:
        """Change what `path` is now, by its inode, so that it may be repeated; anew if it became another one."""
        try:
            for attempt in range(MAX_RACES):
                entry = await self.stat(path, timeout_s=deadline.left_s)
                error = await change(entry.inode)
                if not is_race(error, attempt):
                    break
        finally:
            for name in names:
                self._cache.changed(name, tree=True)
        if error is not None:
            raise error


def connect(
    store_url: str,
    *,
    worker_socket: str | None = None,
    timeout_s: float = METADATA_TIMEOUT_S,
    metadata_ttl_s: float = 1.0,
    staging_dir: str | None = None,
) -> AsyncClient:
    """A client of ``kvstore://host:port[,host:port][/root]`` for the running loop. Nothing is connected yet.

    * `worker_socket`: the local worker's Unix socket; None = the default one where it exists, "" = no local worker;
    * `timeout_s`: default deadline of a call, without the time for bytes;
    * `metadata_ttl_s`: how long an entry that was looked up may be believed; 0 = ask every time;
    * `staging_dir`: for files on their way when there is no local worker; None = the system's temporary directory.
    """
    return AsyncClient(
        store_url,
        worker_socket=worker_socket,
        timeout_s=timeout_s,
        metadata_ttl_s=metadata_ttl_s,
        staging_dir=staging_dir,
    )
