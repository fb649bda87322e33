"""Damage to files, and databases as kill -9 or a power cut leaves them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kvstore.master.storage.db import Cf, Op, RocksDb


def flip(path: Path, at: int) -> None:
    """Other bits in the byte at an offset; negative = from the end."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def overwrite(path: Path, at: int, data: bytes) -> None:
    """Within the file; negative = from the end."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        file.write(data)


def shorten(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def grow(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def copy(db: Path, to: Path) -> Path:
    """The directory of a database that is open, as kill -9 would leave it at this moment."""
    shutil.copytree(db, to)
    return to


def put(db: RocksDb, first: int, count: int) -> None:
    """Writes of two rows each, in columns of which `new_log` flushes only one."""
    for i in range(first, first + count):
        db.write([Op(Cf.NAMES, b"%06d" % i, b"x" * 100), Op(Cf.INODES, b"%06d" % i, b"y" * 20)])


def rows(db: RocksDb) -> tuple[int, int]:
    """How many of them are there, by column."""
    names, inodes = (len(db.scan(cf, b"", None, 1_000_000)) for cf in (Cf.NAMES, Cf.INODES))
    return names, inodes


def new_log(db: RocksDb) -> None:
    """One column goes into a table and a new log begins; the old one stays, for the others."""
    db._columns[Cf.NAMES].flush()


def logs(path: Path) -> list[Path]:
    return sorted(path.glob("*.log"))
