"""A whole keeper in a thread, real file system processes (`tests.support.tiny_fs`), a socket in place of /dev/fuse."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.keeper import adminport, crew, watchdog, wire
from kvstore.keeper.channel import PASSTHROUGH_BIT
from kvstore.keeper.wire import Op
from tests.support.fake_device import FakeDevice, Ran, keeper_thread
from tests.support.tiny_fs import ROOT

WAIT_S = 20.0
ENDED = "ended \\(code"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """What the file system shows."""
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "file").write_bytes(b"by passthrough")
    (shown / "direct").write_bytes(b"by READ")
    return shown


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with closing(FakeDevice()) as device:
        yield device


def command(directory: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.tiny_fs", str(directory), *options]


@pytest.fixture
def ran(directory: Path, device: FakeDevice) -> Iterator[Ran]:
    with keeper_thread(command(directory), device) as ran:
        until(lambda: ran.status()["state"] == "serving")
        yield ran


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


# Ordinary service.


def test_start_serve_end(ran: Ran, device: FakeDevice) -> None:
    inode = look_up(device, "file")
    handle, flags, backing_id = open_file(device, inode)
    assert handle & PASSTHROUGH_BIT
    assert flags == wire.FOPEN_PASSTHROUGH | wire.FOPEN_NOFLUSH
    assert device.backing == {backing_id: inode}
    assert counts(ran, "opens", "backing_ids", "pending") == [1, 1, 0]
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


# Hand-over.


@pytest.mark.allow_errors(ENDED)
def test_a_killed_process_is_replaced_and_nobody_notices(ran: Ran, device: FakeDevice) -> None:
    file, direct = look_up(device, "file"), look_up(device, "direct")
    first, _, backing_id = open_file(device, file)
    handle, _, _ = open_file(device, direct)
    pid = kill(ran)
    asked = [device.send(Op.LOOKUP, ROOT, b"file\0") for _ in range(50)]
    assert all(device.reply(unique).error == 0 for unique in asked)
    assert read(device, direct, handle) == b"by READ"
    second, flags, again = open_file(device, file)
    assert (flags, again) == (wire.FOPEN_PASSTHROUGH | wire.FOPEN_NOFLUSH, backing_id)
    assert second != first
    for number in (first, second):
        release(device, file, number)
    release(device, direct, handle)
    new_server(ran, pid)
    assert counts(ran, "opens", "backing_ids", "outages", "fs_restarts", "answered_eio", "generation") == [
        0, 0, 1, 1, 0, 1,
    ]  # fmt: skip


@pytest.mark.allow_errors(ENDED)
def test_what_was_under_way_is_sent_again(ran: Ran, device: FakeDevice, directory: Path) -> None:
    """The process dies after it has read them: even an exclusive CREATE and a RENAME are done exactly once."""
    slow = device.send(Op.LOOKUP, ROOT, b"sleep-1\0")
    until(lambda: ran.status()["pending"] == 1)
    (directory / "made").touch()  # as if the dead process had done it
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    create = device.send(Op.CREATE, ROOT, struct.pack("<4I", flags, 0o600, 0, 0) + b"made\0")
    rename = device.send(Op.RENAME, ROOT, struct.pack("<Q", ROOT) + b"file\0renamed\0")
    until(lambda: ran.status()["pending"] == 3)
    kill(ran)
    assert device.reply(create).error == 0
    assert device.reply(rename).error == 0
    assert device.reply(slow).error == errno.ENOENT
    assert sorted(os.listdir(directory)) == ["direct", "made", "renamed"]
    assert counts(ran, "resent", "opens") == [3, 1]


@pytest.mark.allow_errors(ENDED)
def test_kept_files_reach_the_successor(ran: Ran, device: FakeDevice) -> None:
    inode = look_up(device, "direct")
    handle, _, _ = open_file(device, inode)
    assert device.ask(Op.UNLINK, ROOT, b"direct\0").error == 0
    until(lambda: ran.status()["kept"] == 1)
    new_server(ran, kill(ran))
    assert read(device, inode, handle) == b"by READ"
    release(device, inode, handle)
    until(lambda: ran.status()["kept"] == 0)


@pytest.mark.allow_errors(ENDED, "before it could serve", "had no answer", "nobody serves")
def test_nobody_comes_back(ran: Ran, device: FakeDevice, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO at the deadline, at once after it, and service again when somebody can."""
    inode = look_up(device, "file")
    handle, _, _ = open_file(device, inode)
    until(lambda: ran.status()["pending"] == 0)
    under_way = device.send(Op.LOOKUP, ROOT, b"sleep-5\0")
    until(lambda: ran.status()["pending"] == 1)
    monkeypatch.setattr(ran.keeper.crew, "_argv", command(directory, "--exit", "1"))
    begin = time.monotonic()
    kill(ran)
    waiting = device.send(Op.LOOKUP, ROOT, b"file\0")
    assert device.reply(under_way).error == errno.EIO
    assert device.reply(waiting).error == errno.EIO
    assert 0.7 < time.monotonic() - begin < 5.0
    begin = time.monotonic()
    assert device.ask(Op.FLUSH, inode, bytes(24)).error == errno.EIO
    release(device, inode, handle)
    assert time.monotonic() - begin < 0.5
    assert ran.status()["state"] == "failing"
    assert device.backing == {}
    ran.keeper.crew._argv = command(directory)
    until(lambda: ran.status()["state"] == "serving")
    assert look_up(device, "file") == inode
    assert counts(ran, "opens", "outages") == [0, 1]


