"""The master's database: a few verbs, RocksDB and memory behind them. The only importer of `rocksdict`.

Key table. Integers in keys are big-endian u64, so that keys sort as numbers do; a block id is boot, counter (16 bytes).
Values are `records`, which start with a version byte.

    column    key                          value
    meta      "format"                     version of this table
              "cluster"                    ClusterRow: cluster id
              "counters"                   Counters: entries, next inode, sequence, journal's bounds
              "pulse"                      written every second, to see a lost drive without traffic
    names     parent inode, name (UTF-8)   NameRow: inode, attributes, length, address.   The root is (0, "").
    inodes    inode                        InodeRow: parent inode, name, policy of its own
    blocks    block id                     BlockRow: owner's inode (0 = dead), holding volumes, policy it counts for
    replicas  volume id, block id          "" : the same pairs by volume; full reports merge by range
    unlinks   volume id, block id          "" : the pairs of dead blocks, that is the unlink orders of a volume
    graves    block id                     "" : dead blocks that nobody holds; they go when the fence has passed
    volumes   volume id                    VolumeRow: node, tier, how long it has been gone
    nodes     node id                      NodeRow: address, boot, next report, {boot: fence}, volumes in service
    policies  policy id                    PolicyRow: inode, policy above it, quota, TTL, pin, what counts for it
    recounts  inode where it began, inode  name behind which to go on in this directory: its blocks may count for
                                           another policy by now
    journal   sequence                     JournalRow: one change; bounded, recovery never needs it
"""

from __future__ import annotations

import bisect
import enum
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import rocksdict
from rocksdict import DBRecoveryMode, Rdict, WriteBatch

from kvstore.core.errors import Corrupt, Denied, KvError, Unavailable
from kvstore.core.limits import KIB, MIB

log = logging.getLogger(__name__)


class Cf(enum.Enum):
    """Column families; the value is the name on disk."""

    META = "meta"
    NAMES = "names"
    INODES = "inodes"
    BLOCKS = "blocks"
    REPLICAS = "replicas"
    UNLINKS = "unlinks"
    GRAVES = "graves"
    VOLUMES = "volumes"
    NODES = "nodes"
    POLICIES = "policies"
    RECOUNTS = "recounts"
    JOURNAL = "journal"

    # The members are singletons: hashing by identity saves 0.1 µs on each of a publish's twenty dictionary accesses.
    __hash__ = object.__hash__


class Op(NamedTuple):
    """Put (`value` is bytes) or delete (None)."""

    cf: Cf
    key: bytes
    value: bytes | None


Pair = tuple[bytes, bytes]


