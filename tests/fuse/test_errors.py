"""What POSIX calls answer: one table, held against a plain directory and against the mount.

The plain directory verifies the table. Where the mount answers something else, the row says so and why.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fuse.errno_table import OK, SET_UP, TABLE, Row
from tests.support.actor import Actor
from tests.support.fsops import Failed
from tests.support.modes import MODES, Pair, mounted_pair


@contextmanager
def public_directory() -> Iterator[Path]:
    """Anybody may go through it; pytest's own are for root alone, and each start of a pytest makes them so again."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.fixture(scope="module")
def plain() -> Iterator[Path]:
    with public_directory() as path:
        yield path


@pytest.fixture(scope="module", params=MODES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with public_directory() as root, mounted_pair(root, request.param) as pair:
        yield pair


def answer_of(row: Row, root: Path) -> str:
    """What the last call of the row answers in a new directory below `root`."""
    with Actor("actor", {"side": root / f"row-{TABLE.index(row)}"}) as actor:
        *before, last = actor.ask(*(("side", each) for each in (*SET_UP, *row.calls)))
    assert not [answer for answer in before if isinstance(answer, Failed)], before
    return last.error if isinstance(last, Failed) else OK


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.label)
def test_a_plain_directory(row: Row, plain: Path) -> None:
    assert answer_of(row, plain) == row.plain


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.label)
def test_the_mount(row: Row, pair: Pair) -> None:
    assert answer_of(row, pair.a.path) == row.error, row.reason
