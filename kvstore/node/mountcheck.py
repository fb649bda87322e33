"""Whether a mount answers, and what frees those who hang in one that does not.

Whoever asks a mount may hang with it, and then not even SIGKILL helps: the kernel lets a caller wait for an answer to a
request that the file system process has read. So a child process asks, nobody waits for it longer than the deadline,
and the connection is aborted before the mount's process is killed: that frees all who hang, the child too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import subprocess
from pathlib import Path
from typing import Final

from kvstore.fuse import mountpoint

log = logging.getLogger(__name__)

CONNECTIONS: Final = Path("/sys/fs/fuse/connections")
_MOUNT_TIMEOUT_S: Final = 5.0
_END_TIMEOUT_S: Final = 0.5


class WatchedMount:
    """Of the mount on `directory`, for `watch`."""

    def __init__(self, directory: str) -> None:
        self._directory = mountpoint.absolute(directory)
        self.name = f"mount {self._directory}"

    async def ask(self, deadline_s: float) -> str:
        return await ask(self._directory, deadline_s)

    async def release(self) -> None:
        await asyncio.to_thread(abort, self._directory)


async def ask(directory: str, deadline_s: float) -> str:
    """What is wrong with the mount: no answer, or nobody serves it; "" when it answers, be it with an error."""
    try:
        process = await asyncio.create_subprocess_exec(
            "stat", "-f", "--", directory,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        log.warning("cannot ask mount %s whether it is well: %s", directory, error.strerror)
        return ""
    try:
        async with asyncio.timeout(deadline_s):
            _, said = await process.communicate()
    except TimeoutError:
        return f"no answer within {deadline_s:g} s"
    finally:
        await _end(process)
    return os.strerror(errno.ENOTCONN) if os.strerror(errno.ENOTCONN).encode() in said else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    """Whether it still runs or not. One that hangs in the kernel ends with the connection."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            await process.wait()


def abort(directory: str) -> None:
    """Let all that waits for our mount on `directory` fail. Never touches the mount. Blocks for some milliseconds."""
    try:
        there = mountpoint.find(directory)
        if there is not None and there.fs_type == mountpoint.FS_TYPE:
            _control_directory(there).joinpath("abort").write_text("1")
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("mount %s: its connection cannot be aborted (%s); killing its process must do", directory, error)


def _control_directory(mount: mountpoint.Mounted) -> Path:
    """Of the mount's connection. Where nobody has mounted the kernel's control file system (containers), it is mounted
    now.
    """
    control = CONNECTIONS / mount.device.partition(":")[2]
    if not control.exists():
        command = ["mount", "-t", "fusectl", "fusectl", str(CONNECTIONS)]
        subprocess.run(command, capture_output=True, timeout=_MOUNT_TIMEOUT_S, check=True)
    return control
