"""What a worker's report does to the map of blocks (rules 11, 12, 13, 15). Pure; `master` numbers and commits it."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvstore.core.errors import InvalidRequest
from kvstore.core.limits import MAX_BATCH
from kvstore.core.types import BlockId
from kvstore.master.namespace import blocks
from kvstore.master.namespace.cluster import Cluster
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, Reader
from kvstore.master.storage.records import BLOCK, BlockRow, replica_key
from kvstore.master.workers.told import MAX_FENCES

MERGE_STEP = 1024
"""Replicas that one step of a full report looks at: about 20 ms when all of them and their entries go."""
ID_BYTES = 16


class Verdict(enum.Enum):
    UNKNOWN = 0
    OWNED = 1
    DEAD = 2


class Full(NamedTuple):
    """All blocks of a volume with first <= id <= last."""

    volume: int
    first: bytes
    last: bytes
    ids: Sequence[bytes]


class Report(NamedTuple):
    node: str
    boot: int
    number: int
    digest: int
    """Hash of the whole message."""
    fences: Mapping[int, int]
    held: Sequence[tuple[bytes, int]]
    """(block id, volume)"""
    nowhere: Sequence[bytes]
    dead: Sequence[bytes]
    full: Full | None
    named: Sequence[bytes] = ()
    """Whose names it asks for."""


def check(report: Report) -> None:
    """Raises InvalidRequest for what no worker of ours sends."""
    full = report.full
    for what, count in (
        ("held", len(report.held)), ("nowhere", len(report.nowhere)), ("dead", len(report.dead)),
        ("full", len(full.ids) if full else 0), ("name", len(report.named)),
    ):  # fmt: skip
        if count > MAX_BATCH:
            raise InvalidRequest(f"{count} {what} ids are too many for one report; at most {MAX_BATCH}")
    if len(report.fences) > MAX_FENCES:
        raise InvalidRequest(f"{len(report.fences)} fences are too many; at most {MAX_FENCES}")
    if full and any(not full.first <= block <= full.last for block in full.ids):
        raise InvalidRequest("a full piece holds an id outside of its range")


def apply(change: Change, cluster: Cluster, report: Report, in_service: Iterable[int]) -> None:
    """States into rows. `in_service`: the worker's volumes; what it says of others is ignored."""
    for block in report.dead:
        _bury_unpublished(change, cluster, report.node, block)
    serving = set(in_service)
    held: dict[bytes, list[int]] = {}
    for block, volume in report.held:
        if volume in serving:
            held.setdefault(block, []).append(volume)
    for block, volumes in held.items():
        _set(change, cluster, report.node, block, volumes)
    for block in report.nowhere:
        if block not in held:
            _set(change, cluster, report.node, block, [])
    if report.full and report.full.volume in serving:
        _add_full(change, cluster, report.node, report.full)


def _set(change: Change, cluster: Cluster, node: str, block: bytes, volumes: list[int]) -> None:
    row = blocks.read(change, block)
    if row is not None:  # reports never create blocks (rule 13)
        blocks.set_holders(change, cluster, node, block, row, volumes)


def _add_full(change: Change, cluster: Cluster, node: str, full: Full) -> None:
    stored = change.get_many(Cf.BLOCKS, full.ids) if full.ids else ()
    for block, value in zip(full.ids, stored, strict=True):
        row = None if value is None else BLOCK.load(value)
        if row is not None and full.volume not in row.volumes:
            mine = [v for v in row.volumes if cluster.homes.get(v) == node]
            blocks.set_holders(change, cluster, node, block, row, [*mine, full.volume])


def _bury_unpublished(change: Change, cluster: Cluster, node: str, block: bytes) -> None:
    """Rule 11: its grace is over. One that somebody published by now is left: its verdict says so."""
    if cluster.boots.get(BlockId.unpack(block).boot) == node:
        blocks.bury_new(change, cluster, block, 0)


def merge_step(change: Change, report: Report, full: Full, start: bytes) -> bytes:
    """Drop what the master has in the piece's range besides its ids, MERGE_STEP rows from `start` on; b"" when done,
    else where to go on.

    Not what its worker's own fence says may have been published since the piece was read: the next full report sees
    that.
    """
    keep = set(full.ids)
    first = start or replica_key(full.volume, full.first)
    rows = change.scan(Cf.REPLICAS, first, replica_key(full.volume, full.last) + b"\0", MERGE_STEP)
    for key, _ in rows:
        block = key[8:]
        if block not in keep and not _newer(report.fences, block):
            blocks.drop_holder(change, block, full.volume)
    return rows[-1][0] + b"\0" if len(rows) == MERGE_STEP else b""


def _newer(fences: Mapping[int, int], block: bytes) -> bool:
    boot, counter = BlockId.unpack(block)
    return boot in fences and counter >= fences[boot]


class Judged(NamedTuple):
    """In the order of the ids: the verdict, and the policy that the block counts for (0 = none)."""

    verdicts: Sequence[Verdict] = ()
    policies: Sequence[int] = ()


def judge(
    reader: Reader, cluster: Cluster, ids: Sequence[bytes], collects: bool, given_up: Collection[bytes] = ()
) -> Judged:
    """Without `collects` nothing is called dead (rule 16). `given_up`: those that their worker wants dead."""
    stored = reader.get_many(Cf.BLOCKS, ids) if ids else ()
    rows = [None if value is None else BLOCK.load(value) for value in stored]
    verdicts = [
        Verdict.UNKNOWN if not collects and (row is None or row.dead) else _verdict(cluster, block, row, given_up)
        for block, row in zip(ids, rows, strict=True)
    ]
    return Judged(verdicts, [row.policy if row else 0 for row in rows])


def _verdict(cluster: Cluster, block: bytes, row: BlockRow | None, given_up: Collection[bytes]) -> Verdict:
    if row is not None:
        return Verdict.DEAD if row.dead else Verdict.OWNED
    # Without a row, and with the fence past it: it is as dead as it can be, though it never was in the books.
    is_over = block in given_up and not cluster.publishable(*BlockId.unpack(block))
    return Verdict.DEAD if is_over else Verdict.UNKNOWN


def split_ids(packed: bytes) -> list[bytes]:
    if len(packed) % ID_BYTES:
        raise InvalidRequest(f"{len(packed)} bytes are no list of block ids of {ID_BYTES} bytes")
    return [packed[i : i + ID_BYTES] for i in range(0, len(packed), ID_BYTES)]
