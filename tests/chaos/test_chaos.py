"""A short run of what `make chaos` does for as long as one likes, and what it leaves behind: nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from kvstore.node import parent
from tests.support.cluster import clean_environment, wait_until

MINUTES: Final = 0.5
_TIMEOUT_S: Final = 280.0
_BEGUN_S: Final = 90.0


@contextmanager
def chaos(directory: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run with all its files below `directory`, and its output in the file `said` there; killed at the end."""
    command = [sys.executable, "-m", "tests.chaos", *options]
    environ = parent.tied({**clean_environment(), "TMPDIR": str(directory)}, signal.SIGTERM)
    with (directory / "said").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environ)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def left_behind(pid: int, directory: Path) -> list[str]:
    """Networks, interfaces, mounts, loop devices and processes of the run with this pid."""
    mark = f"kvc{pid:x}"
    processes = [
        line.decode(errors="replace")
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and str(directory).encode() in (line := _command_line(entry))
    ]
    return [
        *(str(path) for path in Path("/run/netns").glob(f"{mark}-*")),
        *(str(path) for path in Path("/sys/class/net").glob(f"{mark}*")),
        *(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(directory) in line),
        *(line for line in _losetup().splitlines() if str(directory) in line),
        *processes,
    ]


def _losetup() -> str:
    return subprocess.run(["losetup", "--all"], capture_output=True, text=True, timeout=20, check=True).stdout


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_a_short_run_finds_nothing_wrong_and_leaves_nothing(tmp_path: Path) -> None:
    with chaos(tmp_path, "--minutes", str(MINUTES)) as process:
        code = process.wait(_TIMEOUT_S)
    said = (tmp_path / "said").read_text()
    assert code == 0, said
    hits = re.search(r"read: \d+ gets, (\d+) hits", said)
    assert hits, said
    assert int(hits[1]) > 100
    done = re.findall(r"^  ([a-z ]+?) +\d+  .+ \(\S+ \d+.*\)$", said, re.MULTILINE)
    assert len(done) >= 5, f"kinds of faults: {said}"
    assert re.search(r"^ +\d+\.\d s  -- \d+ calls, .* broken now: ", said, re.MULTILINE), said
    (seed,) = re.findall(r"^chaos: .* seed (\d+); ", said, re.MULTILINE)
    assert f"SEED={seed}" in said
    assert left_behind(process.pid, tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["said"]


@pytest.mark.slow
def test_a_run_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    with chaos(tmp_path, "--minutes", "5") as process:
        wait_until(lambda: b"  stop " in _said(tmp_path) or b"  kill " in _said(tmp_path), "it has begun", _BEGUN_S)
        assert left_behind(process.pid, tmp_path) != []
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) != 0
    assert left_behind(process.pid, tmp_path) == []


def _said(directory: Path) -> bytes:
    return (directory / "said").read_bytes()