@pytest.mark.allow_errors("no sign of life", "had no answer", ENDED)
def test_a_stopped_process_is_answered_for_and_replaced(
    directory: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "SILENT_S", 0.75)
    with keeper_thread(command(directory), device, deadline_s=1.5, slow_deadline_s=60.0) as ran:
        until(lambda: ran.status()["state"] == "serving")
        pid = kill(ran, signal.SIGSTOP)
        begin = time.monotonic()
        assert device.ask(Op.LOOKUP, ROOT, b"file\0").error == errno.EIO
        assert 1.0 < time.monotonic() - begin < 10.0
        new_server(ran, pid)
        look_up(device, "file")
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.allow_errors("had no answer")
def test_a_slow_answer_is_not_waited_for_beyond_its_deadline(directory: Path, device: FakeDevice) -> None:
    """The process is alive all the time. Its late open is closed again."""
    with keeper_thread(command(directory), device, deadline_s=5.0, slow_deadline_s=0.5) as ran:
        inode = look_up(device, "file")
        slow = device.send(Op.LOOKUP, ROOT, b"sleep-1.5\0")
        late = device.send(Op.OPEN, inode, bytes(8))
        assert device.reply(slow).error == errno.EIO
        assert device.reply(late).error == errno.EIO
        until(lambda: ran.status()["late_replies"] == 2)
        assert look_up(device, "file") == inode
        assert counts(ran, "opens", "backing_ids", "offers", "fs_restarts") == [0, 0, 0, 0]


@pytest.mark.allow_errors(ENDED, "before it could serve", "had no answer", "nobody serves")
def test_a_request_that_kills_is_given_up(ran: Ran, device: FakeDevice) -> None:
    """Each successor gets it again and dies of it, until its deadline."""
    assert device.ask(Op.LOOKUP, ROOT, b"die\0").error == errno.EIO
    until(lambda: device.ask(Op.LOOKUP, ROOT, b"file\0").error == 0)


# Upgrades.


