"""One file system process after another: killed, stopped, upgraded. As in `test_run`."""

from __future__ import annotations

import errno
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.keeper import watchdog, wire
from kvstore.keeper.wire import Op
from tests.support.fake_device import FakeDevice, Ran, keeper_thread
from tests.support.keeper_calls import (
    admin,
    command,
    counts,
    kill,
    look_up,
    new_server,
    open_file,
    read,
    release,
    until,
)
from tests.support.tiny_fs import ROOT

ENDED = "ended \\(code"


@pytest.fixture
def impatient(directory: Path, device: FakeDevice) -> Iterator[Ran]:
    """With a short deadline."""
    with keeper_thread(command(directory), device, deadline_s=1.0, slow_deadline_s=3.0) as ran:
        until(lambda: ran.status()["state"] == "serving")
        yield ran


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
def test_nobody_comes_back(
    impatient: Ran, device: FakeDevice, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO at the deadline, at once after it, and service again when somebody can."""
    inode = look_up(device, "file")
    handle, _, _ = open_file(device, inode)
    until(lambda: impatient.status()["pending"] == 0)
    under_way = device.send(Op.LOOKUP, ROOT, b"sleep-5\0")
    until(lambda: impatient.status()["pending"] == 1)
    monkeypatch.setattr(impatient.keeper.crew.spawner, "argv", command(directory, "--exit", "1"))
    begin = time.monotonic()
    kill(impatient)
    waiting = device.send(Op.LOOKUP, ROOT, b"file\0")
    assert device.reply(under_way).error == errno.EIO
    assert device.reply(waiting).error == errno.EIO
    assert 0.7 < time.monotonic() - begin < 5.0
    begin = time.monotonic()
    assert device.ask(Op.FLUSH, inode, bytes(24)).error == errno.EIO
    release(device, inode, handle)
    assert time.monotonic() - begin < 0.5
    assert impatient.status()["state"] == "failing"
    assert device.backing == {}
    impatient.keeper.crew.spawner.argv = command(directory)
    until(lambda: impatient.status()["state"] == "serving")
    assert look_up(device, "file") == inode
    assert counts(impatient, "opens", "outages") == [0, 1]


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
def test_a_request_that_kills_is_given_up(impatient: Ran, device: FakeDevice) -> None:
    """Each successor gets it again and dies of it, until its deadline."""
    assert device.ask(Op.LOOKUP, ROOT, b"die\0").error == errno.EIO
    until(lambda: device.ask(Op.LOOKUP, ROOT, b"file\0").error == 0)


# Upgrades.


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
    assert ran.keeper.crew.spawner.argv[0] == str(other_python), "whoever comes next runs by it too"


def test_requests_under_way_are_answered_before_an_upgrade(ran: Ran, device: FakeDevice) -> None:
    slow = device.send(Op.LOOKUP, ROOT, b"sleep-0.7\0")
    until(lambda: ran.status()["pending"] == 1)
    answer = admin(device, {"verb": "upgrade", "python": sys.executable})
    assert "new_pid" in answer
    assert device.reply(slow).error == errno.ENOENT
    assert counts(ran, "resent", "answered_eio") == [0, 0]


@pytest.mark.allow_errors("did not start, or not end, in time")
def test_an_upgrade_does_not_wait_for_ever_for_the_old_process(directory: Path, device: FakeDevice) -> None:
    with keeper_thread(command(directory), device) as ran:
        until(lambda: ran.status()["state"] == "serving" and ran.status()["pending"] == 0)  # INIT is answered, too
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
    ran.keeper.crew.spawner.argv = command(directory, "--start-delay", "0.5")
    ran.keeper.loop.call_soon(lambda: ran.keeper.crew.upgrade(sys.executable, answers.append))
    until(lambda: ran.status()["state"] == "upgrading")
    pid = kill(ran)
    assert look_up(device, "file")
    until(lambda: bool(answers))
    assert answers[0]["old_pid"] == pid
    assert counts(ran, "generation", "outages") == [1, 1]


def test_one_upgrade_at_a_time(ran: Ran, device: FakeDevice, directory: Path) -> None:
    ran.keeper.crew.spawner.argv = command(directory, "--start-delay", "0.5")
    answers: list[dict[str, Any]] = []
    for _ in range(2):
        ran.keeper.loop.call_soon(lambda: ran.keeper.crew.upgrade(sys.executable, answers.append))
    until(lambda: len(answers) == 2)
    assert "try again" in answers[0]["error"]
    assert "new_pid" in answers[1]
