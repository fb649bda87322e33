"""What a start of the master does to its database before anything else."""

from __future__ import annotations

from typing import Final

from kvstore.core.errors import Unsupported
from kvstore.master.namespace import tree
from kvstore.master.recovery import rebuild
from kvstore.master.recovery.rebuild import Kind, Wanted
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, Db
from kvstore.master.storage.records import CLUSTER, FORMAT, META_CLUSTER, META_FORMAT, ClusterRow, dump
from kvstore.master.workers import incarnations
from kvstore.master.workers.incarnations import Incarnations
from kvstore.runtime import Runtime

INODE_GAP: Final = 1 << 20
"""Inode numbers skipped at every start: a power cut may take back numbers that a reader has seen (a reader waits for
no flush), and they must not come again for other content. 2^42 starts until they run out."""


def open_database(
    db: Db, change: Change, runtime: Runtime, wanted: Wanted | None
) -> tuple[str, Incarnations, Wanted | None]:
    """The cluster's id, this start in the row of them, and which rebuild is to be done. Durable when it returns.

    A new database gets an id, and its root; one of another format is refused (Unsupported). An empty one that is to be
    rebuilt waits for the id that its workers have.
    """
    stored = db.get(Cf.META, META_FORMAT)
    if stored not in (None, FORMAT):
        raise Unsupported("the database was written by another version of kvstore: use that one, or an empty directory")
    if stored is None:
        change.put(Cf.META, META_FORMAT, FORMAT)
        change.put(Cf.META, META_CLUSTER, dump(ClusterRow(new_cluster_id(runtime))))
        tree.make_root(change)
    wanted = rebuild.begin(change, wanted, runtime.random_u64())
    if wanted is not None and wanted.kind is not Kind.MEND and rebuild.is_empty(change):
        change.put(Cf.META, META_CLUSTER, dump(ClusterRow("")))
    cluster = CLUSTER.load(change.get(Cf.META, META_CLUSTER) or b"").id
    starts = incarnations.begin(change, runtime.random_u64() or 1)
    change.counters.next_inode += INODE_GAP
    db.write(change.ops())
    db.flush()
    return cluster, starts, wanted


def new_cluster_id(runtime: Runtime) -> str:
    return f"{runtime.random_u64():016x}{runtime.random_u64():016x}"
