"""What the keeper shows and reads outside its mount: log lines, readiness, /proc, admin socket, command line."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.keeper import adminport, holders, logs, mountinfo
from kvstore.keeper.__main__ import main
from kvstore.keeper.adminport import AdminPort
from kvstore.keeper.loop import Loop
from kvstore.keeper.notify import Notifier
from kvstore.obs import logging as obs_logging

WAIT_S = 10.0


# Log lines and readiness: as the rest of kvstore writes them.


@pytest.mark.parametrize("format", ["text", "json"])
def test_log_lines_are_those_of_the_other_components(format: str) -> None:
    try:
        raise ValueError("inner")
    except ValueError:
        trace = sys.exc_info()
    for message, exc_info in (("plain", None), ("two\nlines \x1b[1m", None), ("with", trace)):
        record = logging.LogRecord("kvstore.keeper.x", logging.WARNING, "f", 1, message, (), exc_info)
        if format == "json":
            ours, theirs = logs.JsonFormatter().format(record), obs_logging.JsonFormatter("keeper").format(record)
        else:
            ours, theirs = logs.TextFormatter().format(record), obs_logging.TextFormatter("keeper").format(record)
        assert ours == theirs


def test_readiness(tmp_path: Path) -> None:
    for address, bound in (
        (f"@kvstore-test-{os.getpid()}", f"\0kvstore-test-{os.getpid()}"),
        (str(tmp_path / "s"),) * 2,
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.bind(bound)
            sock.settimeout(WAIT_S)
            Notifier(address).ready({"mount": "/m", "pid": "1"})
            Notifier(address).stopping()
            assert [sock.recv(4096), sock.recv(4096)] == [b"READY=1\nX_MOUNT=/m\nX_PID=1", b"STOPPING=1"]
    Notifier("").ready({})
    Notifier(f"@kvstore-test-{os.getpid()}").stopping()  # nobody listens any more


# /proc.


def test_mountinfo() -> None:
    text = (
        b"22 27 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n"
        b"42 27 0:39 / /mnt/a\\040b\\134\xff rw,relatime - fuse.kvstore kvstore rw,user_id=0\n"
        b"broken\n"
    )
    mounts = mountinfo.parse(text)
    assert mounts == [(22, "0:20", "/sys", "sysfs"), (42, "0:39", "/mnt/a b\\\udcff", "fuse.kvstore")]
    assert mounts[1].minor == 39
    proc = mountinfo.find("/proc/")
    assert proc is not None
    assert proc.fs_type == "proc"
    assert mountinfo.find("/proc/self") is None


def test_holders(tmp_path: Path) -> None:
    """By the file system under the test's directory: whoever has a file of it open holds that mount."""
    path = tmp_path
    while mountinfo.find(str(path)) is None:
        path = path.parent
    (tmp_path / "f").write_bytes(bytes(8192))
    script = (
        "import mmap, sys, time; f = open('f', 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); m[0];"
        "print(flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"\n"
        there = mountinfo.find(str(path))
        assert there is not None
        uses = list(holders._uses(child.pid, there.device))
        assert f"working directory {tmp_path}" in uses
        assert f"fd 3 ({tmp_path}/f)" in uses
        assert f"map of {tmp_path}/f" in uses
        found = {h.pid: h for h in holders.holders(str(path))}
        assert found[child.pid].command.startswith("python")
        assert f"and {len(uses) - 1} more" in found[child.pid].what
    finally:
        child.kill()
        child.communicate()


def test_describing_holders() -> None:
    assert holders.holders("/nowhere") == []
    assert holders.describe([]) == "its holder is gone or hidden"
    many = [holders.Holder(i, "cat", "fd 3 (/m/x)") for i in range(6)]
    assert holders.describe(many[:1]) == "held by cat[0]: fd 3 (/m/x)"
    assert holders.describe(many).endswith("cat[3]: fd 3 (/m/x), and 2 processes more")


# The admin socket.


@pytest.fixture
def port() -> Iterator[tuple[Loop, int]]:
    number = 2_000_000_000 + os.getpid()
    with (
        closing(Loop(lambda: None)) as loop,
        closing(AdminPort(loop, number, lambda question, answer: answer({"echo": question}))),
    ):
        yield loop, number


def connected(made: Loop, number: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(WAIT_S)
    sock.connect(adminport.address(number))
    made.run_once()
    return sock


def test_questions_and_answers(port: tuple[Loop, int]) -> None:
    with connected(*port) as sock:
        for verb in ("a", "b"):
            sock.send(json.dumps({"verb": verb}).encode())
            port[0].run_once()
            assert json.loads(sock.recv(4096)) == {"echo": {"verb": verb}}


@pytest.mark.parametrize("garbage", [b"\xff\x00", b"{", b"[1]", b"null"])
def test_garbage_ends_that_connection_only(port: tuple[Loop, int], garbage: bytes) -> None:
    with connected(*port) as good, connected(*port) as bad:
        bad.send(garbage)
        port[0].run_once()
        assert bad.recv(4096) == b""
        good.send(b"{}")
        port[0].run_once()
        assert json.loads(good.recv(4096)) == {"echo": {}}


def test_connections_are_bounded(port: tuple[Loop, int]) -> None:
    socks = [connected(*port) for _ in range(adminport.MAX_CONNECTIONS + 1)]
    assert socks[0].recv(10) == b""
    socks[-1].send(b"{}")
    port[0].run_once()
    assert socks[-1].recv(4096)
    for sock in socks:
        sock.close()
    port[0].run_once()


def test_other_users_are_sent_away(port: tuple[Loop, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adminport, "_PEER", _Peer())
    with connected(*port) as sock:
        assert sock.recv(10) == b""


class _Peer:
    """Credentials of a stranger."""

    size = 12

    def unpack(self, data: bytes) -> tuple[int, int, int]:
        return 1, os.geteuid() + 4711, 1


def test_an_address_is_taken_once(port: tuple[Loop, int]) -> None:
    with pytest.raises(OSError, match="in use") as caught:
        AdminPort(port[0], port[1], lambda question, answer: None)
    assert caught.value.errno == errno.EADDRINUSE


# The command line.


@pytest.mark.parametrize(
    "argv", [["/m"], ["/m", "--"], [], ["--deadline", "soon", "/m", "--", "x"], ["--dead", "1", "/m", "--", "x"]]
)
def test_wrong_arguments_are_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: kvstore.keeper" in capsys.readouterr().err
