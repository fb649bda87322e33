"""A whole keeper in a thread, real file system processes (`tests.support.tiny_fs`), a socket in place of /dev/fuse."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import pytest

from kvstore.keeper import crew, wire
from kvstore.keeper.adminport import address
from kvstore.keeper.channel import PASSTHROUGH_BIT
from kvstore.keeper.wire import Op
from tests.support.fake_device import FakeDevice, Ran, keeper_thread
from tests.support.keeper_calls import (
    WAIT_S,
    admin,
    command,
    counts,
    kill,
    look_up,
    open_file,
    read,
    release,
    until,
)
from tests.support.tiny_fs import ROOT

ENDED = "ended \\(code"


# Ordinary service.


def test_start_serve_end(ran: Ran, device: FakeDevice) -> None:
    inode = look_up(device, "file")
    handle, flags, backing_id = open_file(device, inode)
    assert handle & PASSTHROUGH_BIT
    assert flags == wire.FOPEN_PASSTHROUGH | wire.FOPEN_NOFLUSH
    assert device.backing == {backing_id: inode}
    until(lambda: counts(ran, "opens", "backing_ids", "pending") == [1, 1, 0])
    release(device, inode, handle)
    assert device.backing == {}
    assert counts(ran, "opens", "backing_ids", "offers", "outages", "generation") == [0, 0, 0, 0, 0]
    device.abort()
    assert ran.join() == 0


def test_a_reply_of_a_mebibyte(ran: Ran, device: FakeDevice, directory: Path) -> None:
    data = os.urandom(1 << 20)
    inode = look_up(device, "direct")
    handle, flags, _ = open_file(device, inode, os.O_RDWR)
    assert flags == wire.FOPEN_DIRECT_IO
    body = struct.pack("<QQIIQII", handle, 0, len(data), 0, 0, os.O_RDWR, 0) + data
    assert device.ask(Op.WRITE, inode, body) == (0, struct.pack("<II", len(data), 0))
    assert device.ask(Op.READ, inode, struct.pack("<QQI20x", handle, 0, len(data))) == (0, data)


def test_more_requests_than_the_socket_takes(ran: Ran, device: FakeDevice) -> None:
    """While the process sleeps its socket fills; nothing is lost, nothing is answered twice."""
    inode = look_up(device, "direct")
    handle, _, _ = open_file(device, inode, os.O_RDWR)
    slow = device.send(Op.LOOKUP, ROOT, b"sleep-0.5\0")
    data = bytes(1 << 20)
    body = struct.pack("<QQIIQII", handle, 0, len(data), 0, 0, os.O_RDWR, 0) + data
    writes = [device.send(Op.WRITE, inode, body) for _ in range(24)]
    assert device.reply(slow).error == errno.ENOENT
    for unique in writes:
        assert device.reply(unique) == (0, struct.pack("<II", len(data), 0))
    assert counts(ran, "pending", "answered_eio", "late_replies") == [0, 0, 0]


def test_readiness_is_told_once(directory: Path, device: FakeDevice, capfd: pytest.CaptureFixture[str]) -> None:
    address = f"kvstore-test-{os.getpid()}-keeper"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + address)
        sock.settimeout(WAIT_S)
        with keeper_thread(command(directory), device, notify_socket="@" + address) as ran:
            assert sock.recv(4096).decode().splitlines() == ["READY=1", "X_GENERATION=0", "X_LIVED=0", "X_AGAIN=0"]
            ran.keeper.stop()
            assert sock.recv(4096) == b"STOPPING=1"
            assert ran.join() == 0
    assert capfd.readouterr().out.count("tiny file system") == 1


# Starting.


def test_a_process_that_cannot_start_ends_the_keeper_with_its_code(directory: Path, device: FakeDevice) -> None:
    with keeper_thread(command(directory, "--exit", "3"), device) as ran:
        assert ran.join() == 3
    assert (device.mounts, device.unmounts) == (0, [])


@pytest.mark.allow_errors("cannot start")
def test_a_command_that_is_missing_ends_the_keeper(device: FakeDevice) -> None:
    with keeper_thread(["/nowhere/python"], device) as ran:
        assert ran.join() == 1


@pytest.mark.allow_errors("cannot mount")
def test_a_mount_that_fails_ends_all(directory: Path, device: FakeDevice) -> None:
    device.mount_error = errno.EPERM
    with keeper_thread(command(directory), device) as ran:
        assert ran.join() == 1


def test_a_process_that_dies_before_it_serves_leaves_no_mount(directory: Path, device: FakeDevice) -> None:
    script = "import os, socket; from kvstore.keeper.channel import *; i = Inheritance.from_environment();"
    script += "s = socket.socket(fileno=i.control_fd); send(s, Kind.READY); receive(s); os._exit(5)"
    with keeper_thread([sys.executable, "-c", script], device) as ran:
        assert ran.join() == 5
    assert (device.mounts, device.unmounts) == (1, [True])


def test_the_admin_socket_of_a_mount_that_had_the_same_number_may_end_late(directory: Path, device: FakeDevice) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as former:
        former.bind(address(device.connection))
        former.listen()
        threading.Timer(0.5, former.close).start()
        with keeper_thread(command(directory), device) as ran:
            until(lambda: former.fileno() == -1)
            until(lambda: ran.status()["state"] == "serving")
            assert admin(device, {"verb": "status"})["state"] == "serving"


def test_stopped_while_it_starts(directory: Path, device: FakeDevice) -> None:
    with keeper_thread(command(directory, "--start-delay", "60"), device) as ran:
        until(lambda: ran.keeper.crew.next is not None)
        ran.keeper.stop()
        assert ran.join(10) == 0
    assert device.mounts == 0


@pytest.mark.allow_errors("did not start, or not end, in time")
def test_a_start_that_takes_for_ever_ends(directory: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "START_LIMIT_S", 0.5)
    with keeper_thread(command(directory, "--start-delay", "60"), device) as ran:
        assert ran.join(10) == 128 + 9


def test_admin(ran: Ran, device: FakeDevice) -> None:
    status = admin(device, {"verb": "status"})
    assert status["pid"] == os.getpid()
    assert status["state"] == "serving"
    for unknown in ({"verb": "dance"}, {}, {"verb": "upgrade"}):
        assert "unknown verb" in admin(device, unknown)["error"]


# The end.


def test_stop_waits_for_users_then_detaches(
    directory: Path, device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.busy = True
    with keeper_thread(command(directory), device, busy_wait_s=0.5) as ran:
        inode = look_up(device, "direct")
        handle, _, _ = open_file(device, inode)
        begin = time.monotonic()
        ran.keeper.stop()
        assert read(device, inode, handle) == b"by READ", "served until the end"
        assert ran.join() == 0
        assert time.monotonic() - begin > 0.5
    assert device.unmounts[-1] is True
    assert set(device.unmounts[:-2]) == {False}
    assert "is busy" in caplog.text


@pytest.mark.allow_errors(ENDED, "before it could serve")
def test_unmounted_in_an_outage(ran: Ran, device: FakeDevice, directory: Path) -> None:
    ran.keeper.crew.spawner.argv = command(directory, "--start-delay", "30")
    kill(ran)
    until(lambda: ran.status()["state"] == "outage")
    device.abort()
    assert ran.join(10) == 0


@pytest.mark.allow_errors("did not start, or not end, in time")
def test_a_process_that_does_not_end_is_killed(ran: Ran, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "END_LIMIT_S", 0.5)
    pid = kill(ran, signal.SIGSTOP)
    device.abort()
    assert ran.join(10) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.allow_errors("could not be relayed", "the kernel refused")
def test_an_error_in_one_message_is_that_message_s(
    ran: Ran, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = look_up(device, "direct")

    def broken(flags: int) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(wire, "only_reads", broken)
    assert device.ask(Op.OPEN, inode, bytes(8)).error == errno.EIO
    monkeypatch.undo()
    assert open_file(device, inode)[0]
