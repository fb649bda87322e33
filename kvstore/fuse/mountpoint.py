"""Mount points: what is mounted where, dead mounts, read-ahead.

Never stats a path that may be a dead mount: that can block for good.

All knowledge comes from ``/proc/self/mountinfo``; a mount that is ours and whose process is gone answers ENOTCONN.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.core.errors import AlreadyExists, Denied, KvError, NotDirectory, Unavailable, Unsupported

FS_NAME: Final = "kvstore"
FS_TYPE: Final = "fuse.kvstore"
MOUNTINFO: Final = "/proc/self/mountinfo"
DEVICE: Final = "/dev/fuse"
_UNMOUNT_TIMEOUT_S: Final = 10.0
_PROBE_TIMEOUT_S: Final = 2.0
_MNT_DETACH: Final = 2
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


class Mounted(NamedTuple):
    """A line of mountinfo."""

    device: str
    """``major:minor``; a FUSE mount's minor is the number of its connection."""
    path: str
    fs_type: str


def parse_mountinfo(text: str) -> list[Mounted]:
    """Mounts in the order they were made."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if len(fields) >= 5 and kinds[0]:
            mounts.append(Mounted(fields[2], _unescape(fields[4]), kinds[0]))
    return mounts


def _unescape(field: str) -> str:
    """Space, tab, line break and backslash stand as octal escapes; other bytes as they are."""
    return _OCTAL.sub(lambda m: chr(int(m.group(1), 8)), field)


def find(directory: str) -> Mounted | None:
    """The topmost mount on exactly this directory."""
    text = Path(MOUNTINFO).read_bytes().decode(errors="surrogateescape")
    return next((m for m in reversed(parse_mountinfo(text)) if m.path == directory), None)


def absolute(directory: str) -> str:
    """Absolute, with the links of its *parent* resolved: resolving the directory itself would stat a dead mount."""
    parent, name = os.path.split(os.path.abspath(directory))
    return os.path.join(os.path.realpath(parent), name)


def prepare(directory: str) -> list[str]:
    """Make `directory` (absolute) ready to be mounted on. Returns lines about what was there: a dead mount, files.

    Raises AlreadyExists when a living mount is there, Denied, NotDirectory or Unavailable with what to do.
    """
    found = []
    while (there := find(directory)) is not None:
        if there.fs_type != FS_TYPE or is_alive(there):
            raise AlreadyExists(
                f"{directory} is a mount point already ({there.fs_type}); unmount it first: umount {directory}"
            )
        detach(directory)
        found.append(f"{directory}: cleaned up the mount point that a killed process left behind")
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotDirectory(f"{directory} is not a directory; name one to mount on") from None
    except PermissionError:
        raise Denied(f"{directory}: no right to make this directory; make it, or run as root") from None
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        if any(entries):
            found.append(f"{directory} is not empty: what lies in it is hidden as long as the store is mounted on it")
    return found


def is_alive(mount: Mounted) -> bool:
    """Whether a process serves this mount. A child process asks, since only its kill ends a question that hangs.

    A mount that is connected but does not answer counts as alive: it is not ours to clean.
    """
    command = ["stat", "-f", "--", mount.path]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_PROBE_TIMEOUT_S, env={**os.environ, "LC_ALL": "C"}, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode == 0 or os.strerror(errno.ENOTCONN).encode() not in done.stderr


def detach(directory: str) -> None:
    """Lazy unmount: the name is free at once, the mount ends with its last user. Never blocks on a dead mount."""
    if find(directory) is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(directory), _MNT_DETACH) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EPERM:
        raise Unavailable(f"cannot unmount {directory}: {os.strerror(code)}")
    _run(["fusermount3", "-u", "-z", "--", directory])


def unmount(directory: str) -> bool:
    """Ordinary unmount; False when somebody still uses it."""
    if find(directory) is None:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(directory), 0) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EPERM:
        try:
            _run(["fusermount3", "-u", "--", directory])
        except KvError:
            return False
        return True
    return False


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_UNMOUNT_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise Unsupported(f"{command[0]} is not installed: apt-get install fuse3") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command)} did not end within {_UNMOUNT_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.decode(errors='replace').strip()}")


def check_prerequisites() -> None:
    """Raises Unsupported or Denied with one line that says what is missing."""
    if not os.path.exists(DEVICE):
        raise Unsupported(
            f"{DEVICE} is not there: load the fuse module, or give it to the container (docker run --device {DEVICE})"
        )
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise Denied(f"{DEVICE} cannot be opened by this user; run as root, or let it in")
    if os.geteuid() != 0 and not _in_path("fusermount3"):
        raise Unsupported("mounting without root needs fusermount3: apt-get install fuse3")


def _in_path(program: str) -> bool:
    return any(os.access(os.path.join(d, program), os.X_OK) for d in os.environ.get("PATH", "").split(os.pathsep))


def set_read_ahead(mount: Mounted, size_bytes: int) -> bool:
    """Raise the kernel's read-ahead (128 KiB for FUSE, and reads come in such pieces). False without the right to."""
    try:
        Path(f"/sys/class/bdi/{mount.device}/read_ahead_kb").write_text(str(size_bytes // 1024))
    except OSError:
        return False
    return True