class Reader(Protocol):
    """What decisions read from: a database, or a `Change` on top of one."""

    def get(self, cf: Cf, key: bytes) -> bytes | None: ...

    def get_many(self, cf: Cf, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """Values in the order of the keys."""

    def scan(self, cf: Cf, start: bytes, end: bytes | None, limit: int) -> list[Pair]:
        """At most `limit` pairs with start <= key < end (None = to the end of the column), in order."""


class Db(Reader, Protocol):
    def write(self, ops: Iterable[Op]) -> None:
        """All of it or nothing, visible at once, durable after `flush`."""

    def flush(self) -> None:
        """Make everything written before durable. Blocks: call it in a thread."""

    def close(self) -> None: ...


class MemoryDb:
    """For tests and simulations: sorted lists, lost with the object. `flushes` counts."""

    def __init__(self) -> None:
        self._rows: dict[Cf, dict[bytes, bytes]] = {cf: {} for cf in Cf}
        self._keys: dict[Cf, list[bytes]] = {cf: [] for cf in Cf}
        self.flushes = 0

    def get(self, cf: Cf, key: bytes) -> bytes | None:
        return self._rows[cf].get(key)

    def get_many(self, cf: Cf, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        rows = self._rows[cf]
        return [rows.get(key) for key in keys]

    def scan(self, cf: Cf, start: bytes, end: bytes | None, limit: int) -> list[Pair]:
        keys, rows = self._keys[cf], self._rows[cf]
        first = bisect.bisect_left(keys, start)
        last = len(keys) if end is None else bisect.bisect_left(keys, end)
        return [(key, rows[key]) for key in keys[first : max(first, min(last, first + limit))]]

    def write(self, ops: Iterable[Op]) -> None:
        for cf, key, value in ops:
            rows, keys = self._rows[cf], self._keys[cf]
            if value is not None:
                if key not in rows:
                    bisect.insort(keys, key)
                rows[key] = value
            elif rows.pop(key, None) is not None:
                del keys[bisect.bisect_left(keys, key)]

    def flush(self) -> None:
        self.flushes += 1

    def close(self) -> None:
        pass


BLOCK_CACHE_BYTES: Final = 128 * MIB
"""Index and filter blocks live in it too, so memory does not grow with the number of entries. Random look-ups among
1,000,000 names take 7.7 µs each with 128 MiB, 17 µs with 64."""
WRITE_BUFFERS_BYTES: Final = 64 * MIB
"""Of all columns together."""
MAX_LOG_BYTES: Final = 128 * MIB
"""Write-ahead log that a restart has to replay: under a second."""
BLOCK_BYTES: Final = 8 * KIB
BLOOM_BITS: Final = 10
"""Every publish asks for a name and an id that are not there: 1 % of them touch a block of the table."""


class RocksDb:
    """RocksDB in one directory, made when it is missing.

    Raises Unavailable when another process holds it, Denied without the right to, Corrupt when it is damaged: a torn
    end of the log is tolerated, a hole in the middle is not (the default mode drops acknowledged records in silence).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            cache = rocksdict.Cache(BLOCK_CACHE_BYTES)
            self._db = Rdict(str(path), _database_options(cache), {cf.value: _column_options(cache) for cf in Cf})
        except OSError as error:
            raise Denied(f"cannot use the data directory {path}: {error.strerror}") from None
        except Exception as error:  # noqa: BLE001 - rocksdict raises bare Exceptions
            raise _refused(path, error) from None
        self._columns = {cf: self._db.get_column_family(cf.value) for cf in Cf}
        self._handles = {cf: self._db.get_column_family_handle(cf.value) for cf in Cf}

    def get(self, cf: Cf, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._columns[cf].get(key)
        except Exception as error:  # noqa: BLE001
            raise self._failed(error) from None
        return value

    def get_many(self, cf: Cf, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        try:
            values: Sequence[bytes | None] = self._columns[cf].get(list(keys)) or ()
        except Exception as error:  # noqa: BLE001
            raise self._failed(error) from None
        return values

    def scan(self, cf: Cf, start: bytes, end: bytes | None, limit: int) -> list[Pair]:
        # iter() and status(): items() ends early at a damaged block and says nothing (1,053 of 2,000 rows came back).
        pairs: list[Pair] = []
        try:
            at = self._columns[cf].iter()
            at.seek(start)
            while len(pairs) < limit and at.valid():
                key = at.key()
                if end is not None and key >= end:
                    break
                pairs.append((key, at.value()))
                at.next()
            at.status()
        except Exception as error:  # noqa: BLE001
            raise self._failed(error) from None
        return pairs

    def write(self, ops: Iterable[Op]) -> None:
        batch, handles = WriteBatch(raw_mode=True), self._handles
        for cf, key, value in ops:
            if value is None:
                batch.delete(key, handles[cf])
            else:
                batch.put(key, value, handles[cf])
        try:
            self._db.write(batch)
        except Exception as error:  # noqa: BLE001
            raise self._failed(error) from None

    def flush(self) -> None:
        # Never write(sync=True): it holds the GIL through the fsync, flush_wal releases it.
        try:
            self._db.flush_wal(True)
        except Exception as error:  # noqa: BLE001
            raise self._failed(error) from None

    def close(self) -> None:
        self._columns.clear()
        self._handles.clear()
        try:
            self._db.close()
        except Exception as error:  # noqa: BLE001 - what was acknowledged is in the synced log, closing adds nothing to it
            log.warning("%s", self._failed(error))

    def _failed(self, error: Exception) -> KvError:
        return _classify(error)(f"the database in {self.path} failed: {_line(error)}")


def _database_options(cache: rocksdict.Cache) -> rocksdict.Options:
    options = _column_options(cache)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_db_write_buffer_size(WRITE_BUFFERS_BYTES)
    options.set_max_total_wal_size(MAX_LOG_BYTES)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(3)
    options.set_max_log_file_size(4 * MIB)
    options.set_stats_dump_period_sec(0)
    return options


def _column_options(cache: rocksdict.Cache) -> rocksdict.Options:
    options = rocksdict.Options(raw_mode=True)
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    table.set_block_size(BLOCK_BYTES)
    table.set_bloom_filter(BLOOM_BITS, False)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_size(WRITE_BUFFERS_BYTES // 4)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_level_compaction_dynamic_level_bytes(True)
    return options


def _refused(path: Path, error: Exception) -> KvError:
    text = _line(error)
    if "lock" in text.lower():
        return Unavailable(f"the data directory {path} is in use: does another master run there? ({text})")
    if _classify(error) is Corrupt:
        return Corrupt(
            f"the database in {path} is damaged and was not opened: {text}; restore the directory from a backup, "
            "or move it away to start an empty store"
        )
    return Unavailable(f"cannot open the database in {path}: {text}")


def _classify(error: Exception) -> type[KvError]:
    return Corrupt if "corrupt" in str(error).lower() else Unavailable


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
