"""Passthrough or plain: decided once, before anything is mounted, and said in the ready line."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvstore.client.local import LocalWorker
from kvstore.config import Config, MountConfig
from kvstore.core.errors import KvError, Unsupported
from kvstore.core.limits import MOUNT_OPERATION_TIMEOUT_S
from kvstore.fuse import mountpoint
from kvstore.keeper import probe

log = logging.getLogger(__name__)

_SLACK_S: Final = 5.0
"""The keeper answers for a process that runs this much later than the guard inside it."""


def why_plain(config: Config) -> str | None:
    """None when the mount shall use passthrough; else why not, in a few words.

    Raises Unsupported when passthrough is asked for and cannot be had.
    """
    wanted = config.mount.passthrough
    if wanted == "off":
        return "--passthrough off"
    with _trial_files(config.mount) as files:
        reason = probe.why_not(files)
    if reason is not None and wanted == "on":
        raise Unsupported(f"no passthrough here: {reason}; mount with --passthrough off (or auto)")
    return reason


@contextmanager
def _trial_files(mount: MountConfig) -> Iterator[list[tuple[str, int]]]:
    """(what it is, read-only fd) of a file in each place whose files the kernel would read and write."""
    files: list[tuple[str, int]] = []
    try:
        if mount.worker_socket:
            files += _of_worker(mount.worker_socket)
        else:
            directory = mount.staging_dir or None
            fd, path = tempfile.mkstemp(prefix="kvstore-", dir=directory)
            os.unlink(path)
            files.append((f"the staging directory {os.path.dirname(path)}", fd))
        yield files
    finally:
        for _, fd in files:
            os.close(fd)


def _of_worker(socket_path: str) -> list[tuple[str, int]]:
    """Without a worker just now nothing is known of its volumes: a file that cannot be passed through is served by the
    handlers.
    """
    worker = LocalWorker(socket_path, secrets.randbits(64) or 1)
    try:
        return [(f"a {tier} volume", fd) for _, tier, fd in worker.probe()]
    except KvError as error:
        log.warning("the local worker's volumes are not tried: %s", error.message)
        return []
    finally:
        with contextlib.suppress(KvError):
            worker.close()


def become_keeper(config: Config, command: Sequence[str]) -> None:
    """Replace this process with the keeper, which runs `command` as its file system process. Does not return."""
    mount = config.mount
    options = [
        "--deadline", str(mount.deadline_s),
        "--slow-deadline", str(MOUNT_OPERATION_TIMEOUT_S + _SLACK_S),
        "--busy-wait", str(mount.busy_wait_s),
        "--log-level", config.log.level,
        "--log-format", config.log.format,
    ]  # fmt: skip
    if mount.allow_other:
        options.append("--allow-other")
    sys.stdout.flush()
    os.execv(
        sys.executable,
        [sys.executable, "-m", "kvstore.keeper", *options, mountpoint.absolute(mount.dir), "--", *command],
    )
