"""The books of a worker against what really lies on its disks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvstore.worker.volumes.disk import FileState, _file_state
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.worker import Worker

PARTS = ("blocks", "staging", "quarantine")


def files_below(directory: str) -> Iterator[str]:
    """Paths of all that is no directory; none when there is no such directory. Neither by pathlib nor by os.walk, which
    take several times as long for the 256 directories of a volume."""
    try:
        with os.scandir(directory) as entries:
            found = list(entries)
    except FileNotFoundError:
        return
    for entry in found:
        if entry.is_dir():
            yield from files_below(entry.path)
        else:
            yield entry.path


def state_of(path: Path | str) -> FileState | None:
    """None when it has gone."""
    try:
        return _file_state(os.lstat(path))
    except FileNotFoundError:
        return None


def used_on_disk(volume: Volume, parts: Iterable[str] = PARTS) -> int:
    """Bytes of the volume's files, as its books count them. Blocks first: a file that is renamed meanwhile is missed,
    not counted twice.
    """
    paths = (path for part in parts for path in files_below(f"{volume.path}/{part}"))
    return sum(state.used_bytes for path in paths if (state := state_of(path)))


def allocated_on_disk(volume: Volume) -> int:
    """What `du` says of the volume's blocks."""
    paths = files_below(f"{volume.path}/blocks")
    return sum(state.allocated_bytes for path in paths if (state := state_of(path)))


async def stop_moves(worker: Worker) -> None:
    """Those under way are over when it returns, and no others come."""

    async def no_step() -> None:
        return

    async def no_relief() -> int:
        return 0

    worker.mover.step = no_step  # type: ignore[method-assign]
    worker.mover.relieve = no_relief  # type: ignore[method-assign]
    async with worker.mover._turn, worker.mover._relief_turn:
        pass


async def check_exact(worker: Worker) -> None:
    """At rest books and disks agree to the byte, and no file of another kind is there."""
    await worker.held.probe()
    for volume in worker.store.volumes:
        await worker.staging.look(volume)
        names = {os.path.basename(path) for path in files_below(f"{volume.path}/blocks")}
        assert names == {block.address.file_name for block in worker.store.hold(volume)}
        assert volume.books.held == 0, volume.books.describe()
        books = volume.books
        for part, booked in (("blocks", books.blocks), ("staging", books.staging), ("quarantine", books.quarantine)):
            assert used_on_disk(volume, [part]) == booked, (part, books.describe())
        assert volume.books.blocks == sum(block.used_bytes for block in worker.store.hold(volume))
        assert volume.books.used <= volume.books.capacity, volume.books.describe()
