"""Mounts as processes of their own, beside `tests.support.cluster`. They are unmounted whatever happens."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster import Cluster, Process, Worker


class Mount:
    """One ``kvstore mount``. `path` is where it is mounted; `process` as in `Process`."""

    def __init__(self, path: Path, process: Process) -> None:
        self.path, self.process = path, process

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def is_mounted(self) -> bool:
        return any(
            line.split(" ")[4] == str(self.path) for line in Path("/proc/self/mountinfo").read_text().splitlines()
        )


@contextmanager
def mounted(
    cluster: Cluster,
    path: Path,
    worker: Worker | None,
    *options: str,
    settings: str = "",
    environ: dict[str, str] | None = None,
    program: Sequence[str] = ("mount",),
) -> Iterator[Mount]:
    """Mount the store at `path`. `settings` are lines of TOML (whole tables); `program` replaces the command."""
    config = cluster.root / f"{path.name}.toml"
    config.write_text(settings)
    argv = [*program, str(path), "--master", cluster.url, "--config", str(config), *options]
    if worker is not None:
        argv += ["--worker-socket", worker.socket]
    mount = Mount(path, cluster.process(path.name, argv, environ))
    try:
        mount.process.start()
        yield mount
    finally:
        try:
            mount.process.close()
        finally:
            detach(mount)


def detach(mount: Mount) -> None:
    while mount.is_mounted():
        subprocess.run(["umount", "-l", str(mount.path)], check=True, timeout=10)


def can_mount() -> bool:
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)
