"""Opening the volumes of a worker: all of them, or one clear line."""

from __future__ import annotations

import logging

from kvstore.core.errors import Denied, InvalidRequest, KvError
from kvstore.runtime import Runtime
from kvstore.worker.settings import Settings
from kvstore.worker.volumes import memory
from kvstore.worker.volumes.disk import Disk, disk_error
from kvstore.worker.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)


def start_error(error: OSError, where: str) -> KvError:
    """What an operator is told of a path of the configuration that cannot be used."""
    if isinstance(error, PermissionError):
        return Denied(f"{where}: {error.strerror}; run as a user who may, or name another path")
    return disk_error(error, where)


async def open_volumes(settings: Settings, runtime: Runtime, disk: Disk) -> list[Volume]:
    """All of them, or none. Raises KvError with the volume that cannot be opened."""
    if all(volume.tier == "mem" for volume in settings.volumes):
        raise InvalidRequest("worker.volumes: clients stage on disk tiers only; add a volume of tier ssd or hdd")
    memory.check(sum(volume.capacity_bytes for volume in settings.volumes if volume.tier == "mem"))
    volumes: list[Volume] = []
    try:
        for volume_settings in settings.volumes:
            path = volume_settings.path
            volumes.append(await runtime.in_thread(open_volume, volume_settings, runtime.random_u64() or 1, disk))
            if doubt := await runtime.in_thread(memory.doubt, volume_settings.tier, path):
                log.warning("volume %s is of %s", path, doubt)
    except (KvError, OSError) as error:
        for volume in volumes:
            volume.close()
        if isinstance(error, OSError):
            raise start_error(error, f"worker.volumes: {error.filename or path}") from None
        raise
    if len({volume.id for volume in volumes}) < len(volumes):
        raise InvalidRequest("worker.volumes: two directories have the same volume id; one is a copy, empty it")
    return volumes
