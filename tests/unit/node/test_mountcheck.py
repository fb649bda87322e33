"""How a mount is asked, and which connection is aborted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.fuse import mountpoint
from kvstore.node import mountcheck


@pytest.fixture
def stat_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of ``stat``."""

    def put(script: str) -> None:
        (tmp_path / "stat").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "stat").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return put


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("exit 0", ""),
        ("echo 'stat: cannot read file system information: Input/output error' >&2; exit 1", ""),
        ('test "$LC_ALL" = C && echo "stat: $3: Transport endpoint is not connected" >&2; exit 1', "not connected"),
        ("exec sleep 60", "no answer within 0.3 s"),
    ],
    ids=["well", "an error is an answer", "nobody serves it", "hangs"],
)
async def test_what_an_answer_says(stat_says: Callable[[str], None], script: str, complaint: str) -> None:
    stat_says(script)
    started = time.monotonic()
    said = await mountcheck.ask("/m", 0.3 if "sleep" in script else 10.0)
    assert (complaint in said) if complaint else said == ""
    assert time.monotonic() - started < 5


async def test_where_nobody_can_ask_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await mountcheck.ask("/m", 1.0) == ""


def test_only_the_connection_of_our_own_mount_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "mountinfo"
    info.write_text("1 1 0:41 / /m rw - fuse.kvstore kvstore rw\n2 1 0:42 / /other rw - fuse.sshfs other rw\n")
    monkeypatch.setattr(mountpoint, "MOUNTINFO", str(info))
    monkeypatch.setattr(mountcheck, "CONNECTIONS", tmp_path)
    for minor in ("41", "42"):
        (tmp_path / minor).mkdir()
        (tmp_path / minor / "abort").touch()
    for directory in ("/m", "/other", "/none"):
        mountcheck.abort(directory)
    assert [(tmp_path / minor / "abort").read_text() for minor in ("41", "42")] == ["1", ""]
