"""A plain directory that keeps the mount's promise where that is not POSIX: the deliberate differences as code.

`Promise.tree` holds what everybody sees. Who writes an ordinary file has its bytes apart from it (`work`), shared with
all other writers of the name; each close and fsync publishes them, as a new file under the name. So whoever had the
former one open to read keeps it. A temporary name has no file in the tree while it is written for the first time.

Methods in the present tense say what to do on the plain side; those in the past tense are told what was done on both.
Paths are relative to `tree`. Everything here runs in the test's process: a plain directory does not hang.
"""

from __future__ import annotations

import filecmp
import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath

from tests.support import fsops
from tests.support.actor import UMASK
from tests.support.fsops import Call, Failed, call


@dataclass(eq=False)
class Copy:
    """The bytes of a file that is written, or the version of a temporary name that somebody has open.

    `parked`: where they lie in `work`; None for a temporary file that can be seen, which lies in the tree.
    `name`: its path in the tree; None when it has lost it. `handles`: descriptions (a duplicate is not another one).
    """

    name: str | None
    temporary: bool
    parked: Path | None
    handles: int = 0
    superseded: bool = False
    """A later version has taken its temporary name over: whether it still counts as a name of this one is open."""

    @property
    def is_hidden(self) -> bool:
        return self.temporary and self.parked is not None


@dataclass(eq=False)
class Opened:
    """An open file description. `copy`: None for a reader of what is published; `fds`: it and its duplicates."""

    copy: Copy | None = None
    writes: bool = False
    fds: int = 1


def is_temporary(path: str) -> bool:
    """As the mount's default patterns have it: ``*.tmp`` and ``.tmp/*``."""
    parsed = PurePath(path)
    return (parsed.suffix == ".tmp" and parsed.name != ".tmp") or parsed.parent.name == ".tmp"


