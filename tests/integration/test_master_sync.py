"""What is acknowledged is in the synced log. kill -9 cannot show a missing sync, since the page cache survives it:
strace can. (That the answer waits for it is shown by the committer's own tests, with a flush that blocks.)
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore import connect
from tests.support.cluster import Cluster, wait_until

MUTATIONS = 20


@contextmanager
def traced(pid: int, output: Path) -> Iterator[None]:
    """The system calls of a process that sync a file."""
    command = ["strace", "-f", "-qq", "-e", "trace=fsync,fdatasync", "-e", "signal=none"]
    with subprocess.Popen([*command, "-o", str(output), "-p", str(pid)]) as tracer:
        try:
            wait_until(lambda: is_traced(pid), "strace is attached")
            yield
        finally:
            tracer.terminate()


def is_traced(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return re.search(r"^TracerPid:\s*[1-9]", status, re.MULTILINE) is not None


def test_each_acknowledged_change_had_a_sync_of_its_own(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with Cluster(tmp_path, workers=0, tick="60s") as cluster, connect(cluster.url, worker_socket="") as client:
        client.mkdir("/warm")
        assert cluster.master.pid is not None
        with traced(cluster.master.pid, trace):
            for i in range(MUTATIONS):  # one at a time: each waits for its own answer, so none shares a sync
                client.mkdir(f"/d{i}")
    syncs = [line for line in trace.read_text().splitlines() if re.search(r"\b(fsync|fdatasync)\b.*= 0$", line)]
    assert len(syncs) >= MUTATIONS
