"""A mount whose process does not answer: aborted, and mounted anew by its supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.config import MountPoint
from kvstore.node import mountcheck, plan
from kvstore.node.child import Child
from kvstore.node.supervisor import Supervisor
from kvstore.node.watch import Patience
from tests.support.child import Child as Asker
from tests.support.child import Hung, in_child
from tests.support.cluster import Cluster
from tests.support.mounts import can_mount, mounted

pytestmark = pytest.mark.skipif(not can_mount(), reason="mounting needs root and /dev/fuse")
SOON = Patience(interval_s=0.2, deadline_s=1.0, failures=2)
RECOVERY_TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("store"), workers=1) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _control_file_system() -> Iterator[None]:
    """The watch mounts it where it is missing; then it goes again."""
    was_there = os.path.ismount(mountcheck.CONNECTIONS)
    yield
    if not was_there and os.path.ismount(mountcheck.CONNECTIONS):
        subprocess.run(["umount", str(mountcheck.CONNECTIONS)], check=True, timeout=10)


def test_an_abort_frees_who_hangs_in_a_mount(cluster: Cluster, tmp_path: Path) -> None:
    with mounted(cluster, tmp_path / "m", cluster.workers[0]) as mount:
        mount.process.signal(signal.SIGSTOP)
        asker = Asker(os.listdir, mount.path)
        with pytest.raises(Hung):
            asker.join(0.5)
        asker = Asker(os.listdir, mount.path)
        mountcheck.abort(str(mount.path))
        with pytest.raises(OSError, match=r"connection abort|not connected"):
            asker.join()
        mount.process.kill()


@pytest.mark.allow_errors("does not answer")
async def test_a_mount_that_was_stopped_is_mounted_anew(cluster: Cluster, tmp_path: Path) -> None:
    directory = tmp_path / "m"
    supervisor = Supervisor(1.0, SOON)
    try:
        child = supervisor.launch(plan.mount(MountPoint(dir=str(directory)), cluster.url, cluster.workers[0].socket))
        await child.wait_ready(RECOVERY_TIMEOUT_S)
        await asyncio.to_thread(in_child, (directory / "f").write_bytes, b"kept")
        await ended_and_restarted(child)
        assert await asyncio.to_thread(in_child, (directory / "f").read_bytes) == b"kept"
        await asyncio.sleep(5 * SOON.interval_s)
        assert child.restarts == 1, "the new one answers"
    finally:
        await supervisor.stop()
    assert not os.path.ismount(directory)


async def ended_and_restarted(child: Child) -> None:
    """Stop its process, and wait for the next one to be ready."""
    stopped = child.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    async with asyncio.timeout(RECOVERY_TIMEOUT_S):
        while child.pid == stopped or not child.is_ready:  # noqa: ASYNC110 - no event tells of the next one
            await asyncio.sleep(0.05)