class Promise:
    """See the module. `differs` is told the name of each difference when it shows."""

    def __init__(self, root: Path, differs: Callable[[str], None]) -> None:
        self.tree, self._work = root / "tree", root / "work"
        self.tree.mkdir(parents=True)
        self._work.mkdir()
        self._differs, self._numbers = differs, itertools.count()
        self.copies: list[Copy] = []
        self.rewritten: set[str] = set()
        """Temporary names that were written again after a close: their former bytes wait for another rename."""

    def is_written(self, path: str) -> bool:
        """Whether somebody writes this temporary name."""
        return any(c.is_hidden and c.name == path for c in self.copies)

    # ---- open files ----

    def open(self, handle: int, path: str, flags: int, mode: int) -> tuple[Call, Opened]:
        as_it_is = call(fsops.open_file, handle, path, flags, mode)
        here, writes = self.tree / path, (flags & os.O_ACCMODE) != os.O_RDONLY or bool(flags & os.O_TRUNC)
        creates = bool(flags & os.O_CREAT) and here.parent.is_dir() and not os.path.lexists(here)
        refused = here.is_file() and (flags & (os.O_CREAT | os.O_EXCL)) == os.O_CREAT | os.O_EXCL
        if refused or flags & os.O_DIRECTORY or not (creates or here.is_file()):
            return as_it_is, Opened()
        if creates and not writes and not is_temporary(path):  # it reads the empty version that everybody sees
            self._make(path, mode)
            return call(fsops.open_file, handle, path, flags & ~os.O_EXCL), Opened()
        if not creates and not writes:
            return as_it_is, Opened(self._version_to_read(path))
        make = self._version_to_write if is_temporary(path) else self._copy_to_write
        copy = make(path, flags, mode)
        in_place = flags & ~(os.O_CREAT | os.O_EXCL)
        return call(fsops.open_file, handle, str(copy.parked), in_place, mode), Opened(copy, writes)

    def opened(self, opened: Opened, *, failed: bool) -> None:
        if opened.copy is not None:
            opened.copy.handles += not failed
            self._tidy(opened.copy)

    def closed(self, opened: Opened) -> None:
        """One of its descriptors."""
        copy, opened.fds = opened.copy, opened.fds - 1
        if copy is None:
            return
        if opened.writes:
            self.publish(copy)
        copy.handles -= opened.fds == 0
        if copy.is_hidden and copy.handles == 0:
            self._appear(copy)
        self._tidy(copy)

    def synced(self, opened: Opened) -> None:
        if opened.copy is not None:
            self.publish(opened.copy)

    def publish(self, copy: Copy) -> None:
        """A new file under its name, unless it holds what is there."""
        if copy.temporary or copy.name is None or copy.parked is None:
            return
        here = self.tree / copy.name
        if filecmp.cmp(copy.parked, here, shallow=False):
            return
        self._differs("published at close")
        fresh, attributes = self._new_path(), os.stat(here)
        shutil.copyfile(copy.parked, fresh)
        shutil.copystat(copy.parked, fresh)
        os.chmod(fresh, attributes.st_mode)
        os.replace(fresh, here)

    def _copy_to_write(self, path: str, _: int, mode: int) -> Copy:
        here = self.tree / path
        if not here.exists():
            self._make(path, mode)
        copy = self._find(path)
        if copy is None:
            copy = Copy(path, False, self._new_path())
            shutil.copy2(here, str(copy.parked))
            self.copies.append(copy)
        return copy

    def _make(self, path: str, mode: int) -> None:
        """An empty file that everybody sees."""
        (self.tree / path).touch()
        (self.tree / path).chmod(mode & ~UMASK)

    def _version_to_read(self, path: str) -> Copy | None:
        if not is_temporary(path):
            return None
        copy = self._find(path)
        if copy is None:
            copy = Copy(path, True, None)
            self.copies.append(copy)
        return copy

    def _version_to_write(self, path: str, flags: int, mode: int) -> Copy:
        here, parked = self.tree / path, self._new_path()
        parked.touch()
        mode &= ~UMASK
        if here.exists():
            self._differs("temporary name written again")
            self.rewritten.add(path)
            mode = here.stat().st_mode
            if not flags & os.O_TRUNC and (flags & os.O_APPEND or (flags & os.O_ACCMODE) == os.O_RDWR):
                shutil.copyfile(here, parked)
        else:
            self._differs("temporary name appears at close")
        parked.chmod(mode)
        copy = Copy(path, True, parked)
        self.copies.append(copy)
        return copy

    def _appear(self, copy: Copy) -> None:
        if copy.name is None or copy.parked is None or not (self.tree / copy.name).parent.is_dir():
            self._lose(copy)
            return
        for other in [c for c in self.copies if c.name == copy.name and not c.is_hidden]:
            self._lose(other)
            other.superseded = True
        os.replace(copy.parked, self.tree / copy.name)
        copy.parked = None

    # ---- names ----

    def truncate(self, path: str, size: int) -> tuple[Call, Opened]:
        """As somebody who opens it, truncates and closes. End it with `opened` and `closed`."""
        here = self.tree / path
        if is_temporary(path) or not here.is_file():
            return call(fsops.truncate, path, size), Opened()
        copy = self._copy_to_write(path, 0, 0)
        return call(fsops.truncate, str(copy.parked), size), Opened(copy, writes=True)

    def attributes_changed(self, path: str, change: Callable[[Path], None]) -> None:
        """Of what is published: those who write it see it too."""
        copy = self._find(path)
        if copy is not None and copy.parked is not None:
            change(copy.parked)

    def open_attributes_changed(self, opened: Opened, change: Callable[[Path], None]) -> None:
        """By who writes it: of what is published, too."""
        copy = opened.copy
        if copy is not None and copy.name is not None and not copy.temporary:
            change(self.tree / copy.name)

    def make_directory(self, path: str) -> Call | Failed:
        here = self.tree / path
        if is_temporary(path) and here.parent.is_dir() and not os.path.lexists(here):
            self._differs("no temporary directories")
            return Failed("EPERM")
        return call(fsops.make_directory, path)

    def rename(self, source: str, target: str, flags: int) -> Call | Failed:
        as_it_is = call(fsops.rename, source, target, flags)
        here, there = self.tree / source, self.tree / target
        if is_temporary(source) or not is_temporary(target):
            return as_it_is
        inside = source == "." or target.startswith(f"{source}/")
        taken = os.path.lexists(there) and (flags or here.is_dir())
        if inside or taken or not os.path.lexists(here) or not there.parent.is_dir():
            return as_it_is  # refused before anybody looks at the name
        self._differs("no way back to a temporary name")
        return Failed("EXDEV")

    def renamed(self, source: str, target: str) -> None:
        if source == target:
            return
        for copy in list(self.copies):
            if copy.name is not None and (
                (copy.name == target and not copy.is_hidden) or copy.name.startswith(f"{target}/")
            ):
                self._lose(copy)
        for copy in list(self.copies):
            if copy.name == source and not copy.is_hidden:
                # Who reads what was published just now keeps it, like everybody else.
                copy.name = None if copy.temporary and not is_temporary(target) else target
            elif copy.name is not None and copy.name.startswith(f"{source}/"):
                copy.name = target + copy.name[len(source) :]
        self.rewritten = {
            target + name[len(source) :] if name.startswith(f"{source}/") else name for name in self.rewritten
        } - {target}

    def unlinked(self, path: str) -> None:
        self.rewritten.discard(path)
        for copy in [c for c in self.copies if c.name == path and not c.is_hidden]:
            self._lose(copy)

    def _lose(self, copy: Copy) -> None:
        """Its name. Its bytes stay with those who have it open."""
        copy.name = None
        if copy.parked is not None:
            copy.parked.unlink()
            copy.parked = None

    def _tidy(self, copy: Copy) -> None:
        if copy.handles == 0 and copy in self.copies:
            self.copies.remove(copy)
            if copy.parked is not None:
                copy.parked.unlink()

    def _find(self, path: str) -> Copy | None:
        return next((c for c in self.copies if c.name == path and not c.is_hidden), None)

    def _new_path(self) -> Path:
        return self._work / str(next(self._numbers))
