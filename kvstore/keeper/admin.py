"""Asking a mount's keeper: how it is, and to replace its file system process. Never touches the mount itself."""

from __future__ import annotations

import json
import socket
from typing import Any, Final, NamedTuple

from kvstore.keeper import mountinfo
from kvstore.keeper.adminport import MAX_BYTES, address

STATUS_TIMEOUT_S: Final = 5.0
UPGRADE_TIMEOUT_S: Final = 100.0
"""Above all that an upgrade may take: start, quiet, yield, serve."""


class NoKeeper(Exception):
    """No keeper answers for this directory."""


class UpgradeFailed(Exception):
    """With the keeper's reason; whoever served before still does."""


class Upgraded(NamedTuple):
    old_pid: int
    new_pid: int
    pause_s: float
    """How long new calls waited."""


def status(directory: str, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, Any]:
    """Its state and counts, as `Keeper.status` lists them. Raises NoKeeper."""
    return _ask(directory, {"verb": "status"}, timeout_s)


def upgrade(directory: str, python: str, timeout_s: float = UPGRADE_TIMEOUT_S) -> Upgraded:
    """Let `python` (an executable) run the file system process from now on. Returns when the new one serves.

    Raises NoKeeper, UpgradeFailed.
    """
    answer = _ask(directory, {"verb": "upgrade", "python": python}, timeout_s)
    if "error" in answer:
        raise UpgradeFailed(str(answer["error"]))
    return Upgraded(int(answer["old_pid"]), int(answer["new_pid"]), float(answer["pause_s"]))


def _ask(directory: str, question: dict[str, str], timeout_s: float) -> dict[str, Any]:
    there = mountinfo.find(directory)
    if there is None or there.fs_type != mountinfo.FS_TYPE:
        raise NoKeeper(f"{directory} is no kvstore mount")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(timeout_s)
            sock.connect(address(there.minor))
            sock.send(json.dumps(question).encode())
            data = sock.recv(MAX_BYTES)
    except TimeoutError:
        raise NoKeeper(f"the keeper of {directory} does not answer within {timeout_s:g} s") from None
    except ConnectionRefusedError:
        raise NoKeeper(
            f"{directory} has no keeper: it is mounted without passthrough, or its keeper is dead; unmount it and "
            "mount it anew"
        ) from None
    except OSError as error:
        raise NoKeeper(f"the keeper of {directory} cannot be asked: {error.strerror}") from None
    if not data:
        raise NoKeeper(f"the keeper of {directory} refused to answer: it takes root, or the user that it runs as")
    answer = json.loads(data)
    assert isinstance(answer, dict)
    return answer
