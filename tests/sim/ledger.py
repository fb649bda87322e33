"""The master's history, read from its log as it is written: what must hold of it after every batch."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvstore.core.types import BlockId
from kvstore.master.storage.db import Cf
from kvstore.master.storage.records import (
    BLOCK,
    JOURNAL,
    META_REBUILD,
    NAME,
    BlockRow,
    JournalRow,
    NameRow,
    name_key,
    unpack_u64,
)
from kvstore.pb import master_pb2 as m
from tests.sim.db import Batch, Log
from tests.sim.faults import Violation

Facts = tuple[int, bytes, int, int]


class Ledger:
    """`published`: inode → number of the batch that published it, and whether a live file was there before."""

    may_order: Callable[[str, int], bool]
    """Whether this host may be ordered to unlink anything by the start of the master with this incarnation."""

    def __init__(self, log: Log, is_live: Callable[[int], bool]) -> None:
        self._log, self._is_live = log, is_live
        self._lost_s = -math.inf
        self.may_order = lambda host, incarnation: True
        log.listen, log.forget = self._listen, self.clear
        self.clear()

    def clear(self) -> None:
        self.published: dict[int, tuple[int, bool]] = {}
        self.renamed: dict[int, int] = {}
        self.names: dict[bytes, NameRow] = {}
        self._replayed: dict[bytes, NameRow] = {}
        self._blocks: dict[bytes, BlockRow] = {}
        self._owners: dict[bytes, int] = {}
        self._batches = 0
        self._rebuilding = False

    def lose(self, now_s: float) -> None:
        """Acknowledgements of what began before now may be of a history that the log lacks."""
        self._lost_s = now_s

    # ---- what was acknowledged is durable (rule 19)

    def check_published(self, inode: int, what: str, name: str, began_s: float) -> None:
        if began_s <= self._lost_s:
            return
        batch, _ = self.published.get(inode, (1 << 62, False))
        if batch >= self._log.synced:
            raise Violation(f"{name}: {what} was acknowledged, and is not durable (inode {inode})", [name])

    def check_fresh(self, inode: int, name: str) -> None:
        """A put-if-absent that says "created" found nothing there."""
        if self.published.get(inode, (0, False))[1]:
            raise Violation(f"{name}: put-if-absent created inode {inode} over a live file", [name])

    def durable_files(self) -> dict[str, NameRow]:
        """Path → row of every file in the durable state."""
        rows = {k: NAME.load(v) for k, v in self._log.durable.scan(Cf.NAMES, b"", None, 1 << 30)}
        paths = {1: ""}
        directories = {key: row for key, row in rows.items() if row.is_dir and len(key) > 8}
        while directories:  # parents before children
            known = {key: row for key, row in directories.items() if unpack_u64(key) in paths}
            if not known:
                raise Violation(f"directories without a parent: {sorted(key[8:].decode() for key in directories)}")
            for key, row in known.items():
                paths[row.inode] = f"{paths[unpack_u64(key)]}{key[8:].decode()}/"
                del directories[key]
        files = ((key, row) for key, row in rows.items() if not row.is_dir)
        return {f"{paths[unpack_u64(key)]}{key[8:].decode()}": row for key, row in files}

    def files(self) -> list[tuple[int, str, NameRow]]:
        """(parent, name, row) of every file."""
        return [(unpack_u64(k), k[8:].decode(), row) for k, row in self.names.items() if not row.is_dir]

    def holders(self, block: bytes) -> list[int]:
        row = self._blocks.get(block)
        return [] if row is None else list(row.volumes)

    def replicas(self) -> set[tuple[int, bytes]]:
        """(volume, block) as the master believes, of owned and of dead blocks."""
        return {(volume, block) for block, row in self._blocks.items() for volume in row.volumes}

    def is_owned(self, block: bytes) -> bool:
        row = self._blocks.get(block)
        return row is not None and not row.dead

    # ---- orders

    def check_reply(self, path: str, host: str, reply: bytes) -> None:
        """No unlink order for a block that the durable state owns, and none to whom nothing may be ordered."""
        kind = path.rpartition("/")[2]
        if kind not in ("Report", "Heartbeat"):
            return
        message = m.ReportReply.FromString(reply) if kind == "Report" else m.HeartbeatReply.FromString(reply)
        for command in message.commands:
            packed = command.unlink.block_ids
            if packed and not self.may_order(host, message.incarnation):
                raise Violation(f"a master that lost state orders {host} to unlink blocks (rule 16)", [host])
            for at in range(0, len(packed), 16):
                self._check_order(packed[at : at + 16])

    def _check_order(self, block: bytes) -> None:
        stored = self._log.durable.get(Cf.BLOCKS, block)
        if stored is not None and not BLOCK.load(stored).dead:
            text = str(BlockId.unpack(block))
            raise Violation(f"an order to unlink block {text}, which the durable state owns", [text])

    # ---- each batch

    def _listen(self, batch: Batch) -> None:
        touched = [op.key for op in batch if op.cf is Cf.NAMES]
        events = sorted((op.key, op.value) for op in batch if op.cf is Cf.JOURNAL and op.value is not None)
        rows = [JOURNAL.load(value) for _, value in events]
        for row in rows:
            self._replay(row)
        for op in batch:
            if op.cf is Cf.BLOCKS:
                self._take_block(op.key, op.value)
            elif op.key == META_REBUILD and op.cf is Cf.META:
                self._rebuilding = op.value is not None
            elif op.cf is Cf.NAMES and op.value is None:
                self.names.pop(op.key, None)
            elif op.cf is Cf.NAMES and op.value is not None:
                self.names[op.key] = NAME.load(op.value)
        for key in touched:
            self._check_replay(key)
        self._batches += 1

    def _replay(self, row: JournalRow) -> None:
        key = name_key(row.parent, row.name)
        match row.kind:
            case "publish":
                before = self.names.get(key)
                self.published[row.inode] = (self._batches, before is not None and self._is_there(before))
            case "remove" | "evict" | "rename":
                self._replayed.pop(key, None)
        if row.kind == "rename" and row.entry is not None:
            self.renamed[row.inode] = self._batches
            self._replayed[name_key(row.to_parent, row.to_name)] = row.entry
        elif row.kind in ("publish", "mkdir", "setattr") and row.entry is not None:
            self._replayed[key] = row.entry

    def _is_there(self, row: NameRow) -> bool:
        return not row.block or any(self._is_live(volume) for volume in self.holders(row.block))

    def _take_block(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self._blocks.pop(key, None)
            if self._rebuilding:  # taken from its name until another is found, or until another replica turns up
                self._owners.pop(key, None)
            return
        row = self._blocks[key] = BLOCK.load(value)
        if self._rebuilding and self._owners.get(key):
            self._owners[key] = row.inode  # both in one step
        owner = self._owners.setdefault(key, row.inode)
        if row.dead:
            self._owners[key] = 0
        elif owner != row.inode:
            raise Violation(f"block {BlockId.unpack(key)} is owned a second time: by {owner}, then {row.inode}")

    def _check_replay(self, key: bytes) -> None:
        if len(key) == 8:
            return  # the root is in no journal
        there, replayed = self.names.get(key), self._replayed.get(key)
        if facts(there) != facts(replayed):
            name = key[8:].decode()
            raise Violation(f"{name}: the journal says {facts(replayed)}, the names say {facts(there)}", [name])


def facts(row: NameRow | None) -> Facts | None:
    return None if row is None else (row.inode, row.block, row.length_bytes, row.hash)
