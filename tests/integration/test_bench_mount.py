"""`bench.mount` runs to its end, says what it is asked for, and leaves nothing behind, also when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import wait_until
from tests.support.mounts import can_mount

pytestmark = pytest.mark.skipif(not can_mount(), reason="mounting needs root and /dev/fuse")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 180


def command(home: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "bench.mount", "--quick", "--home", str(home), *options]


def left_behind(home: Path) -> list[str]:
    """Mounts and processes of a bench below `home`."""
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(home) in line]
    return mounts + [line for line in map(command_line, Path("/proc").iterdir()) if f"{home}/" in line]


def command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def test_the_quick_form_measures_each_mode_and_leaves_nothing(tmp_path: Path) -> None:
    home, samples = tmp_path / "home", tmp_path / "samples.json"
    home.mkdir()
    done = subprocess.run(
        command(home, "--json", str(samples)), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    taken = json.loads(samples.read_text())
    assert {"plain directory", "keep_cache", "direct_io"} <= {sample["place"] for sample in taken}
    assert {"write", "read, first", "read, again", "stat, cached", "cycle, 4 at a time"} <= {s["phase"] for s in taken}
    assert all(sample["rate"] > 0 for sample in taken)
    assert "CPU seconds per GB" in done.stdout
    assert "read, first, keep_cache: " in done.stdout, "the aims"
    assert left_behind(home) == []
    assert list(home.iterdir()) == []


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """As a terminal does it: to the bench and all that it started."""
    bench = subprocess.Popen(command(tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: any("fuse.kvstore" in line for line in left_behind(tmp_path)), "something is mounted", 60)
        os.killpg(bench.pid, signal.SIGINT)
        assert bench.wait(60) == 130
    finally:
        bench.kill()
        bench.wait()
    wait_until(lambda: left_behind(tmp_path) == [], "nothing is left")
    assert list(tmp_path.iterdir()) == []
