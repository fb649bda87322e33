"""One contract, every database."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.core.errors import Corrupt, Denied, KvError, Unavailable
from kvstore.master.db import Cf, Db, MemoryDb, Op, RocksDb

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


def log_file(path: Path) -> Path:
    return max(path.glob("*.log"), key=lambda p: p.stat().st_size)


def killed(tmp_path: Path) -> Path:
    """A database of 2,000 writes as kill -9 leaves it: closing would empty the log."""
    db = RocksDb(tmp_path / "alive")
    for i in range(2000):
        db.write([Op(N, b"%06d" % i, b"x" * 100)])
    db.flush()
    shutil.copytree(tmp_path / "alive", tmp_path / "killed", ignore=shutil.ignore_patterns("LOCK"))
    db.close()
    return tmp_path / "killed"


def test_a_torn_end_of_the_log_is_tolerated(tmp_path: Path) -> None:
    path = killed(tmp_path)
    log = log_file(path)
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 50)
    db = RocksDb(path)
    assert len(db.scan(N, b"", None, 10_000)) == 1999
    db.close()


def test_a_hole_in_the_middle_of_the_log_is_refused(tmp_path: Path) -> None:
    """RocksDB's default mode opens, and the second half of what was acknowledged is gone without a word."""
    path = killed(tmp_path)
    flip(log_file(path), 0.5)
    with pytest.raises(Corrupt, match=r"damaged and was not opened.*restore"):
        RocksDb(path)


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 0xFF
    path.write_bytes(data)


def test_a_scan_over_a_damaged_table_is_an_error_not_an_end(tmp_path: Path) -> None:
    db = RocksDb(tmp_path)
    db.write([Op(N, b"%06d" % i, bytes([i % 251]) * 97 + b"%d" % i) for i in range(20_000)])
    db.close()
    RocksDb(tmp_path).close()  # recovery moves the log into a table
    flip(max(tmp_path.glob("*.sst"), key=lambda p: p.stat().st_size), 0.5)
    db = RocksDb(tmp_path)
    with pytest.raises(Corrupt, match="failed"):
        db.scan(N, b"", None, 100_000)
    db.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda db: db.get(N, b"k"),
        lambda db: db.get_many(N, [b"k"]),
        lambda db: db.scan(N, b"", None, 1),
        lambda db: db.write([Op(N, b"k", b"v")]),
        lambda db: db.flush(),
    ],
)
def test_foreign_exceptions_end_at_the_edge(tmp_path: Path, use: Callable[[RocksDb], object]) -> None:
    db = RocksDb(tmp_path)
    for handle in (db._db, *db._columns.values()):
        handle.close()
    with pytest.raises(KvError, match="the database in"):
        use(db)
