"""The master's database: a few verbs, RocksDB and memory behind them. The only importer of `rocksdict`.

Key table. Integers in keys are big-endian u64, so that keys sort as numbers do; a block id is boot, counter (16 bytes).
Values are `records`, which start with a version byte.

    column    key                          value
    meta      "format"                     version of this table
              "cluster"                    ClusterRow: cluster id
              "counters"                   Counters: entries, next inode, sequence, journal's bounds
              "pulse"                      written every second, to see a lost drive without traffic
              "rebuild"                    RebuildRow: names are being taken back from workers, or forgotten
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
    claims    see `claims`                 while names are taken back from workers, else empty
    journal   sequence                     JournalRow: one change; bounded, recovery never needs it
"""

from __future__ import annotations

import bisect
import enum
import errno
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import rocksdict
from rocksdict import DBRecoveryMode, Rdict, WriteBatch

from kvstore.core.errors import Corrupt, Denied, KvError, NoSpace, Unavailable
from kvstore.core.limits import KIB, MIB
from kvstore.master.storage import wal
from kvstore.master.storage.mark import Mark

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
    CLAIMS = "claims"
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
"""Write-ahead log that a restart has to check (`wal`) and to replay: each about a second."""
BLOCK_BYTES: Final = 8 * KIB
BLOOM_BITS: Final = 10
"""Every publish asks for a name and an id that are not there: 1 % of them touch a block of the table."""

MARK_EVERY_S: Final = 0.1
"""A mark takes as long as half a flush, since the journal of the file system has more to sync."""


class RocksDb:
    """RocksDB in one directory, made when it is missing.

    Raises Unavailable when another process holds it, Denied without the right to, NoSpace when its drive is full,
    Corrupt when it is damaged, in one line that names the file: a torn end of the log is tolerated, a hole in the
    middle is not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cache = rocksdict.Cache(BLOCK_CACHE_BYTES)
        # So that the logs end with a whole write when a flush looks how long they are.
        self._writing = threading.Lock()
        self._marked_s = float("-inf")
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._mark = Mark(path)
        except OSError as error:
            raise _denied(path, error) from None
        try:
            self._db = self._open()
        except BaseException:
            self._mark.close()
            raise
        self._columns = {cf: self._db.get_column_family(cf.value) for cf in Cf}
        self._handles = {cf: self._db.get_column_family_handle(cf.value) for cf in Cf}

    def _open(self) -> Rdict:
        columns = {cf.value: _column_options(self._cache) for cf in Cf}
        try:
            wal.check(self.path, self._mark.read())
            return Rdict(str(self.path), _database_options(self._cache), columns)
        except KvError:
            raise
        except OSError as error:
            raise _denied(self.path, error) from None
        except Exception as error:  # noqa: BLE001 - rocksdict raises bare Exceptions
            raise _refused(self.path, error) from None

    @property
    def is_cut(self) -> bool:
        """Whether the end of the log was cut though it may have been acknowledged, and nobody has done anything about
        it yet."""
        return (self.path / wal.CUT).exists()

    def forget_cut(self) -> None:
        """It has been written down in the database that names are to be asked for. Raises Unavailable."""
        try:
            (self.path / wal.CUT).unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(error) from None

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
            with self._writing:
                self._db.write(batch)
        except Exception as error:  # noqa: BLE001
            raise self._failed(error) from None

    def flush(self) -> None:
        try:
            written = self._written_now()
            # Never write(sync=True): it holds the GIL through the fsync, flush_wal releases it.
            self._db.flush_wal(True)
            if written is not None:
                self._mark.write(written)
        except Exception as error:  # noqa: BLE001
            raise self._failed(error) from None

    def _written_now(self) -> wal.Synced | None:
        """What a flush that begins now will have synced; None when the last mark is young."""
        now_s = time.monotonic()
        if now_s - self._marked_s < MARK_EVERY_S:
            return None
        self._marked_s = now_s
        with self._writing:
            return wal.Synced(self._db.latest_sequence_number(), wal.sizes(self.path), wal.newest_manifest(self.path))

    def forget_cached(self) -> None:
        """What is read from now on comes from the drive, not from our cache or the kernel's."""
        self._cache.set_capacity(0)
        self._cache.set_capacity(BLOCK_CACHE_BYTES)
        for table in self.path.glob("*.sst"):
            try:
                with table.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError:  # merged into another one meanwhile; the scan itself finds what is wrong with the others
                continue

    def verify(self, cf: Cf, after: bytes | None, limit: int) -> bytes | None:
        """Read at most `limit` rows behind the key `after` (None = from the first) with their checksums, without
        keeping them cached; the last key, None at the column's end. Raises Corrupt, Unavailable."""
        options = rocksdict.ReadOptions()
        options.fill_cache(False)  # type: ignore[call-arg] # the stub lacks the argument
        last: bytes | None = None
        try:
            at = self._columns[cf].iter(options)
            at.seek(b"" if after is None else after + b"\0")
            for _ in range(limit - 1):
                if not at.valid():
                    break
                at.next()
            if at.valid():
                last = at.key()
            at.status()
        except Exception as error:  # noqa: BLE001
            raise self._failed(error) from None
        return last

    def close(self) -> None:
        self._columns.clear()
        self._handles.clear()
        try:
            self._db.close()
        except Exception as error:  # noqa: BLE001 - what was acknowledged is in the synced log, closing adds nothing to it
            log.warning("%s", self._failed(error))
        self._mark.close()

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


def _denied(path: Path, error: OSError) -> Denied | NoSpace:
    what = f"{error.filename}: {error.strerror}" if error.filename not in (None, str(path)) else error.strerror
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"cannot use the data directory {path}: {what}; free some space there, and start it again")
    return Denied(
        f"cannot use the data directory {path}: {what}; user {os.geteuid()} must be able to read and write all of it: "
        "change that, or choose another with --data"
    )


def _refused(path: Path, error: Exception) -> KvError:
    text = _line(error)
    if "lock file" in text.lower() or "lock hold" in text.lower():
        return Unavailable(f"the data directory {path} is in use: does another master run there? ({text})")
    if _classify(error) is Corrupt or "no such file" in text.lower():
        where = "" if _TABLE.search(text) else wal.find_damage(path)
        return wal.damaged(path, f"{where}: {text}" if where else text)
    return Unavailable(f"cannot open the database in {path}: {text}")


_TABLE: Final = re.compile(r"\b\d+\.sst\b")
_SUSPECT: Final = re.compile(r" The file \S*MANIFEST-\d+ may be corrupted\.")
"""RocksDB adds it to every complaint about a table."""


def _classify(error: Exception) -> type[KvError]:
    return Corrupt if "corrupt" in str(error).lower() else Unavailable


def _line(error: Exception) -> str:
    return _SUSPECT.sub("", " ".join(str(error).split()))
