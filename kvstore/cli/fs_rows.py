"""Entries of a store as rows for people and JSON, and walks over its directories."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from kvstore.cli.output import Column, number_column, size_column
from kvstore.client import jobs
from kvstore.client.messages import RemoveKind
from kvstore.client.sync import Client
from kvstore.core.errors import AlreadyExists, Corrupt, IsDirectory, NotDirectory, NotEmpty, NotFound
from kvstore.core.types import Entry


def entry_row(name: str, entry: Entry) -> dict[str, Any]:
    """All that is known, for JSON; the columns below pick from it."""
    return {
        "name": name,
        "type": "directory" if entry.is_dir else "file",
        "size_bytes": entry.length_bytes,
        "mode": stat.filemode(entry.mode),
        "uid": entry.uid,
        "gid": entry.gid,
        "mtime_ns": entry.mtime_ns,
        "inode": entry.inode,
        "block": str(entry.address) if entry.address else None,
        "replicas": [{"node": r.node, "tier": r.tier, "endpoint": r.endpoint} for r in entry.replicas],
    }


def _time(mtime_ns: int) -> str:
    return datetime.fromtimestamp(mtime_ns / 1e9, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _replicas(replicas: list[dict[str, str]]) -> str:
    return ", ".join(f"{r['node']} ({r['tier']})" for r in replicas) or "-"


WORDS: Final[Mapping[str, str]] = {
    **jobs.WORDS,
    "is_directory": "is a directory",
    "not_empty": "is not empty; -r removes it with all below it",
}
MOVE_WORDS: Final[Mapping[str, str]] = {
    **WORDS,
    "no_name": "a directory above it does not exist",
    "is_directory": "is a directory, and a file cannot replace it",
    "not_directory": "is a file, and a directory cannot replace it",
    "not_empty": "is not empty, and cannot be replaced",
}
"""Of the new name: that the old one is there was seen before."""


@contextmanager
def named(path: str, words: Mapping[str, str] = WORDS, source: str = "") -> Iterator[None]:
    """What fails for a name says for which, in one wording: its path from the root of the store, then the reason.

    `source`: another path that the error may speak of; then it names it already.
    """
    try:
        yield
    except (NotFound, AlreadyExists, NotEmpty, IsDirectory, NotDirectory, Corrupt) as error:
        if error.message.startswith((f"{path}: ", f"{source}: ")):
            raise
        text = words.get(error.reason, error.message)
        raise type(error)(f"{path}: {text}", reason=error.reason, fault=error.fault) from None


SHORT = [Column("name", "NAME"), Column("type", "TYPE"), size_column("size_bytes", "SIZE")]
LONG = [
    Column("mode", "MODE"),
    Column("uid", "UID", justify="right"),
    Column("gid", "GID", justify="right"),
    size_column("size_bytes", "SIZE"),
    Column("mtime_ns", "MODIFIED", _time),
    Column("replicas", "REPLICAS", _replicas),
    Column("name", "NAME"),
]
ALL = [
    Column("name", "NAME"),
    Column("type", "TYPE"),
    number_column("size_bytes", "BYTES"),
    Column("mode", "MODE"),
    Column("uid", "UID"),
    Column("gid", "GID"),
    Column("mtime_ns", "MODIFIED", _time),
    Column("inode", "INODE"),
    Column("block", "BLOCK"),
    Column("replicas", "REPLICAS", _replicas),
]


class Usage(NamedTuple):
    path: str
    size_bytes: int
    files: int
    directories: int


def usage(client: Client, path: str, depth: int) -> Iterator[Usage]:
    """What lies below a path: its directories down to `depth` before it, the path itself last."""
    entry = client.stat(path)
    if not entry.is_dir:
        yield Usage(path, entry.length_bytes, 1, 0)
        return
    size = files = directories = 0
    for name, below in client.list(path):
        if not below.is_dir:
            size, files = size + below.length_bytes, files + 1
            continue
        *inner, total = usage(client, f"{path.rstrip('/')}/{name}", depth - 1)
        if depth > 0:
            yield from (*inner, total)
        size, files, directories = size + total.size_bytes, files + total.files, directories + total.directories + 1
    yield Usage(path, size, files, directories)


def remove_tree(client: Client, path: str) -> Iterator[str]:
    """Remove a file, or a directory with all that lies below it; each path as it goes. What is gone meanwhile is
    fine.
    """
    if client.stat(path).is_dir:
        for name in [name for name, _ in client.list(path)]:
            try:
                yield from remove_tree(client, f"{path.rstrip('/')}/{name}")
            except NotFound:
                continue
        kind = RemoveKind.DIRECTORY
    else:
        kind = RemoveKind.ANY
    with named(path):
        client.remove(path, kind=kind)
    yield path
