"""RocksDB damaged on the drive (rule 20): a torn end of the log is tolerated, everything else is refused in one line
that names the file and what to do. What opens has everything that was synced."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from kvstore.core.errors import Corrupt, NoSpace, Unavailable
from kvstore.master.storage import db as db_module
from kvstore.master.storage import logformat, mark, wal
from kvstore.master.storage.db import Cf, Op, RocksDb
from tests.support import damage
from tests.support.damage import flip, grow, overwrite, shorten

STEP = 400
"""Writes a log; the files are of some 60 kB, two blocks of the log."""


@pytest.fixture(scope="module")
def three_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 × STEP synced writes in three logs and two tables, as kill -9 leaves them."""
    root = tmp_path_factory.mktemp("three")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(db_module, "MARK_EVERY_S", 0.0)
        db = RocksDb(root / "alive")
        for i in range(3):
            if i:
                damage.new_log(db)
            damage.put(db, i * STEP, STEP)
            db.flush()
        killed = damage.copy(root / "alive", root / "killed")
        db.close()
    assert len(damage.logs(killed)) == 3
    assert len(list(killed.glob("*.sst"))) == 2
    return killed


@pytest.fixture
def killed(three_logs: Path, tmp_path: Path) -> Path:
    return damage.copy(three_logs, tmp_path / "db")


def opened(path: Path) -> tuple[int, int]:
    db = RocksDb(path)
    found = damage.rows(db)
    db.close()
    return found


def refused(path: Path) -> str:
    """The one line; opening again changes nothing about it."""
    lines = []
    for _ in range(2):
        with pytest.raises(Corrupt) as caught:
            RocksDb(path)
        lines.append(caught.value.message)
    assert lines[0].split(":")[0] == lines[1].split(":")[0]
    assert "\n" not in lines[0]
    assert "is damaged and was not opened" in lines[0]
    assert "kvstore master --rebuild" in lines[0]
    return lines[0]


def test_undamaged_it_opens(killed: Path) -> None:
    assert opened(killed) == (3 * STEP, 3 * STEP)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("pattern", ["*.log", "*.sst"])
def test_a_missing_file(killed: Path, pattern: str, which: int) -> None:
    files = sorted(killed.glob(pattern))
    file = files[min(which, len(files) - 1)]
    file.unlink()
    assert file.name in refused(killed)


def test_a_missing_log_without_the_mark(killed: Path) -> None:
    """In the middle: its neighbours' sequences miss it."""
    (killed / mark.NAME).unlink()
    before, missing, after = damage.logs(killed)
    missing.unlink()
    assert f"{before.name} ends before write {2 * STEP + 1}, and {after.name} begins with {4 * STEP + 1}" in refused(
        killed
    )


def test_logs_that_begin_behind_the_manifest(killed: Path) -> None:
    (killed / mark.NAME).unlink()
    for log in damage.logs(killed)[:2]:
        log.unlink()
    shorten(next(killed.glob("MANIFEST-*")), 200)  # the edits of the flushes
    assert "MANIFEST" in refused(killed)


def test_a_lost_end_of_all_logs(killed: Path) -> None:
    """The files that the mark names are whole or needless, and yet not all is there that was synced."""
    held = mark.Mark(killed)
    held.write(held.read()._replace(sequence=6 * STEP + 1))
    held.close()
    assert f"{6 * STEP + 1} were synced" in refused(killed)


def test_nothing_is_cut_off_what_is_refused(killed: Path) -> None:
    held = mark.Mark(killed)
    held.write(held.read()._replace(sequence=6 * STEP + 1))
    held.close()
    log = damage.logs(killed)[-1]
    grow(log, b"\x01" * 50)
    data = log.read_bytes()
    assert "were synced" in refused(killed)
    assert log.read_bytes() == data
    assert not (killed / wal.CUT).exists()


@pytest.mark.parametrize("name", ["CURRENT", "MANIFEST"])
def test_a_missing_manifest(killed: Path, name: str) -> None:
    next(killed.glob(f"{name}*")).unlink()
    assert "CURRENT is missing, or the MANIFEST" in refused(killed)


