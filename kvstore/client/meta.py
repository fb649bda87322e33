"""The master's calls as typed functions: `AsyncMeta` for asyncio, `Meta` for threads, with the same methods.

Paths are relative to `base`, the inode number of a directory (0 = the root of the store); ``""`` is the base itself.
Every method takes `timeout_s`, the deadline of the whole call, and raises `KvError`; what is wrong with one item of a
batch stands in its place in the result instead. A batch may be several messages; none waits longer than `each_s`.

Retries (rule 21): what is idempotent is repeated until the deadline by `rpc.failover`. Remove and Rename are repeated
here, only when every name carries the inode it means, and only on such a repetition "already so" counts as success.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import TypeVar

from kvstore.client import messages as msg
from kvstore.client.deadline import Deadline, seconds
from kvstore.client.masterlink import AsyncMasterCalls, MasterCalls
from kvstore.client.policies import AsyncPolicies, Policies
from kvstore.client.turns import Again, Cursor, Numbers
from kvstore.core.errors import KvError, NotFound, Stale
from kvstore.core.limits import MAX_BATCH, MAX_TIMEOUT_S, METADATA_TIMEOUT_S
from kvstore.core.types import Entry
from kvstore.pb import master_pb2 as m
from kvstore.rpc import methods
from kvstore.rpc.methods import A, Method, Q

T = TypeVar("T")
_DEFAULT_S = METADATA_TIMEOUT_S
MAX_BATCH_BYTES = 2 << 20
"""Characters of paths in one message: far from `MAX_MESSAGE_BYTES`, whatever UTF-8 and protobuf make of them."""

Rows = list[Entry | KvError]
Results = list[msg.PublishResult | KvError]
Failures = list[KvError | None]
Events = list[msg.Event]


class AsyncMeta:
    """For asyncio. `session` is the 64 random bits that own what this client publishes. `policies`: quota, TTL, pin."""

    def __init__(self, link: AsyncMasterCalls, session: int) -> None:
        self._link, self._session = link, session
        self._numbers = Numbers()
        self.policies = AsyncPolicies(link)

    async def lookup(
        self, paths: Sequence[str], *, base: int = 0, timeout_s: float = _DEFAULT_S, each_s: float = MAX_TIMEOUT_S
    ) -> Rows:
        """Per path its entry with live replicas, or NotFound, NotDirectory …"""
        deadline = Deadline(timeout_s)
        rows: Rows = []
        for part in _batches(paths, len):
            request = m.LookupRequest(base=base, paths=part)
            reply = await self._link.call(methods.LOOKUP, request, deadline.at_most(each_s))
            rows += msg.rows_of(reply.entries, len(part))
        return rows

    async def publish(
        self,
        publications: Sequence[msg.Publication],
        *,
        base: int = 0,
        timeout_s: float = _DEFAULT_S,
        each_s: float = MAX_TIMEOUT_S,
    ) -> Results:
        """Each publication is one transaction with a result of its own."""
        deadline = Deadline(timeout_s)
        results: Results = []
        for part in _batches(publications, _text_bytes):
            request = msg.publish_request(base, self._session, self._numbers.take(len(part)), part)
            reply = await self._link.call(methods.PUBLISH, request, deadline.at_most(each_s))
            results += msg.publish_results(reply, len(part))
        return results

    async def mkdir(
        self,
        paths: Sequence[str],
        *,
        base: int = 0,
        parents: bool = False,
        mode: int = 0,
        uid: int = 0,
        gid: int = 0,
        timeout_s: float = _DEFAULT_S,
    ) -> Rows:
        """With `parents` missing directories are made and an existing one is fine (and the call is repeatable)."""
        request = m.MkdirRequest(base=base, paths=paths, parents=parents, mode=mode, uid=uid, gid=gid)
        reply = await self._link.call(_mkdir_method(parents), request, seconds(timeout_s))
        return msg.rows_of(reply.entries, len(paths))

    async def remove(
        self, names: Sequence[msg.RemoveName], *, base: int = 0, timeout_s: float = _DEFAULT_S
    ) -> Failures:
        """Per name None, or why it was not removed."""
        safe = all(n.inode for n in names)
        reply, again = await self._call_once(methods.REMOVE, msg.remove_request(base, names), safe, timeout_s)
        errors = msg.errors_of(reply.errors, len(names))
        return [None if again and isinstance(e, NotFound) else e for e in errors]

    async def rename(self, names: Sequence[msg.RenameName], *, timeout_s: float = _DEFAULT_S) -> Failures:
        """Per name None, or why it was not renamed."""
        deadline, safe = Deadline(timeout_s), all(n.inode for n in names)
        reply, again = await self._call_once(methods.RENAME, msg.rename_request(names), safe, timeout_s)
        errors = msg.errors_of(reply.errors, len(names))
        for i, name in enumerate(names):
            if again and _may_be_done(errors[i]):
                (there,) = await self.lookup([name.to_path], base=name.to_base, timeout_s=deadline.left_s)
                errors[i] = None if _is(there, name.inode) else errors[i]
        return errors

    async def list(
        self,
        path: str = "",
        *,
        base: int = 0,
        after: str = "",
        limit: int = 0,
        names_only: bool = False,
        timeout_s: float = _DEFAULT_S,
    ) -> AsyncGenerator[tuple[str, Entry], None]:
        """Names behind `after` in order, each with its entry (with `names_only` just inode and mode are set).

        A stream that breaks is resumed behind the last name. `timeout_s` is how long it may bring nothing.
        """
        cursor = Cursor(base, path, after, limit, names_only, timeout_s)
        while not cursor.done:
            try:
                async with aclosing(self._link.stream(methods.LIST, cursor.request(), cursor.timeout_s)) as pages:
                    async for page in pages:
                        for row in cursor.take(page):
                            yield row
                cursor.finish()
            except KvError as error:
                await asyncio.sleep(cursor.pause(error))

    async def set_attr(
        self,
        path: str = "",
        *,
        base: int = 0,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        mtime_ns: int | None = None,
        timeout_s: float = _DEFAULT_S,
    ) -> Entry:
        """Change what is not None; the entry as it is then."""
        request = m.SetAttrRequest(base=base, path=path, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns)
        reply = await self._link.call(methods.SET_ATTR, request, seconds(timeout_s))
        return msg.whole(msg.rows_of(reply.entries, 1)[0])

    async def statfs(self, path: str = "", *, base: int = 0, timeout_s: float = _DEFAULT_S) -> msg.Statfs:
        request = m.StatfsRequest(base=base, path=path)
        return msg.statfs(await self._link.call(methods.STATFS, request, seconds(timeout_s)))

    async def cluster_map(self, *, timeout_s: float = _DEFAULT_S) -> msg.ClusterMap:
        return msg.cluster_map(await self._link.call(methods.CLUSTER_MAP, m.ClusterMapRequest(), seconds(timeout_s)))

    async def events(self, after: int = 0, *, limit: int = 100, timeout_s: float = _DEFAULT_S) -> Events:
        """Changes behind sequence `after`; 0 = the last `limit` ones."""
        request = m.EventsRequest(after=after, limit=limit)
        return msg.events(await self._link.call(methods.EVENTS, request, seconds(timeout_s)))

    async def _call_once(self, method: Method[Q, A], request: Q, safe: bool, timeout_s: float) -> tuple[A, bool]:
        """The reply, and whether an earlier attempt may have done the work already."""
        turn = Again(safe, timeout_s)
        while True:
            try:
                return await self._link.call(method, request, turn.left_s), turn.again
            except KvError as error:
                await asyncio.sleep(turn.pause(error))


class Meta:
    """For threads: the methods of `AsyncMeta`, see there."""

    def __init__(self, link: MasterCalls, session: int) -> None:
        self._link, self._session = link, session
        self._numbers = Numbers()
        self.policies = Policies(link)

    def lookup(
        self, paths: Sequence[str], *, base: int = 0, timeout_s: float = _DEFAULT_S, each_s: float = MAX_TIMEOUT_S
    ) -> Rows:
        deadline = Deadline(timeout_s)
        rows: Rows = []
        for part in _batches(paths, len):
            request = m.LookupRequest(base=base, paths=part)
            reply = self._link.call(methods.LOOKUP, request, deadline.at_most(each_s))
            rows += msg.rows_of(reply.entries, len(part))
        return rows

    def publish(
        self,
        publications: Sequence[msg.Publication],
        *,
        base: int = 0,
        timeout_s: float = _DEFAULT_S,
        each_s: float = MAX_TIMEOUT_S,
    ) -> Results:
        deadline = Deadline(timeout_s)
        results: Results = []
        for part in _batches(publications, _text_bytes):
            request = msg.publish_request(base, self._session, self._numbers.take(len(part)), part)
            reply = self._link.call(methods.PUBLISH, request, deadline.at_most(each_s))
            results += msg.publish_results(reply, len(part))
        return results

    def mkdir(
        self,
        paths: Sequence[str],
        *,
        base: int = 0,
        parents: bool = False,
        mode: int = 0,
        uid: int = 0,
        gid: int = 0,
        timeout_s: float = _DEFAULT_S,
    ) -> Rows:
        request = m.MkdirRequest(base=base, paths=paths, parents=parents, mode=mode, uid=uid, gid=gid)
        reply = self._link.call(_mkdir_method(parents), request, seconds(timeout_s))
        return msg.rows_of(reply.entries, len(paths))

    def remove(self, names: Sequence[msg.RemoveName], *, base: int = 0, timeout_s: float = _DEFAULT_S) -> Failures:
        safe = all(n.inode for n in names)
        reply, again = self._call_once(methods.REMOVE, msg.remove_request(base, names), safe, timeout_s)
        errors = msg.errors_of(reply.errors, len(names))
        return [None if again and isinstance(e, NotFound) else e for e in errors]

    def rename(self, names: Sequence[msg.RenameName], *, timeout_s: float = _DEFAULT_S) -> Failures:
        deadline, safe = Deadline(timeout_s), all(n.inode for n in names)
        reply, again = self._call_once(methods.RENAME, msg.rename_request(names), safe, timeout_s)
        errors = msg.errors_of(reply.errors, len(names))
        for i, name in enumerate(names):
            if again and _may_be_done(errors[i]):
                (there,) = self.lookup([name.to_path], base=name.to_base, timeout_s=deadline.left_s)
                errors[i] = None if _is(there, name.inode) else errors[i]
        return errors

    def list(
        self,
        path: str = "",
        *,
        base: int = 0,
        after: str = "",
        limit: int = 0,
        names_only: bool = False,
        timeout_s: float = _DEFAULT_S,
    ) -> Iterator[tuple[str, Entry]]:
        cursor = Cursor(base, path, after, limit, names_only, timeout_s)
        while not cursor.done:
            try:
                with closing(self._link.stream(methods.LIST, cursor.request(), cursor.timeout_s)) as pages:
                    for page in pages:
                        yield from cursor.take(page)
                cursor.finish()
            except KvError as error:
                time.sleep(cursor.pause(error))

    def set_attr(
        self,
        path: str = "",
        *,
        base: int = 0,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        mtime_ns: int | None = None,
        timeout_s: float = _DEFAULT_S,
    ) -> Entry:
        request = m.SetAttrRequest(base=base, path=path, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns)
        return msg.whole(msg.rows_of(self._link.call(methods.SET_ATTR, request, seconds(timeout_s)).entries, 1)[0])

    def statfs(self, path: str = "", *, base: int = 0, timeout_s: float = _DEFAULT_S) -> msg.Statfs:
        return msg.statfs(self._link.call(methods.STATFS, m.StatfsRequest(base=base, path=path), seconds(timeout_s)))

    def cluster_map(self, *, timeout_s: float = _DEFAULT_S) -> msg.ClusterMap:
        return msg.cluster_map(self._link.call(methods.CLUSTER_MAP, m.ClusterMapRequest(), seconds(timeout_s)))

    def events(self, after: int = 0, *, limit: int = 100, timeout_s: float = _DEFAULT_S) -> Events:
        return msg.events(
            self._link.call(methods.EVENTS, m.EventsRequest(after=after, limit=limit), seconds(timeout_s))
        )

    def _call_once(self, method: Method[Q, A], request: Q, safe: bool, timeout_s: float) -> tuple[A, bool]:
        turn = Again(safe, timeout_s)
        while True:
            try:
                return self._link.call(method, request, turn.left_s), turn.again
            except KvError as error:
                time.sleep(turn.pause(error))


def more_batches_s(count: int) -> float:
    """Time for the messages that a batch of so many takes beyond the first."""
    return METADATA_TIMEOUT_S * ((count - 1) // MAX_BATCH) if count else 0.0


def _batches(items: Sequence[T], weight_of: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Portions of at most `MAX_BATCH` items and about `MAX_BATCH_BYTES` of text, so that each fits into a message."""
    start = weight = 0
    for i, item in enumerate(items):
        weight += weight_of(item)
        if i > start and (i - start >= MAX_BATCH or weight > MAX_BATCH_BYTES):
            yield items[start:i]
            start, weight = i, weight_of(item)
    if start < len(items):
        yield items[start:]


def _text_bytes(publication: msg.Publication) -> int:
    return sum(len(name.path) for name in publication.names)


def _mkdir_method(parents: bool) -> Method[m.MkdirRequest, m.MkdirReply]:
    return methods.MKDIR._replace(idempotent=parents)


def _may_be_done(error: KvError | None) -> bool:
    return isinstance(error, NotFound | Stale)


def _is(row: Entry | KvError, inode: int) -> bool:
    return isinstance(row, Entry) and row.inode == inode
