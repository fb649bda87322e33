"""One contract, every database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.core.errors import Corrupt, Denied, KvError, Unavailable
from kvstore.master.storage.db import Cf, Db, MemoryDb, Op, RocksDb
from tests.support import damage

N = Cf.NAMES


@pytest.fixture(params=["memory", "rocks"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Db]:
    made: Db = MemoryDb() if request.param == "memory" else RocksDb(tmp_path / "db")
    yield made
    made.close()


def fill(db: Db, count: int = 100) -> None:
    db.write([Op(N, b"%03d" % i, b"v%d" % i) for i in range(count)])


def test_get_what_was_put(db: Db) -> None:
    db.write([Op(N, b"k", b"v"), Op(N, b"empty", b"")])
    assert (db.get(N, b"k"), db.get(N, b"empty"), db.get(N, b"other")) == (b"v", b"", None)


def test_columns_are_apart(db: Db) -> None:
    db.write([Op(cf, b"k", cf.value.encode()) for cf in Cf])
    assert [db.get(cf, b"k") for cf in Cf] == [cf.value.encode() for cf in Cf]


def test_the_last_op_of_a_batch_wins(db: Db) -> None:
    db.write([Op(N, b"a", b"1"), Op(N, b"a", None), Op(N, b"b", None), Op(N, b"b", b"2")])
    assert (db.get(N, b"a"), db.get(N, b"b")) == (None, b"2")


def test_deleting_what_is_not_there_is_fine(db: Db) -> None:
    db.write([Op(N, b"a", None)])
    assert db.scan(N, b"", None, 10) == []


def test_get_many_keeps_the_order_and_repeats(db: Db) -> None:
    fill(db)
    assert list(db.get_many(N, [b"005", b"x", b"001", b"005"])) == [b"v5", None, b"v1", b"v5"]
    assert list(db.get_many(N, [])) == []


@pytest.mark.parametrize(
    ("start", "end", "limit", "expected"),
    [
        (b"", None, 3, [0, 1, 2]),
        (b"010", b"013", 100, [10, 11, 12]),
        (b"010\0", b"013", 100, [11, 12]),
        (b"098", None, 100, [98, 99]),
        (b"050", b"050", 100, []),
        (b"060", b"050", 100, []),
        (b"010", b"020", 0, []),
        (b"999", None, 100, []),
    ],
)
def test_scan(db: Db, start: bytes, end: bytes | None, limit: int, expected: list[int]) -> None:
    fill(db)
    assert db.scan(N, start, end, limit) == [(b"%03d" % i, b"v%d" % i) for i in expected]


def test_flush_of_nothing(db: Db) -> None:
    db.flush()


def test_what_was_written_is_there_after_opening_again(tmp_path: Path) -> None:
    first = RocksDb(tmp_path)
    fill(first)
    first.flush()
    first.close()
    second = RocksDb(tmp_path)
    assert len(second.scan(N, b"", None, 1000)) == 100
    second.close()


def test_a_second_opener_is_told_in_one_line(tmp_path: Path) -> None:
    first = RocksDb(tmp_path)
    with pytest.raises(Unavailable, match="in use: does another master run there") as caught:
        RocksDb(tmp_path)
    assert "\n" not in caught.value.message
    first.close()


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Denied, match="cannot use the data directory"):
        RocksDb(tmp_path / "file")


def test_a_scan_over_a_damaged_table_is_an_error_not_an_end(tmp_path: Path) -> None:
    db = RocksDb(tmp_path)
    db.write([Op(N, b"%06d" % i, bytes([i % 251]) * 97 + b"%d" % i) for i in range(20_000)])
    db.close()
    RocksDb(tmp_path).close()  # recovery moves the log into a table
    table = max(tmp_path.glob("*.sst"), key=lambda p: p.stat().st_size)
    damage.flip(table, table.stat().st_size // 2)
    db = RocksDb(tmp_path)
    with pytest.raises(Corrupt, match=f"failed.*{table.name}"):
        db.scan(N, b"", None, 100_000)
    db.close()


def test_verifying_reads_each_row_once(tmp_path: Path) -> None:
    db = RocksDb(tmp_path)
    fill(db)
    keys, last = [], db.verify(N, None, 7)
    while last is not None:
        keys.append(last)
        last = db.verify(N, last, 7)
    assert keys == [b"%03d" % i for i in range(6, 100, 7)]
    assert db.verify(Cf.INODES, None, 7) is None
    db.close()


def test_verifying_sees_a_damaged_block_that_is_cached(tmp_path: Path) -> None:
    db = RocksDb(tmp_path)
    db.write([Op(N, b"%06d" % i, bytes([i % 251]) * 97 + b"%d" % i) for i in range(20_000)])
    db.close()
    db = RocksDb(tmp_path)
    table = max(tmp_path.glob("*.sst"), key=lambda p: p.stat().st_size)
    assert len(db.scan(N, b"", None, 100_000)) == 20_000
    damage.flip(table, table.stat().st_size // 2)
    assert len(db.scan(N, b"", None, 100_000)) == 20_000, "from the cache"
    db.forget_cached()
    with pytest.raises(Corrupt, match=table.name):
        db.verify(N, None, 100_000)
    db.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda db: db.get(N, b"k"),
        lambda db: db.get_many(N, [b"k"]),
        lambda db: db.scan(N, b"", None, 1),
        lambda db: db.write([Op(N, b"k", b"v")]),
        lambda db: db.flush(),
        lambda db: db.verify(N, None, 1),
    ],
)
def test_foreign_exceptions_end_at_the_edge(tmp_path: Path, use: Callable[[RocksDb], object]) -> None:
    db = RocksDb(tmp_path)
    for handle in (db._db, *db._columns.values()):
        handle.close()
    with pytest.raises(KvError, match="the database in"):
        use(db)
