"""Drives of one host: real files, and what may become of them.

A crash of a process keeps everything. A power cut takes back what no sync has covered: the last steps in the
directories (a prefix of them stays, as in a file system's journal), and bytes of files, which are cut, zeroed or kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
from pathlib import Path
from typing import Final

from kvstore.worker.volumes import lease
from kvstore.worker.volumes.disk import FileState, _file_state
from kvstore.worker.volumes.lease import Holders

FREE_BYTES: Final = 1 << 40
"""What the file system says is left while nobody else fills it."""


@dataclasses.dataclass(slots=True)
class _Step:
    """A change of a directory, or of an attribute.

    kept        a second name of the file that lost its name by it
    attribute   its name, and its value before: None when there was none
    """

    path: str
    target: str = ""
    kept: str = ""
    made: bool = False
    attribute: tuple[str, bytes | None] | None = None


class Drive:
    """`root` holds the host's volumes; `mem` lists those that a power cut empties.

    Faults that hold until they are lifted: `broken` (chance of EIO), `full` (ENOSPC). `rotten` files say what they said
    before (the kernel did not see them change), `cold` ones are not in memory.
    """

    def __init__(self, root: Path, mem: list[str], source: random.Random) -> None:
        self.root, self.mem, self.random = root, mem, source
        self.broken, self.full = 0.0, False
        self.cold: set[int] = set()
        self.rotten: dict[int, FileState] = {}
        self._steps: list[_Step] = []
        self._dirty: dict[int, str] = {}
        self._attic = root / "attic"
        self._attic.mkdir(parents=True)
        self._kept = 0

    # ---- what the disk tells

    def made(self, path: str) -> None:
        self._steps.append(_Step(path, made=True))
        self._touch(path)

    def renaming(self, source: str, target: str) -> None:
        self._steps.append(_Step(source, target, self._keep(target)))

    def renamed(self, target: str) -> None:
        self._touch(target)

    def unlinking(self, path: str) -> None:
        self._steps.append(_Step(path, kept=self._keep(path)))

    def noting(self, path: str, name: str, before: bytes | None) -> None:
        self._steps.append(_Step(path, attribute=(name, before)))

    def synced(self, path: str) -> None:
        """A file with its bytes and its name. What happened before in the directories is in the same journal."""
        with contextlib.suppress(OSError):
            self._dirty.pop(os.stat(path).st_ino, None)
        self._drop_steps()

    def write_back(self) -> None:
        """What the kernel does every now and then."""
        self._dirty.clear()
        self._drop_steps()

    # ---- power

    def power_cut(self) -> str:
        """Take back what was not on the drive; what was done, in words."""
        kept = self.random.randint(0, len(self._steps))
        undone = self._steps[kept:]
        for step in reversed(undone):
            self._undo(step)
        torn = [path for inode, path in self._dirty.items() if self._is(path, inode) and self._tear(path)]
        for path in self.mem:
            remove_tree(path)
        self._steps.clear()
        self._dirty.clear()
        self._drop_steps()
        return f"{len(undone)} steps undone, {len(torn)} files torn"

    def _undo(self, step: _Step) -> None:
        with contextlib.suppress(OSError):
            if step.made:
                os.unlink(step.path)
            elif step.attribute is not None:
                _set_attribute(step.path, *step.attribute)
            elif step.target:
                os.rename(step.target, step.path)
        if step.kept:
            with contextlib.suppress(OSError):
                os.rename(step.kept, step.target or step.path)

    def _tear(self, path: str) -> bool:
        """Whether some of its bytes were lost."""
        size = os.stat(path).st_size
        kind = self.random.choice(("whole", "cut", "zeroed"))
        at = self.random.randrange(size + 1)
        if kind == "cut":
            os.truncate(path, at)
        elif kind == "zeroed":
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(bytes(size - at))
        return kind != "whole"

    # ---- rot

    def rot(self, path: str) -> str:
        """Damage a file that nobody has open, behind the kernel's back; what was done, or "" when it was not."""
        try:
            before, fd = _file_state(os.stat(path)), os.open(path, os.O_RDONLY)
        except OSError:
            return ""
        try:
            if before.size_bytes == 0 or lease.holders(fd) is Holders.SOME:
                return ""
        finally:
            os.close(fd)
        kind = self.random.choice(("flip", "flip", "cut", "longer"))
        if kind == "flip":
            self._flip(path, before.size_bytes)
            self.rotten[before.stamp.inode] = before
        elif kind == "cut":
            os.truncate(path, self.random.randrange(before.size_bytes))
        else:
            os.truncate(path, before.size_bytes + 1 + self.random.randrange(4096))
        self.cold.add(before.stamp.inode)
        return kind

    def _flip(self, path: str, size: int) -> None:
        at, bit = self.random.randrange(size), 1 << self.random.randrange(8)
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ bit]))

    def state(self, found: FileState) -> FileState:
        """Of a file, as the kernel would tell it. What it takes on the disk is never hidden: a note may have come."""
        before = self.rotten.get(found.stamp.inode)
        if before is None or before.size_bytes != found.size_bytes:
            return found
        return before._replace(allocated_bytes=found.allocated_bytes)

    def error(self, path: str, writes: bool) -> OSError | None:
        if self.broken and self.random.random() < self.broken:
            return OSError(errno.EIO, "Input/output error", path)
        if writes and self.full:
            return OSError(errno.ENOSPC, "No space left on device", path)
        return None

    # ---- the rest

    def _touch(self, path: str) -> None:
        with contextlib.suppress(OSError):
            self._dirty[os.stat(path).st_ino] = path

    def _is(self, path: str, inode: int) -> bool:
        try:
            return os.stat(path).st_ino == inode
        except OSError:
            return False

    def _keep(self, path: str) -> str:
        self._kept += 1
        kept = f"{self._attic}/{self._kept}"
        try:
            os.link(path, kept)
        except OSError:
            return ""
        return kept

    def _drop_steps(self) -> None:
        self._steps.clear()
        for name in os.listdir(self._attic):
            os.unlink(self._attic / name)


def remove_tree(path: str) -> None:
    """If it is there. As shutil.rmtree, in a third of the time: a volume has 256 directories."""
    try:
        with os.scandir(path) as entries:
            found = list(entries)
    except FileNotFoundError:
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(entry.path)
        else:
            os.unlink(entry.path)
    os.rmdir(path)


def _set_attribute(path: str, name: str, value: bytes | None) -> None:
    if value is None:
        os.removexattr(path, name)
    else:
        os.setxattr(path, name, value)
