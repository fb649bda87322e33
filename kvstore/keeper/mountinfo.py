"""What is mounted where, from /proc alone: a stat of a mount whose process is gone or busy may never return."""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

FS_TYPE: Final = "fuse.kvstore"
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


class MountPoint(NamedTuple):
    id: int
    """As in the ``mnt_id`` of fdinfo; counted by each mount namespace for itself."""
    device: str
    """``major:minor``, the same in all mount namespaces; a FUSE mount's minor is the number of its connection."""
    path: str
    fs_type: str

    @property
    def minor(self) -> int:
        return int(self.device.partition(":")[2])


def of_process(pid: int | str = "self") -> list[MountPoint]:
    """In the order they were made, those of another process by its own paths. Raises OSError when it is gone."""
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        return parse(file.read())


def find(directory: str) -> MountPoint | None:
    """The topmost mount on exactly this directory."""
    path = absolute(directory)
    return next((m for m in reversed(of_process()) if m.path == path), None)


def absolute(directory: str) -> str:
    """Absolute, with the links of its *parent* resolved: resolving the directory itself would touch the mount."""
    parent, name = os.path.split(os.path.abspath(directory))
    return os.path.join(os.path.realpath(parent), name)


def parse(data: bytes) -> list[MountPoint]:
    mounts = []
    for line in data.splitlines():
        before, _, after = line.partition(b" - ")
        fields = before.split(b" ")
        if len(fields) >= 5 and after:
            path = os.fsdecode(_OCTAL.sub(lambda m: bytes([int(m[1], 8)]), fields[4]))
            mounts.append(MountPoint(int(fields[0]), fields[2].decode(), path, os.fsdecode(after.split(b" ")[0])))
    return mounts