def test_current_is_missed_although_no_log_is_there(tmp_path: Path) -> None:
    """RocksDB would begin an empty store over the tables."""
    db = RocksDb(tmp_path)
    damage.put(db, 0, 10)
    damage.new_log(db)
    db.close()
    for file in (tmp_path / "CURRENT", *damage.logs(tmp_path)):
        file.unlink()
    assert "CURRENT" in refused(tmp_path)


@pytest.mark.parametrize(
    "change", [lambda file: shorten(file, 1), lambda file: shorten(file, file.stat().st_size // 2)]
)
@pytest.mark.parametrize("pattern", ["*.log", "*.sst", "MANIFEST-*"])
def test_a_file_that_was_cut_short(killed: Path, pattern: str, change: Callable[[Path], None]) -> None:
    for i, original in enumerate(sorted(killed.glob(pattern))):
        copy = damage.copy(killed, killed.with_name(f"copy-{i}"))
        change(copy / original.name)
        assert original.name in refused(copy)


def test_a_manifest_that_was_cut_in_the_middle_of_the_columns(killed: Path) -> None:
    """RocksDB makes the columns anew that it finds no more of, empty."""
    shorten(next(killed.glob("MANIFEST-*")), 527)
    assert "MANIFEST" in refused(killed)


@pytest.mark.parametrize("at", [-20, -200])
def test_a_flipped_byte_in_what_every_table_is_read_by(killed: Path, at: int) -> None:
    """Its footer, its index: RocksDB reads them when it opens."""
    table = min(killed.glob("*.sst"))
    flip(table, at)
    assert table.name in refused(killed)


def test_a_table_that_grew(killed: Path) -> None:
    table = min(killed.glob("*.sst"))
    grow(table, b"x")
    assert table.name in refused(killed)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("at", [3, 4, 6, 20_000, -50, -1])
def test_a_flipped_byte_in_a_log(killed: Path, which: int, at: int) -> None:
    """In a header as well: a wrong length at the end looks like a torn end to RocksDB."""
    file = damage.logs(killed)[which]
    flip(file, at)
    assert file.name in refused(killed)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 20_000])
@pytest.mark.parametrize("length", [7, 4096])
def test_a_hole_of_zeros_in_a_log(killed: Path, which: int, at: int, length: int) -> None:
    file = damage.logs(killed)[which]
    overwrite(file, at, bytes(length))
    assert file.name in refused(killed)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_zeros_up_to_the_end_of_a_log(killed: Path, which: int) -> None:
    """It has its length, and nothing follows that would show that this is no end: but it was synced."""
    file = damage.logs(killed)[which]
    at = _header_behind(file, file.stat().st_size - 2000)
    overwrite(file, at, bytes(file.stat().st_size - at))
    assert f"{file.name} has a hole" in refused(killed)


def test_a_header_of_zeros_is_no_end_without_the_mark_either(killed: Path) -> None:
    """RocksDB takes a header of zeros for the unused rest of a block, and goes on with the next one in silence."""
    (killed / mark.NAME).unlink()
    file = damage.logs(killed)[-1]
    overwrite(file, _header_behind(file, 20_000), bytes(7))
    assert f"{file.name} has a hole" in refused(killed)


def test_a_wrong_length_is_no_end_without_the_mark_either(killed: Path) -> None:
    """In the last block RocksDB takes a record that is longer than the file for one that was being written."""
    (killed / mark.NAME).unlink()
    file = damage.logs(killed)[-1]
    overwrite(file, _header_behind(file, file.stat().st_size - 1000) + 4, b"\xff\x7f")
    assert f"{file.name} has a hole" in refused(killed)


def _header_behind(log: Path, at: int) -> int:
    """Where the first record behind an offset begins."""
    data = log.read_bytes()
    return next(end for end in (record.end for record in logformat.records(data, len(data))) if end > at)


