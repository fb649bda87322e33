"""The master without its transport: every verb that `service` offers, on plain values.

Concurrency contract. Everything here runs on one loop. A mutation reads, decides and writes with no await between
(`_mutate`); then it waits until that is durable, whatever the outcome was: an error, too, tells what somebody else
wrote (rules 18, 19). Plain reads wait for nothing. A full report takes several steps, each a mutation of its own; its
node's lock keeps its reports in order.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, TypeVar

from kvstore.core import paths
from kvstore.core.errors import KvError, NotDirectory, Unavailable
from kvstore.core.limits import MAX_BATCH
from kvstore.core.types import Entry
from kvstore.master.namespace import blocks, lookup, recount
from kvstore.master.namespace.mkdir import mkdir
from kvstore.master.namespace.policies import Wanted
from kvstore.master.namespace.publish import Published, Transaction, publish
from kvstore.master.namespace.quotas import Quotas
from kvstore.master.namespace.remove import Kind, remove
from kvstore.master.namespace.rename import Move, rename
from kvstore.master.namespace.setattr import set_attributes
from kvstore.master.namespace.setpolicy import Holding, Told, every, holding, set_policy
from kvstore.master.recovery.claims import Claim
from kvstore.master.recovery.opening import new_cluster_id, open_database
from kvstore.master.recovery.rebuild import Rebuild, Step, distrust, refused
from kvstore.master.recovery.rebuild import Wanted as Rebuilding
from kvstore.master.rows import check_batch, each
from kvstore.master.settings import Settings as Settings
from kvstore.master.space import Space
from kvstore.master.storage import journal
from kvstore.master.storage.change import Change
from kvstore.master.storage.commit import ALWAYS, GROWS, SHRINKS, Committer
from kvstore.master.storage.db import Cf, Db
from kvstore.master.storage.records import (
    COUNTERS,
    META_CLUSTER,
    META_COUNTERS,
    ClusterRow,
    Counters,
    dump,
)
from kvstore.master.workers import reports
from kvstore.master.workers.names import Names, names_of
from kvstore.master.workers.nodes import Node, Nodes
from kvstore.master.workers.orders import Answer, Orders
from kvstore.master.workers.reports import Report
from kvstore.master.workers.told import Beat, Registration, check_beat, check_volumes
from kvstore.master.workers.upkeep import Upkeep
from kvstore.runtime import Runtime

log = logging.getLogger(__name__)
T = TypeVar("T")

LIST_PAGE: Final = 1024
"""Names a page: a page of the longest names fits into a message four times over, and takes the loop for about 5 ms."""


class Master:
    """`rebuild`: while names are taken back from workers, else None; `notice`: what came of it, or what is
    damaged, for people."""

    def __init__(
        self, db: Db, committer: Committer, runtime: Runtime, settings: Settings, wanted: Rebuilding | None = None
    ) -> None:
        self.db, self.committer, self.settings = db, committer, settings
        self._runtime = runtime
        self.cluster_id, self.incarnations, wanted = open_database(db, self._change(), runtime, wanted)
        committer.start_at(self.counters().sequence)
        self.nodes = Nodes(db, self.incarnations, settings.dead_ticks, settings.max_block_bytes)
        now_s = runtime.monotonic_s()
        self.rebuild = Rebuild(wanted, self.nodes, committer.durable_sequence, now_s) if wanted else None
        self._notice, self._is_rebuilt = "", False
        self.quotas = Quotas(db, settings.tick_s)
        self._upkeep = Upkeep(self.nodes, settings.tick_s, settings.forget_after_s)
        self._report_locks: dict[str, asyncio.Lock] = {}
        self.lookups = lookup.Lookups()

    # ---- names

    def lookup(self, base: int, wanted: Sequence[str], node: str = "") -> list[lookup.Row]:
        """`node`: the caller's, whose replicas count even when it is not live."""
        check_batch(len(wanted))
        if self.rebuild is not None and self.rebuild.refuses_reads:
            # Not NotFound: a directory that is gone would be gone for good (rule 27).
            return [self.rebuild.refuse()] * len(wanted)
        rows = lookup.lookup(self.db, self.nodes.seen_by(node), base, wanted)
        self.lookups.count(rows)
        return rows

    async def publish(self, base: int, transactions: Sequence[Transaction]) -> list[list[Published] | KvError]:
        check_batch(sum(len(t.names) for t in transactions))
        check_batch(len(transactions))
        return await self._mutate_for_client(lambda change: publish(change, self.nodes.cluster, base, transactions))

    async def mkdir(
        self, base: int, wanted: Sequence[str], parents: bool, mode: int, uid: int, gid: int
    ) -> list[Entry | KvError]:
        check_batch(len(wanted))

        def one(change: Change, path: str) -> Entry:
            return mkdir(change, self.nodes.cluster.live, base, path, parents=parents, mode=mode, uid=uid, gid=gid)

        return await self._mutate_for_client(lambda change: each(change, wanted, one))

    async def remove(self, base: int, names: Sequence[tuple[str, Kind, int]]) -> list[KvError | None]:
        """`names`: (path, kind, inode that is meant or 0)."""
        check_batch(len(names))

        def one(change: Change, name: tuple[str, Kind, int]) -> None:
            remove(change, self.nodes.cluster.live, base, *name)

        return await self._mutate_for_client(lambda change: each(change, names, one), SHRINKS)

    async def rename(self, moves: Sequence[Move]) -> list[KvError | None]:
        check_batch(len(moves))

        def one(change: Change, move: Move) -> None:
            rename(change, self.nodes.cluster.live, move)

        return await self._mutate_for_client(lambda change: each(change, moves, one))

    async def set_attributes(
        self, base: int, path: str, mode: int | None, uid: int | None, gid: int | None, mtime_ns: int | None
    ) -> Entry:
        return await self._mutate_for_client(
            lambda change: set_attributes(
                change, self.nodes.cluster.live, base, path, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns
            )
        )

    async def list(
        self, base: int, path: str, after: str, limit: int, names_only: bool
    ) -> AsyncIterator[tuple[list[str], list[Entry]]]:
        """Pages in the order of the names' bytes, behind `after`; `limit` 0 = all. Others get the loop between
        pages."""
        entry = self.stat(base, path)
        if not entry.is_dir:
            raise NotDirectory(f"{path!r} is a file, not a directory")
        at: str | None = paths.check_name(after) if after else ""
        left = limit or None
        while at is not None:
            page = LIST_PAGE if left is None else min(left, LIST_PAGE)
            live = self.nodes.cluster.live
            names, entries, at = lookup.list_page(self.db, live, entry.inode, at, page, names_only)
            if names:
                yield names, entries
            if left is not None:
                left -= len(names)
                if left <= 0:
                    return
            await asyncio.sleep(0)

    def stat(self, base: int, path: str) -> Entry:
        self._check_readable()
        return lookup.stat(self.db, self.nodes.cluster.live, base, path)

    def statfs(self, base: int, path: str) -> Space:
        """What the live volumes have, or less: what a quota above the path leaves of it. Raises NotFound, Stale."""
        self._check_readable()
        found = holding(self.db, self.nodes.cluster.live, base, path)
        counters = self.counters()
        space = Space(*self.nodes.space(), counters.files, counters.directories - 1)
        for told in found.policies:
            space = space.within(told.row, self.quotas.hidden.get(told.id, 0))
        return space

    # ---- policies

    async def set_policy(self, base: int, path: str, wanted: Wanted) -> Holding:
        """Quota, TTL, pin of a path; what holds for it then. Raises NotFound, NotDirectory, Stale, InvalidRequest."""
        live = self.nodes.cluster.live
        try:
            return await self._mutate_for_client(lambda change: set_policy(change, live, base, path, wanted))
        finally:
            self._look_at_policies()

    def policies(self, base: int, path: str) -> Holding:
        """What holds for a path. Raises NotFound, NotDirectory, Stale."""
        self._check_readable()
        return holding(self.db, self.nodes.cluster.live, base, path)

    def all_policies(self) -> Sequence[Told]:
        return every(self.db)

    def recount(self) -> bool:
        """A bounded step: blocks whose directory's policy came or went count for the right one. False when there is
        nothing to do."""
        self.committer.admit(SHRINKS)
        change = self._change()
        busy = recount.step(change)
        self._write(change)
        return busy

    def _look_at_policies(self) -> None:
        cluster = self.nodes.cluster
        held = {node.id: node.policies for node in self.nodes if self.nodes.live(node)}
        self.quotas.tick(held, is_whole=cluster.homes.keys() <= cluster.live.keys())
        self.nodes.hide(self.quotas.hidden)

    # ---- the rest of reading

    def counters(self) -> Counters:
        stored = self.db.get(Cf.META, META_COUNTERS)
        return COUNTERS.load(stored) if stored is not None else Counters()

    async def events(self, after: int, limit: int) -> tuple[Sequence[journal.Event], int]:
        """(events, oldest sequence kept); nobody hears of what is not durable (rule 19)."""
        found = journal.read(self.db, after, min(limit, MAX_BATCH) or MAX_BATCH)
        await self.committer.durable()
        return found

    # ---- workers

    async def register(self, new: Registration) -> Node:
        check_volumes(new.volumes)
        return await self._mutate(lambda change: self._register(change, new), ALWAYS)

    async def heartbeat(self, beat: Beat) -> Orders:
        check_beat(beat)
        now_s = self._runtime.monotonic_s()
        node = await self._mutate(lambda change: self.nodes.heartbeat(change, beat, now_s), ALWAYS)
        if node is None or node.has_to_register:
            return Orders(register=True)
        table = self.quotas.table
        return (await self._orders(node))._replace(
            report_again=list(itertools.islice(node.relabelled, MAX_BATCH)),
            send_names=self.rebuild is not None and self.rebuild.wants(node, now_s),
            over=self.quotas.over(node.id),
            policies=table if table.version != beat.policies_version else None,
        )

    async def report(self, report: Report) -> Answer:
        """Raises InvalidRequest for a malformed one. What is not from the registered start, or out of order, is not
        taken."""
        reports.check(report)
        async with self._report_locks.setdefault(report.node, asyncio.Lock()):
            node = self.nodes.registered(report.node, report.boot)
            if node is None:
                self._report_locks.pop(report.node, None)
                return Answer(0, gap=True, orders=Orders(register=True))
            again = report.number == node.row.next_report - 1 and report.digest == node.row.last_report
            if not again and report.number != node.row.next_report:
                return Answer(node.row.next_report, gap=True, orders=Orders(full_report=True))
            if not again:
                await self._take(node, report)
            return await self._answer(node, report)

    async def recover(self, node: str, boot: int, page: Sequence[Claim], is_last: bool) -> bool:
        """What is noted beside the blocks of a worker. Whether (more of) it is wanted. Raises Stale, InvalidRequest."""
        rebuild, known = self.rebuild, self.nodes.registered(node, boot)
        if rebuild is None or known is None or not rebuild.takes(known):
            return False
        now_s = self._runtime.monotonic_s()
        await self._mutate(lambda change: rebuild.take(change, known, page, now_s), SHRINKS)
        if is_last:
            rebuild.told_all(known)
        return True

    def rebuild_step(self) -> bool:
        """A bounded step of the rebuild; False when there is nothing to do (for a moment, or ever again)."""
        rebuild = self.rebuild
        if rebuild is None:
            return False
        self.committer.admit(SHRINKS)
        change = self._change()
        busy = rebuild.go_on(change, self._runtime.monotonic_s())
        if rebuild.step is Step.DONE:
            self._adopt(change, self.cluster_id or new_cluster_id(self._runtime))
            self._notice, self._is_rebuilt, self.rebuild = rebuild.notice, rebuild.is_exhaustive, None
        self._write(change)
        return busy

    @property
    def notice(self) -> str:
        """What an operator ought to know; "" when all is well."""
        if self.committer.damage is not None:
            return self.committer.damage
        if self.rebuild is not None:
            return self.rebuild.notice
        uncollected = distrust(self.nodes.distrusted, is_rebuilt=self._is_rebuilt)
        notices = (self._notice, self.committer.shortage, refused(self.nodes.strangers), uncollected)
        return "; ".join(filter(None, notices))

    def tick(self) -> None:
        """Once a tick: liveness, and a bounded step of upkeep. Nobody waits for it to be durable."""
        self.nodes.tick()
        self.committer.admit(SHRINKS)
        change = self._change()
        self._upkeep.step(change)
        self._write(change)
        self._look_at_policies()

    # ---- the rest

    async def _take(self, node: Node, report: Report) -> None:
        full = report.full
        if full is not None and full.volume in node.row.volumes:
            at = b""
            while True:
                at = await self._mutate(
                    functools.partial(reports.merge_step, report=report, full=full, start=at), SHRINKS
                )
                if not at:
                    break

        # What a database that lost something does not know may have been published.
        told = report if self._collects(node) else report._replace(dead=())

        def finish(change: Change) -> None:
            # With the fences from before this report: its dead ids lie below its own.
            reports.apply(change, self.nodes.cluster, told, node.row.volumes)
            self.nodes.take_report(change, node, report.number, report.digest, report.fences)

        await self._mutate(finish, SHRINKS)

    async def _answer(self, node: Node, report: Report) -> Answer:
        collects, cluster = self._collects(node), self.nodes.cluster
        held_ids, full_ids = [block for block, _ in report.held], report.full.ids if report.full else ()
        held = reports.judge(self.db, cluster, held_ids, collects, set(report.dead))
        full = reports.judge(self.db, cluster, full_ids, collects)
        names = names_of(self.db, report.named) if self.rebuild is None else Names()
        for block in (*held_ids, *full_ids, *report.nowhere):
            node.relabelled.pop(block, None)
        next_report = node.row.next_report
        orders = await self._orders(node)
        await self.committer.durable()
        return Answer(next_report, False, held, full, orders, names)

    async def _orders(self, node: Node) -> Orders:
        if not self._collects(node):
            return Orders()
        ids = blocks.unlink_orders(self.db, node.row.volumes, MAX_BATCH)
        if ids:
            await self.committer.durable()
        return Orders(unlink=ids)

    def _collects(self, node: Node) -> bool:
        """Whether anything of this worker's may be unlinked by our word (rule 16)."""
        return node.row.collects and self.rebuild is None

    def _register(self, change: Change, new: Registration) -> Node:
        sequence, cluster = change.counters.sequence, self.cluster_id
        if self.rebuild is not None:
            sequence, cluster = self.rebuild.base_sequence, cluster or new.cluster
            self.rebuild.prepare(change, new)
        node = self.nodes.register(change, new, cluster, sequence, is_mended=self.rebuild is not None)
        if cluster != self.cluster_id:
            log.info("the cluster is %s again, as worker %s says", cluster, new.node)
            self._adopt(change, cluster)
        if self.rebuild is not None:
            self.rebuild.registered(new, self._runtime.monotonic_s())
        return node

    def _adopt(self, change: Change, cluster: str) -> None:
        self.cluster_id = cluster
        change.put(Cf.META, META_CLUSTER, dump(ClusterRow(cluster)))

    def refusal(self) -> Unavailable | None:
        """Why changes of clients are refused, while names are being taken back."""
        return self.rebuild.refuse() if self.rebuild is not None else None

    def _check_readable(self) -> None:
        """Raises Unavailable while most names are missing."""
        if self.rebuild is not None and self.rebuild.refuses_reads:
            raise self.rebuild.refuse()

    async def _mutate_for_client(self, decide: Callable[[Change], T], share: float = GROWS) -> T:
        refused = self.refusal()
        if refused is not None:
            raise refused
        return await self._mutate(decide, share)

    def _change(self) -> Change:
        return Change.begin(self.db, self._runtime.wall_ns(), self.settings.journal)

    async def _mutate(self, decide: Callable[[Change], T], share: float = GROWS) -> T:
        """One step: read, decide, write. Then wait until all that it may have seen is durable, after an error as
        well."""
        self.committer.admit(share)
        try:
            change = self._change()
            result = decide(change)
            self._write(change)
            return result
        finally:
            await self.committer.durable()

    def _write(self, change: Change) -> None:
        self.committer.write(change)
        self.nodes.relabel(change.relabelled)
        self.quotas.grew(change.grown)
        self.quotas.refused(change.refused)
