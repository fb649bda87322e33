"""Who holds a mount, from /proc alone: looking at the mount itself may never return."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvstore.keeper import mountinfo

_LINKS: Final = {"cwd": "working directory", "root": "root directory", "exe": "program"}
_MNT_ID: Final = re.compile(rb"^mnt_id:\s*(\d+)", re.MULTILINE)
_SHOWN: Final = 4
"""Holders named in a line."""


class Holder(NamedTuple):
    pid: int
    command: str
    what: str
    """``fd 3 (/m/x)``, ``working directory /m/x``, ``map of /m/x`` …, and how many more."""


def describe(found: list[Holder]) -> str:
    """``held by python[812] (fd 3 (/m/x) and 2 more), …`` on one line."""
    if not found:
        return "its holder is gone or hidden"
    shown = [f"{h.command}[{h.pid}]: {h.what}" for h in found[:_SHOWN]]
    more = f", and {len(found) - _SHOWN} processes more" if len(found) > _SHOWN else ""
    return "held by " + ", ".join(shown) + more


def holders(directory: str) -> list[Holder]:
    """Processes with an open file, a map or a directory on it, as far as we may look into them."""
    there = mountinfo.find(directory)
    if there is None:
        return []
    found = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to look into
            uses = list(_uses(pid, there.device))
            if uses:
                more = f" and {len(uses) - 1} more" if len(uses) > 1 else ""
                found.append(Holder(pid, _command(pid), uses[0] + more))
    return found


def _uses(pid: int, device: str) -> Iterator[str]:
    mounts = [m for m in mountinfo.of_process(pid) if m.device == device]
    ids, paths = {m.id for m in mounts}, [m.path for m in mounts]
    home = f"/proc/{pid}"
    for link, name in _LINKS.items():
        with contextlib.suppress(OSError):
            target = os.readlink(f"{home}/{link}")
            if any(f"{target}/".startswith(f"{path.rstrip('/')}/") for path in paths):
                yield f"{name} {target}"
    for fd in sorted(os.listdir(f"{home}/fdinfo"), key=int):
        with contextlib.suppress(OSError):
            mount_id = _MNT_ID.search(_read(f"{home}/fdinfo/{fd}"))
            if mount_id is not None and int(mount_id[1]) in ids:
                yield f"fd {fd} ({os.readlink(f'{home}/fd/{fd}')})"
    yield from _maps(home, device)


def _maps(home: str, device: str) -> Iterator[str]:
    major, _, minor = device.partition(":")
    wanted = f"{int(major):02x}:{int(minor):02x}".encode()
    seen = set()
    for line in _read(f"{home}/maps").splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[3] == wanted and fields[5] not in seen:
            seen.add(fields[5])
            yield f"map of {os.fsdecode(fields[5])}"


def _command(pid: int) -> str:
    return os.fsdecode(_read(f"/proc/{pid}/comm")).strip()


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