@pytest.mark.parametrize("at", [500, -20])
def test_a_flipped_byte_in_the_manifest(killed: Path, at: int) -> None:
    file = next(killed.glob("MANIFEST-*"))
    flip(file, at)
    assert file.name in refused(killed)


def test_a_flipped_byte_in_current(killed: Path) -> None:
    flip(killed / "CURRENT", 5)
    assert "CURRENT" in refused(killed)


# The torn end.


@pytest.fixture(scope="module")
def unsynced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 synced writes, then three that are not: two small ones, and one over three blocks of the log."""
    root = tmp_path_factory.mktemp("unsynced")
    db = RocksDb(root / "alive")
    damage.put(db, 0, 100)
    db.flush()
    damage.put(db, 100, 2)
    db.write([Op(Cf.META, b"large", b"L" * 80_000)])
    killed = damage.copy(root / "alive", root / "killed")
    db.close()
    return killed


@pytest.fixture
def torn(unsynced: Path, tmp_path: Path) -> Path:
    return damage.copy(unsynced, tmp_path / "db")


def _synced(path: Path) -> tuple[Path, int]:
    """(its log, bytes of it that were synced)"""
    held = mark.Mark(path)
    [(name, size)] = held.read().logs.items()
    held.close()
    return path / name, size


def test_a_log_cut_at_every_byte_behind_the_synced_ones(torn: Path) -> None:
    """Checked at each byte; opened by RocksDB at some. Each write is whole or absent."""
    log, synced = _synced(torn)
    whole = log.read_bytes()
    ends = {record.end for record in logformat.records(whole, 0)}
    small = max(end for end in ends if end < len(whole))
    cuts = [*range(synced, small + 30), *range(small + 30, len(whole), 997), len(whole)]
    held = mark.Mark(torn)
    for cut in cuts:
        log.write_bytes(whole[:cut])
        wal.check(torn, held.read())
        assert log.stat().st_size == max(end for end in ends if end <= cut)
    held.close()
    for cut in (synced, synced + 3, synced + 8, small - 1, small, small + 5, small + 40_000, len(whole) - 1):
        copy = damage.copy(torn, torn.with_name(f"cut-{cut}"))
        (copy / log.name).write_bytes(whole[:cut])
        names = 100 + sum(1 for end in ends if synced < end <= cut)
        assert opened(copy) == (names, names)
        shutil.rmtree(copy)


@pytest.mark.parametrize("rubbish", [bytes(100_000), b"\xff" * 100_000, b"\x01" * 100_000, bytes(range(256)) * 400])
def test_rubbish_behind_the_synced_bytes(torn: Path, rubbish: bytes) -> None:
    """A power cut: the file had its length already, and its bytes not."""
    log, synced = _synced(torn)
    length = log.stat().st_size
    for i, at in enumerate((synced, synced + 3, synced + 50, synced + 400)):
        copy = damage.copy(torn, torn.with_name(f"copy-{i}"))
        overwrite(copy / log.name, at, rubbish[: length - at])
        assert opened(copy)[0] >= 100
        shutil.rmtree(copy)


def test_a_last_record_with_other_bytes_is_cut_off(torn: Path) -> None:
    """RocksDB itself refuses it: its length is right, its checksum is not."""
    log, _ = _synced(torn)
    flip(log, -1)
    assert opened(torn) == (102, 102)


@pytest.mark.parametrize("at", [0, 3, 4, 5, 6, 7, 50, -1])
@pytest.mark.parametrize("back", [1, 2, 3])
def test_a_flipped_byte_behind_the_mark_may_have_been_acknowledged(torn: Path, back: int, at: int) -> None:
    """In any of the last records, which then is the last one: its header, its bytes, its end."""
    log, synced = _synced(torn)
    data = log.read_bytes()
    bounds = [synced, *(record.end for record in logformat.records(data, 0) if record.end > synced)]
    begin, end = bounds[-back - 1], bounds[-back]
    shorten(log, len(data) - end)
    flip(log, begin + at if at >= 0 else at)
    db = RocksDb(torn)
    assert damage.rows(db) == (103 - back, 103 - back)
    db.close()
    assert (torn / wal.CUT).stat().st_size == end - begin
    assert _is_cut(torn), "until somebody has done something about it"
    db = RocksDb(torn)
    db.forget_cut()
    db.close()
    assert not _is_cut(torn)


def test_a_write_that_was_under_way_was_not_acknowledged(torn: Path) -> None:
    """Cut short anywhere, or zeros in place of all of it."""
    log, synced = _synced(torn)
    data = log.read_bytes()
    ends = [record.end for record in logformat.records(data, 0) if record.end >= synced]
    for cut in (*range(synced, synced + 400), *range(synced + 400, len(data), 977)):
        assert wal._is_torn(data[:cut], max(end for end in ends if end <= cut)), cut
    log.write_bytes(data[:-1])
    assert not _is_cut(torn)
    log.write_bytes(data[: ends[-2]] + bytes(len(data) - ends[-2]))
    assert not _is_cut(torn)


def _is_cut(path: Path) -> bool:
    db = RocksDb(path)
    db.close()
    return db.is_cut


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_what_is_cut_is_kept_before_it_goes(torn: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """All of it, once, or the log stays as it is."""
    log, synced = _synced(torn)
    flip(log, -1)
    data = log.read_bytes()

    def no_room(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", no_room)
        for _ in range(2):
            with pytest.raises(NoSpace, match="free some space"):
                RocksDb(torn)
    assert log.read_bytes() == data
    assert not list(torn.glob("CUT*"))
    assert opened(torn) == (102, 102)
    kept = (torn / wal.CUT).read_bytes()
    assert synced < len(data) - len(kept)
    assert data.endswith(kept)


def test_a_cut_that_came_twice_is_kept_once(torn: Path) -> None:
    """A crash between what is kept and the cut itself: the next start finds the same."""
    log, _ = _synced(torn)
    flip(log, -1)
    again = damage.copy(torn, torn.with_name("again"))
    assert opened(torn) == (102, 102)
    kept = (torn / wal.CUT).read_bytes()
    (again / wal.CUT).write_bytes(kept)
    assert opened(again) == (102, 102)
    assert (again / wal.CUT).read_bytes() == kept


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """100 synced writes, then STEP small ones that are not."""
    db = RocksDb(tmp_path / "alive")
    damage.put(db, 0, 100)
    db.flush()
    damage.put(db, 100, STEP)
    killed = damage.copy(tmp_path / "alive", tmp_path / "db")
    db.close()
    return killed


PAGE: Final = 4096


@pytest.mark.parametrize("rubbish", [b"\0", b"\xff"])
def test_a_page_behind_the_mark_that_never_reached_the_drive(many: Path, rubbish: bytes) -> None:
    """The next ones did, in whole records: what comes behind the gap may have been acknowledged, and is asked for."""
    log, synced = _synced(many)
    at = (synced // PAGE + 2) * PAGE
    whole = max(record.end for record in logformat.records(log.read_bytes(), 0) if record.end <= at)
    size = log.stat().st_size
    overwrite(log, at, rubbish * PAGE)
    db = RocksDb(many)
    names, last = damage.rows(db)
    db.close()
    assert 100 < names == last < 100 + STEP
    assert db.is_cut
    assert (many / wal.CUT).stat().st_size == size - whole


def test_a_page_in_a_log_that_is_younger_than_the_mark(many: Path) -> None:
    """Nothing of it was marked yet."""
    log, _ = _synced(many)
    held = mark.Mark(many)
    held.write(held.read()._replace(logs={}, sequence=1))
    held.close()
    overwrite(log, 2 * PAGE, bytes(PAGE))
    assert _is_cut(many)


def test_zeros_from_a_sector_on_are_a_write_that_was_under_way(many: Path) -> None:
    """Wherever in a record they begin; in the middle of a sector they are damage."""
    log, synced = _synced(many)
    data = log.read_bytes()
    ends = [record.end for record in logformat.records(data, 0)]
    for at in range(-(-synced // wal.SECTOR) * wal.SECTOR, len(data), wal.SECTOR):
        assert wal._is_torn(data[:at] + bytes(len(data) - at), max(end for end in ends if end <= at)), at
    middle = ends[-2] + logformat.HEADER.size + 3
    assert middle % wal.SECTOR < wal.SECTOR - (ends[-1] - middle), "both in one sector"
    assert not wal._is_torn(data[:middle] + bytes(len(data) - middle), ends[-2])
    at = (synced // PAGE + 2) * PAGE
    overwrite(log, at, bytes(len(data) - at))
    names, last = opened(many)
    assert 100 < names == last < 100 + STEP
    assert not (many / wal.CUT).exists()


def test_what_was_cut_off_stays_away(torn: Path) -> None:
    log, synced = _synced(torn)
    shorten(log, log.stat().st_size - synced - 3)
    db = RocksDb(torn)
    damage.put(db, 100, 50)
    db.flush()
    again = damage.copy(torn, torn.with_name("again"))
    db.close()
    assert opened(again) == (150, 150)


def test_a_synced_record_with_other_bytes_is_damage(torn: Path) -> None:
    log, synced = _synced(torn)
    flip(log, synced - 1)
    shorten(log, log.stat().st_size - synced)
    assert log.name in refused(torn)


@pytest.mark.parametrize("content", [b"", b"x", b"0 0\n", b"00000000 -5\n1\n", b"\xff" * 50])
def test_a_mark_that_makes_no_sense_asks_for_nothing(torn: Path, content: bytes) -> None:
    (torn / mark.NAME).write_bytes(content)
    assert opened(torn) == (102, 102)


def test_a_shorter_mark_over_a_longer_one(tmp_path: Path) -> None:
    held = mark.Mark(tmp_path)
    (tmp_path / "MANIFEST-1").touch()
    long = wal.Synced(5, {f"{i:06}.log": 1000 for i in range(9)}, ("MANIFEST-1", 10))
    short = wal.Synced(6, {"000010.log": 1}, ("MANIFEST-1", 20))
    for synced in (long, short):
        held.write(synced)
        assert held.read() == synced
    held.close()


def test_the_mark_itself_is_synced_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It bounds what a start has to check byte by byte after a power cut."""
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    held = mark.Mark(tmp_path)
    (tmp_path / "MANIFEST-1").touch()
    for size, times in ((0, 0), (mark.SYNC_EVERY_BYTES - 1, 0), (mark.SYNC_EVERY_BYTES, 1), (100, 2), (200, 2)):
        held.write(wal.Synced(1, {"000004.log": size}, ("MANIFEST-1", 0)))
        assert len(synced) == times, size
    held.close()


