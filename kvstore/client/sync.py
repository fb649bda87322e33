"""`Client`: the SDK for threads. No event loop anywhere: the synchronous gRPC API, blocking sockets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import BinaryIO, Self

from kvstore.client import arguments, files, url
from kvstore.client.cache import MetadataCache
from kvstore.client.cluster import Cluster
from kvstore.client.deadline import Deadline, seconds
from kvstore.client.files import Buffer, Progress, no_progress
from kvstore.client.flow import Flow
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
from kvstore.client.lost import LostNames
from kvstore.client.messages import ClusterMap, RemoveKind, RemoveName, RenameName, Statfs
from kvstore.client.meta import Meta, more_batches_s
from kvstore.client.policies import Holding, Policy, below
from kvstore.client.remote import Described
from kvstore.client.sockets import SealedBlock
from kvstore.client.sync_blocks import Blocks
from kvstore.client.wiring import Parts
from kvstore.core.errors import KvError
from kvstore.core.limits import METADATA_TIMEOUT_S, START_TIMEOUT_S, fetch_timeout_s, store_timeout_s
from kvstore.core.types import Entry
from kvstore.rpc import fork


class Client:
    """A store, for any number of threads. See `connect` for the arguments, `AsyncClient` for the same calls in asyncio.

    Connects at the first call, and again by itself after the master or the local worker restarted. Every call takes
    `timeout_s`, the deadline of the whole call (default: the client's, plus time for the bytes that it moves), and
    raises only `KvError`s.

    After a fork the child's copy works on: it opens connections of its own and has a session of its own, since gRPC's
    channels and the sockets of the parent do not work there. gRPC does not allow a fork while another thread is in a
    call (tried: it crashes): fork first, or use ``spawn``.
    """

    def __init__(
        self,
        store_url: str,
        *,
        worker_socket: str | None = None,
        timeout_s: float = METADATA_TIMEOUT_S,
        metadata_ttl_s: float = 1.0,
        staging_dir: str | None = None,
    ) -> None:
        self.timeout_s = seconds(timeout_s)
        self._arguments = (url.parse(store_url), url.worker_socket(worker_socket), staging_dir)
        self._metadata_ttl_s = seconds(metadata_ttl_s, "metadata_ttl_s")
        self._of_the_parent: list[object] = []
        self._assemble()
        fork.watch(self)

    def __repr__(self) -> str:
        return f"<Client {self._parts.target}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
    def meta(self) -> Meta:
        """The master's calls; their paths begin at the root of the store, not at this client's."""
        return self._parts.meta

    @property
    def blocks(self) -> Blocks:
        """Blocks as files."""
        return self._parts.blocks

    @property
    def cluster(self) -> Cluster:
        """The cached map, and the channels to workers."""
        return self._parts.cluster

    def start(self, *, timeout_s: float | None = None) -> None:
        """Learn the cluster, and meet the local worker; every call does it if need be. Raises why it cannot."""
        self._parts.start(Deadline.of(timeout_s, START_TIMEOUT_S))

    def close(self) -> None:
        """End all connections; the client cannot be used again. What it staged goes after the session's grace."""
        self._parts.close()

    # ---- values ----

    def put(self, path: str, data: Buffer, *, if_absent: bool = False, timeout_s: float | None = None) -> Put:
        """Store bytes under a path; missing directories are made. With `if_absent` an existing file stays as it is.

        `data` is any contiguous buffer, and must not change until the call is over.
        """
        (result,) = self.put_many([(path, data)], if_absent=if_absent, timeout_s=timeout_s)
        return or_raise(result)

    def put_many(
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

        def store(index: int) -> SealedBlock:
            return self.blocks.store(views[index], timeout_s=deadline.left_s)

        self._flow.put(job, store, deadline)
        return job.done()

    def get(self, path: str, *, timeout_s: float | None = None) -> bytes:
        """The bytes of a path. Raises NotFound with its `reason`, whatever keeps them away."""
        job = self._get([path], None, timeout_s)
        return whole(job.results[0])

    def get_into(self, path: str, buffer: Buffer, *, timeout_s: float | None = None) -> int:
        """Read into a writable buffer that is large enough; the number of bytes. After an error it holds anything."""
        job = self._get([path], arguments.buffers([buffer], 1), timeout_s)
        whole(job.results[0])
        return job.length(0)

    def get_many(self, paths: Sequence[str], *, timeout_s: float | None = None) -> Values:
        """Per path its bytes, or None for a miss, whatever its cause."""
        return (self._get(arguments.paths(paths), None, timeout_s)).values()

    def get_many_into(
        self, paths: Sequence[str], buffers: Sequence[Buffer], *, timeout_s: float | None = None
    ) -> Sizes:
        """Per path the number of bytes read into its buffer, or None for a miss."""
        paths = arguments.paths(paths)
        views = arguments.buffers(buffers, len(paths))
        return (self._get(paths, views, timeout_s)).sizes()

    # ---- names ----

    def exists(self, path: str, *, timeout_s: float | None = None) -> bool:
        return (self.exists_many([path], timeout_s=timeout_s))[0]

    def exists_many(self, paths: Sequence[str], *, timeout_s: float | None = None) -> Flags:
        """Whether each path is there, as of at most `metadata_ttl_s` ago; False when nobody can tell."""
        job = GetJob([self.target.path(p) for p in arguments.paths(paths)], self._cache, self._lost)
        self._flow.look_up(job, self._deadline(timeout_s, more_batches_s(len(paths))))
        return job.found()

    def stat(self, path: str = "", *, timeout_s: float | None = None) -> Entry:
        """What a path names, as of now (not from the cache). Raises NotFound, NotDirectory."""
        name, deadline = self.target.path(path), self._deadline(timeout_s)
        self._parts.start(deadline)
        (row,) = self.meta.lookup([name], timeout_s=deadline.left_s)
        self._lost.looked_up([name], [row])
        return or_raise(told(row, path))

    def list(
        self, path: str = "", *, after: str = "", limit: int = 0, timeout_s: float | None = None
    ) -> Iterator[tuple[str, Entry]]:
        """Names in a directory in order, each with its entry; `timeout_s` is how long nothing may come."""
        name, deadline = self.target.path(path), self._deadline(timeout_s)
        arguments.text(after, "after")
        arguments.integer(limit, "limit")
        self._parts.start(deadline)
        yield from self.meta.list(name, after=after, limit=limit, timeout_s=deadline.timeout_s)

    def remove(self, path: str, *, kind: RemoveKind = RemoveKind.ANY, timeout_s: float | None = None) -> None:
        """Remove a file or an empty directory. Raises NotFound, NotEmpty, and by `kind` IsDirectory, NotDirectory."""
        name, deadline, kind = self.target.path(path), self._deadline(timeout_s), arguments.kind(kind)

        def remove(inode: int) -> KvError | None:
            return (self.meta.remove([RemoveName(name, kind, inode)], timeout_s=deadline.left_s))[0]

        self._change(path, (name,), remove, deadline)

    def rename(self, path: str, to: str, *, no_replace: bool = False, timeout_s: float | None = None) -> None:
        """Move a file or directory; a file (or an empty directory) at `to` is replaced unless `no_replace`."""
        name, new, deadline = self.target.path(path), self.target.path(to), self._deadline(timeout_s)

        def rename(inode: int) -> KvError | None:
            meant = RenameName(0, name, 0, new, no_replace, inode)
            return (self.meta.rename([meant], timeout_s=deadline.left_s))[0]

        self._change(path, (name, new), rename, deadline)

    def mkdir(self, path: str, *, parents: bool = False, mode: int = 0o755, timeout_s: float | None = None) -> Entry:
        """Make a directory. With `parents` missing ones above it too, and an existing one is fine."""
        name, deadline = self.target.path(path), self._deadline(timeout_s)
        arguments.integer(mode, "mode", 0o7777)
        self._parts.start(deadline)
        try:
            (row,) = self.meta.mkdir([name], parents=parents, mode=mode, timeout_s=deadline.left_s)
        finally:
            self._cache.changed(name)
        return or_raise(told(row, path, MKDIR_WORDS))

    def statfs(self, path: str = "", *, timeout_s: float | None = None) -> Statfs:
        """Capacity of the cluster; files and directories of the whole store."""
        name, deadline = self.target.path(path), self._deadline(timeout_s)
        self._parts.start(deadline)
        return self.meta.statfs(name, timeout_s=deadline.left_s)

    def set_policy(
        self, path: str, *, quota_bytes: int | None = None, ttl_s: float | None = None, pinned: bool | None = None,
        timeout_s: float | None = None,
    ) -> Holding:  # fmt: skip
        """Quota and sliding TTL of a directory, pin of a directory or a file: None leaves it, 0 and False take it away.
        What holds for the path then. Raises NotFound, NotDirectory, InvalidRequest."""
        name, deadline = self.target.path(path), self._deadline(timeout_s)
        self._parts.start(deadline)
        policies, left_s = self.meta.policies, deadline.left_s
        holding = policies.set(name, quota_bytes=quota_bytes, ttl_s=ttl_s, pinned=pinned, timeout_s=left_s)
        return holding.named(self.target.root)

    def policies(self, path: str = "", *, timeout_s: float | None = None) -> Holding:
        """What holds for a path. Raises NotFound, NotDirectory."""
        name, deadline = self.target.path(path), self._deadline(timeout_s)
        self._parts.start(deadline)
        return (self.meta.policies.of(name, timeout_s=deadline.left_s)).named(self.target.root)

    def all_policies(self, *, timeout_s: float | None = None) -> Sequence[Policy]:
        """Of the whole store, in order of their paths."""
        deadline = self._deadline(timeout_s)
        self._parts.start(deadline)
        return below(self.target.root, self.meta.policies.all(timeout_s=deadline.left_s))

    def describe(self, entry: Entry, *, timeout_s: float | None = None) -> Sequence[Described]:
        """What the workers with a replica of a file know of its block: tier, heat, when it expires. Nobody's heat rises
        by it; workers that cannot be asked are left out."""
        deadline = self._deadline(timeout_s)
        self._parts.start(deadline)
        if entry.address is None:
            return []
        return self._parts.remote.describe(entry.address, entry.replicas, timeout_s=deadline.left_s)

    def cluster_map(self, *, timeout_s: float | None = None) -> ClusterMap:
        """Nodes, volumes and counters as of now."""
        deadline = self._deadline(timeout_s)
        self._parts.start(deadline)
        return self.meta.cluster_map(timeout_s=deadline.left_s)

    # ---- files ----

    def put_file(
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

        def store(_: int) -> SealedBlock:
            return self._flow.store_file(source, size, progress, deadline)

        self._flow.put(job, store, deadline)
        return or_raise(job.done()[0])

    def get_file(
        self,
        path: str,
        target: str | os.PathLike[str],
        *,
        progress: Progress = no_progress,
        timeout_s: float | None = None,
    ) -> int:
        """Write a value to a local file, there as a whole or not at all; its size. Raises like `get`, and OSError."""
        deadline, target = self._deadline(timeout_s), arguments.local_path(target, "target")
        fd, size = self._open(path, deadline)
        self._flow.load_file(fd, target, size, progress, deadline)
        return size

    def open(self, path: str, *, timeout_s: float | None = None) -> BinaryIO:
        """A value as a read-only file, whole and verified; close it after use. Raises like `get`."""
        deadline = self._deadline(timeout_s)
        return os.fdopen(self._open(path, deadline)[0], "rb")

    # ---- inside ----

    def forget(self) -> None:
        """In the child of a fork, see `kvstore.rpc.fork`: new parts; the old ones are kept, for their end would
        not work.
        """
        self._of_the_parent.append(self._parts)
        self._assemble()

    def _assemble(self) -> None:
        self._parts = Parts(*self._arguments)
        self._cache = MetadataCache(self._metadata_ttl_s)
        self._lost = LostNames()
        self._flow = Flow(self._parts, self._cache)

    def _deadline(self, timeout_s: float | None, extra_s: float = 0.0) -> Deadline:
        return Deadline.of(timeout_s, self.timeout_s + extra_s, self.timeout_s)

    def _get(self, paths: Sequence[str], views: Sequence[memoryview] | None, timeout_s: float | None) -> GetJob:
        job = GetJob([self.target.path(p) for p in paths], self._cache, self._lost, views)
        self._flow.get(job, self._deadline(timeout_s, more_batches_s(len(paths))))
        return job

    def _open(self, path: str, deadline: Deadline) -> tuple[int, int]:
        """(fd, size) of a value."""
        entry = readable(self.stat(path, timeout_s=deadline.left_s), path)
        deadline.allow(fetch_timeout_s(entry.length_bytes))
        try:
            return self.blocks.open(entry, timeout_s=deadline.left_s), entry.length_bytes
        except KvError as error:
            self._lost.failed(self.target.path(path), error)
            raise as_miss(of_block(error)) from None

    def _change(
        self, path: str, names: Sequence[str], change: Callable[[int], KvError | None], deadline: Deadline
    ) -> None:
        """Change what `path` is now, by its inode, so that it may be repeated; anew if it became another one."""
        try:
            for attempt in range(MAX_RACES):
                entry = self.stat(path, timeout_s=deadline.left_s)
                error = change(entry.inode)
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
) -> Client:
    """A client of ``kvstore://host:port[,host:port][/root]`` for any number of threads. Nothing is connected yet.

    * `worker_socket`: the local worker's Unix socket; None = the default one where it exists, "" = no local worker;
    * `timeout_s`: default deadline of a call, without the time for bytes;
    * `metadata_ttl_s`: how long an entry that was looked up may be believed; 0 = ask every time;
    * `staging_dir`: for files on their way when there is no local worker; None = the system's temporary directory.
    """
    return Client(
        store_url,
        worker_socket=worker_socket,
        timeout_s=timeout_s,
        metadata_ttl_s=metadata_ttl_s,
        staging_dir=staging_dir,
    )
