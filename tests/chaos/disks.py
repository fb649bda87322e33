"""What goes wrong with disks: one that fills up, and blocks whose bytes change while nobody looks."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvstore.pagecache import Residency

_KEPT_BYTES: Final = 4096
"""Of an extended file's own bytes: so much is appended."""

_PART: Final = 0.25
_MOST: Final = 50
"""Of the blocks of a volume, so many are damaged at once, or fewer: some of them are read soon."""


class NotDone(Exception):
    """There was nothing to damage, or no room to do it."""


Damage = Callable[[bytearray, random.Random], None]


def flip(data: bytearray, luck: random.Random) -> None:
    data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)


def truncate(data: bytearray, luck: random.Random) -> None:
    del data[luck.randrange(len(data)) :]


def extend(data: bytearray, luck: random.Random) -> None:
    data += luck.randbytes(_KEPT_BYTES)


DAMAGES: Final[dict[str, Damage]] = {"flip": flip, "truncate": truncate, "extend": extend}


def blocks(volume: Path) -> list[Path]:
    """Sealed blocks with content that lie there now."""
    found = (volume / "blocks").glob("*/*.*.*")
    return sorted(path for path in found if _size(path) > 0)


def damage(volume: Path, how: str, luck: random.Random) -> int:
    """Change a part of the blocks as `how` says; their number. Raises NotDone."""
    victims = _victims(volume, luck)
    contents = {}
    for victim in victims:
        data = bytearray(_content(victim))
        if data:
            DAMAGES[how](data, luck)
            contents[victim] = bytes(data)
    return _replace(volume, contents)


def swap(volume: Path, luck: random.Random) -> int:
    """A part of the blocks change places in a circle; their number. Raises NotDone."""
    victims = _victims(volume, luck)
    if len(victims) < 2:
        raise NotDone(f"{volume.name} has no two blocks")
    return _replace(volume, dict(zip(victims, map(_content, [*victims[1:], victims[0]]), strict=True)))


def _victims(volume: Path, luck: random.Random) -> list[Path]:
    """Raises NotDone when there are none."""
    there = blocks(volume)
    if not there:
        raise NotDone(f"{volume.name} has no blocks")
    return luck.sample(there, min(_MOST, max(min(2, len(there)), round(_PART * len(there)))))


def wipe(volume: Path) -> None:
    """Empty, as a new drive is."""
    for path in volume.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _replace(volume: Path, contents: dict[Path, bytes]) -> int:
    """Other bytes under these names, on the disk but not in memory; how many there were. Raises NotDone.

    A drive that rots changes what will be read, not what lies in the page cache: so the file is a new one, whose pages
    are dropped, and whoever has the old one open goes on with that.
    """
    done = 0
    for path, data in contents.items():
        temporary = volume.with_name(f"{volume.name}.rot-{path.name}")
        try:
            temporary.write_bytes(data)
            shutil.copystat(path, temporary)
            _drop(temporary)
            os.replace(temporary, path)
            done += 1
        except FileNotFoundError:  # evicted meanwhile
            continue
        except OSError as error:
            raise NotDone(f"{path.name}: {error.strerror}") from None
        finally:
            temporary.unlink(missing_ok=True)
    return done


def _content(path: Path) -> bytes:
    """Empty when it is gone meanwhile."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _drop(path: Path) -> None:
    """Out of the page cache. Raises NotDone when the kernel keeps it (a tmpfs has nothing else)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        size_bytes = os.fstat(fd).st_size
        if size_bytes and Residency().is_resident(fd, 0, size_bytes):
            raise NotDone(f"{path.name} stays in memory")
    finally:
        os.close(fd)


def _size(path: Path) -> int:
    """0 for one that is gone meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
