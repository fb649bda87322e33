"""A mount without a keeper: pyfuse3 mounts, and this process ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Final

import pyfuse3

from kvstore.config import MountConfig
from kvstore.core.errors import Denied
from kvstore.fuse import mountpoint
from kvstore.fuse.ops import Operations
from kvstore.keeper.holders import describe, holders
from kvstore.obs import notify

log = logging.getLogger(__name__)

_RETRY_S: Final = 0.2


def mount(operations: Operations, directory: str, config: MountConfig) -> None:
    """Raises Denied."""
    options = {"default_permissions", f"fsname={mountpoint.FS_NAME}", f"subtype={mountpoint.FS_NAME}"}
    if config.allow_other:
        options.add("allow_other")
    try:
        pyfuse3.init(operations, directory, options)
    except RuntimeError as error:
        raise Denied(
            f"cannot mount on {directory} ({error}): it takes root or CAP_SYS_ADMIN, or fusermount3 with "
            "user_allow_other in /etc/fuse.conf (or allow_other = false)"
        ) from None


async def stop_on_signal(directory: str, busy_wait_s: float) -> None:
    """Unmount at the first SIGTERM or SIGINT, after a bounded wait for whoever has files open."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    notify.stopping()
    for turn in range(max(1, int(busy_wait_s / _RETRY_S))):
        if await asyncio.to_thread(mountpoint.unmount, directory):
            return  # and `pyfuse3.main` by itself
        if turn == 0:
            who = describe(await asyncio.to_thread(holders, directory))
            log.warning("%s is busy (%s): waiting %g s", directory, who, busy_wait_s)
        await asyncio.sleep(_RETRY_S)
    who = describe(await asyncio.to_thread(holders, directory))
    log.warning("%s is busy (%s): detached; it ends for its users now", directory, who)
    await asyncio.to_thread(mountpoint.detach, directory)
    pyfuse3.terminate()
