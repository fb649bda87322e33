"""What tests ask of a keeper that runs in a thread, as kernel and as administrator."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvstore.keeper import adminport, wire
from kvstore.keeper.wire import Op
from tests.support.fake_device import FakeDevice, Ran
from tests.support.tiny_fs import ROOT

WAIT_S: Final = 20.0


def command(directory: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.tiny_fs", str(directory), *options]


def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def kill(ran: Ran, number: int = signal.SIGKILL) -> int:
    """Signal the process that serves; its pid."""
    pid = int(ran.status()["fs_pid"])
    assert pid
    os.kill(pid, number)
    return pid


def new_server(ran: Ran, old_pid: int) -> None:
    """Wait until another process serves."""
    until(lambda: ran.status()["fs_pid"] not in (0, old_pid) and ran.status()["state"] == "serving")


def look_up(device: FakeDevice, name: str) -> int:
    """Its inode."""
    error, body = device.ask(Op.LOOKUP, ROOT, name.encode() + b"\0")
    assert error == 0
    return int(struct.unpack_from("<Q", body)[0])


def open_file(device: FakeDevice, inode: int, flags: int = os.O_RDONLY) -> tuple[int, int, int]:
    """(handle, FOPEN flags, backing id)."""
    error, body = device.ask(Op.OPEN, inode, struct.pack("<II", flags, 0))
    assert error == 0
    return wire.OPEN_OUT.unpack(body)


def read(device: FakeDevice, inode: int, handle: int) -> bytes:
    error, body = device.ask(Op.READ, inode, struct.pack("<QQI20x", handle, 0, 100))
    assert error == 0
    return body


def release(device: FakeDevice, inode: int, handle: int) -> None:
    assert device.ask(Op.RELEASE, inode, struct.pack("<QIIQ", handle, 0, 0, 0)) == (0, b"")


def counts(ran: Ran, *names: str) -> list[Any]:
    status = ran.status()
    return [status[name] for name in names]


def admin(device: FakeDevice, question: dict[str, str]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(adminport.address(device.connection))
        sock.send(json.dumps(question).encode())
        answer = json.loads(sock.recv(adminport.MAX_BYTES))
        assert isinstance(answer, dict)
        return answer