def admin(device: FakeDevice, question: dict[str, str]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(adminport.address(device.connection))
        sock.send(json.dumps(question).encode())
        answer = json.loads(sock.recv(adminport.MAX_BYTES))
        assert isinstance(answer, dict)
        return answer


def test_upgrade(ran: Ran, device: FakeDevice, tmp_path: Path) -> None:
    direct = look_up(device, "direct")
    handle, _, _ = open_file(device, direct)
    old = ran.status()["fs_pid"]
    other_python = tmp_path / "python"
    other_python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other_python.chmod(0o755)
    answer = admin(device, {"verb": "upgrade", "python": str(other_python)})
    assert answer["old_pid"] == old
    assert answer["new_pid"] == ran.status()["fs_pid"] != old
    assert 0.0 <= answer["pause_s"] < 2.0
    assert read(device, direct, handle) == b"by READ"
    assert counts(ran, "state", "outages", "fs_restarts", "generation", "answered_eio") == ["serving", 0, 0, 1, 0]
    assert ran.keeper.crew._argv[0] == str(other_python), "whoever comes next runs by it too"


def test_requests_under_way_are_answered_before_an_upgrade(ran: Ran, device: FakeDevice) -> None:
    slow = device.send(Op.LOOKUP, ROOT, b"sleep-0.7\0")
    until(lambda: ran.status()["pending"] == 1)
    answer = admin(device, {"verb": "upgrade", "python": sys.executable})
    assert "new_pid" in answer
    assert device.reply(slow).error == errno.ENOENT
    assert counts(ran, "resent", "answered_eio") == [0, 0]


@pytest.mark.allow_errors("did not start, or not end, in time")
def test_an_upgrade_does_not_wait_for_ever_for_the_old_process(directory: Path, device: FakeDevice) -> None:
    with keeper_thread(command(directory), device, slow_deadline_s=30.0, deadline_s=30.0) as ran:
        until(lambda: ran.status()["state"] == "serving")
        pid = kill(ran, signal.SIGSTOP)
        waiting = device.send(Op.LOOKUP, ROOT, b"file\0")
        answer = admin(device, {"verb": "upgrade", "python": sys.executable})
        assert answer["old_pid"] == pid
        assert 3.0 < answer["pause_s"] < 10.0
        assert device.reply(waiting).error == 0
        assert counts(ran, "resent") == [1]


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
@pytest.mark.allow_errors("before it could serve")
def test_a_failed_upgrade_leaves_the_old_process(ran: Ran, device: FakeDevice, python: str) -> None:
    pid = ran.status()["fs_pid"]
    assert "error" in admin(device, {"verb": "upgrade", "python": python})
    assert counts(ran, "fs_pid", "state") == [pid, "serving"]
    look_up(device, "file")
    assert "new_pid" in admin(device, {"verb": "upgrade", "python": sys.executable})


@pytest.mark.allow_errors(ENDED)
def test_the_old_process_dies_during_its_upgrade(ran: Ran, device: FakeDevice, directory: Path) -> None:
    answers: list[dict[str, Any]] = []
    ran.keeper.crew._argv = command(directory, "--start-delay", "0.5")
    ran.keeper.loop.call_soon(lambda: ran.keeper.crew.upgrade(sys.executable, answers.append))
    until(lambda: ran.status()["state"] == "upgrading")
    pid = kill(ran)
    assert look_up(device, "file")
    until(lambda: bool(answers))
    assert answers[0]["old_pid"] == pid
    assert counts(ran, "generation", "outages") == [1, 1]


def test_one_upgrade_at_a_time(ran: Ran, device: FakeDevice, directory: Path) -> None:
    ran.keeper.crew._argv = command(directory, "--start-delay", "0.5")
    answers: list[dict[str, Any]] = []
    for _ in range(2):
        ran.keeper.loop.call_soon(lambda: ran.keeper.crew.upgrade(sys.executable, answers.append))
    until(lambda: len(answers) == 2)
    assert "try again" in answers[0]["error"]
    assert "new_pid" in answers[1]


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
    ran.keeper.crew._argv = command(directory, "--start-delay", "30")
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