def test_logs_that_the_tables_have_made_needless_may_be_gone_in_any_order(tmp_path: Path) -> None:
    """A kill -9 in the middle of RocksDB's own deletions: newest first."""
    db = RocksDb(tmp_path / "db")
    for i in range(3):
        damage.new_log(db)
        damage.put(db, i * 10, 10)
        db.flush()
    before = damage.copy(tmp_path / "db", tmp_path / "before")
    db.close()
    db = RocksDb(tmp_path / "db")  # recovery puts all of it into tables
    damage.put(db, 30, 10)
    db.flush()
    after = damage.copy(tmp_path / "db", tmp_path / "after")
    db.close()
    oldest = next(log for log in damage.logs(before) if log.stat().st_size)
    assert not (after / oldest.name).exists()
    shutil.copy(oldest, after / oldest.name)
    assert opened(after) == (40, 40)


def test_a_second_opener_cuts_nothing_off_what_the_first_one_is_writing(tmp_path: Path) -> None:
    db = RocksDb(tmp_path)
    damage.put(db, 0, 10)
    [log] = damage.logs(tmp_path)
    grow(log, b"half of a record")
    length = log.stat().st_size
    with pytest.raises(Unavailable, match="in use"):
        RocksDb(tmp_path)
    assert log.stat().st_size == length
    db.close()
