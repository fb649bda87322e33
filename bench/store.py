"""A store for the demo and for measurements: `kvstore up` as a child process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

PYTHON: Final = sys.executable
STOP_TIMEOUT_S: Final = 60


@contextmanager
def running(home: Path, mounts: Sequence[Path], *, capacity: str, nodes: int = 2) -> Iterator[dict[str, Any]]:
    """Data below `home`, one mount a node; gives what ``kvstore up --json`` announced (url, mounts, worker_sockets)."""
    log = home / "store.log"
    command = [PYTHON, "-m", "kvstore", "up", "--data", str(home / "data"), "--workers", str(nodes), "--port", "0"]
    command += ["--capacity", capacity, "--json", *(part for path in mounts for part in ("--mount", str(path)))]
    with log.open("wb") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as up:
        try:
            assert up.stdout is not None
            line = up.stdout.readline()
            if not line:
                raise SystemExit(f"the store did not start; its log:\n{log.read_text()[-4000:]}")
            yield json.loads(line)
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(STOP_TIMEOUT_S)
