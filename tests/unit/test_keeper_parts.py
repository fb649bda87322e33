"""The keeper's smaller parts: loop, channel, sockets, what is handed over, log lines, notification, /proc."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.keeper import adminport, channel, holders, logs, loop, mountinfo
from kvstore.keeper.adminport import AdminPort
from kvstore.keeper.channel import Again, Closed, Inheritance, Kind, Open, Table
from kvstore.keeper.heritage import Heritage
from kvstore.keeper.loop import IN, Loop
from kvstore.keeper.notify import Notifier
from kvstore.keeper.process import FsProcess
from kvstore.obs import logging as obs_logging

WAIT_S = 10.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a.setblocking(False)
    b.settimeout(WAIT_S)
    with a, b:
        yield a, b


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# The loop.


@pytest.fixture
def ticking() -> Iterator[tuple[Loop, list[float]]]:
    ticks: list[float] = []
    made = Loop(lambda: ticks.append(made.now_s))
    with closing(made):
        yield made, ticks


def run(made: Loop, rounds: int = 1) -> None:
    for _ in range(rounds):
        made.run_once()


def test_a_late_tick_counts_one(ticking: tuple[Loop, list[float]]) -> None:
    made, ticks = ticking
    time.sleep(4 * loop.TICK_S)
    run(made)
    assert ticks == [loop.TICK_S]
    begin = time.monotonic()
    while len(ticks) < 3:
        run(made)
    assert time.monotonic() - begin >= 1.9 * loop.TICK_S
    assert made.now_s == 3 * loop.TICK_S


def test_calls_from_threads_run_on_the_loop_in_order(ticking: tuple[Loop, list[float]]) -> None:
    made, _ = ticking
    done: list[int] = []
    for i in range(3):
        made.call_soon(lambda i=i: done.append(i))  # type: ignore[misc]
    run(made)
    assert done == [0, 1, 2]


def test_an_event_of_a_closed_fd_does_not_reach_its_successor(ticking: tuple[Loop, list[float]]) -> None:
    """Both ends are ready in one round; the first callback closes the second fd, and a new one gets its number."""
    made, _ = ticking
    first, second, third = os.pipe(), os.pipe(), os.pipe()
    for _, write in (first, second, third):
        os.write(write, b"x")
    reached: list[str] = []

    def replace(events: int) -> None:
        os.read(first[0], 1)
        made.forget(second[0])
        os.close(second[0])
        os.dup2(third[0], second[0])
        made.watch(second[0], IN, lambda events: reached.append("successor"))

    made.watch(first[0], IN, replace)
    made.watch(second[0], IN, lambda events: reached.append("predecessor"))
    made.run_once()
    assert reached == []
    made.run_once()
    assert reached == ["successor"]
    for fd in (*first, *second, *third):
        os.close(fd)


def test_forgetting_twice(ticking: tuple[Loop, list[float]]) -> None:
    made, _ = ticking
    read, write = os.pipe()
    made.watch(read, IN, lambda events: None)
    assert made.forget(read)
    assert not made.forget(read)
    os.close(read)
    os.close(write)


# The channel.


def test_messages(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = pair
    with open(os.devnull) as file:
        channel.send(a, Kind.OFFER, 2**64 - 1, fds=[file.fileno()])
    channel.send(a, Kind.SERVING, text=b'{"line": "x"}')
    offer, serving = channel.receive(b), channel.receive(b)
    assert (offer.kind, offer.inode, offer.text, len(offer.fds)) == (Kind.OFFER, 2**64 - 1, b"", 1)
    os.close(offer.fds[0])
    assert (serving.kind, serving.json(), serving.fds) == (Kind.SERVING, {"line": "x"}, [])
    a.close()
    with pytest.raises(Closed):
        channel.receive(b)
    with pytest.raises(Closed):
        channel.send(b, Kind.BEAT)


@pytest.mark.parametrize("data", [b"\xc8" + bytes(8), b"\x07", b"\x07" + bytes(8 + channel._MAX_TEXT + 10)])
def test_what_is_not_understood_is_dropped_with_its_fds(pair: tuple[socket.socket, socket.socket], data: bytes) -> None:
    """A later version may say more; the next message can be read."""
    a, b = pair
    before = open_fds()
    with open(os.devnull) as file:
        socket.send_fds(a, [data], [file.fileno()] * 3)
    channel.send(a, Kind.BEAT)
    with pytest.raises(ValueError, match=r"cut off|not a valid Kind"):
        channel.receive(b)
    assert open_fds() == before
    assert channel.receive(b).kind == Kind.BEAT


def test_table_and_inheritance() -> None:
    table = Table(
        [Open(2**63 + 1, 5, False), Open(1, 1, True)], [Again(35, 1, b"\xff x", 0, b""), Again(12, 1, b"a", 9, b"b")]
    )
    assert Table.from_json(table.to_json()) == table
    inheritance = Inheritance(3, 4, 5, 2**64 - 1, 7)
    assert Inheritance.from_environment({channel.ENVIRONMENT: inheritance.to_text()}) == inheritance
    assert Inheritance.from_environment({}) is None


# A process and what it is handed.


def end_of(process: FsProcess) -> int:
    """Its exit code."""
    end = time.monotonic() + WAIT_S
    while (code := process.exit_code) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return code


@pytest.fixture
def sleeper() -> Iterator[FsProcess]:
    """It never reads."""
    state = os.memfd_create("state")
    process = FsProcess([sys.executable, "-c", "import time; time.sleep(60)"], state, 1, 0, 0.0)
    yield process
    process.kill()
    end_of(process)
    process.close_sockets()
    os.close(process.pidfd)
    os.close(state)


def test_messages_wait_when_there_is_no_room(sleeper: FsProcess) -> None:
    message, sent = bytes(1 << 20), 0
    while sleeper.has_room:
        sleeper.send(message)
        sent += 1
        assert sent < 100
    sleeper.send(b"last")
    assert sleeper.has_unsent
    sleeper.kill()
    assert end_of(sleeper) == 128 + 9
    sleeper.flush()
    assert (sleeper.has_room, sleeper.has_unsent) == (False, False), "it is gone: there is nothing to wait for"


def test_a_process_inherits_its_ends_and_nothing_else() -> None:
    script = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')), os.environ['KVSTORE_KEEPER'])"
    state, extra = os.memfd_create("state"), os.open(os.devnull, os.O_RDONLY)
    read, write = os.pipe()
    saved = os.dup(1)
    os.dup2(write, 1)
    try:
        process = FsProcess([sys.executable, "-c", script], state, 2**63, 3, 0.0)
    finally:
        os.dup2(saved, 1)
        os.close(write)
    with open(read) as output:
        fds, _, environ = output.read().strip().rpartition(" ")
    inheritance = Inheritance(*map(int, environ.split(",")))
    listing = 1  # the directory that listdir has open
    assert len(json.loads(fds)) == 3 + 3 + listing
    assert set(inheritance[:3]) < set(json.loads(fds))
    assert inheritance[3:] == (2**63, 3)
    assert end_of(process) == 0
    process.close_sockets()
    for fd in (state, extra, saved, process.pidfd):
        os.close(fd)


def test_a_command_that_is_missing_leaves_no_fds() -> None:
    state, before = os.memfd_create("state"), open_fds()
    with pytest.raises(FileNotFoundError):
        FsProcess(["/nowhere/python"], state, 1, 0, 0.0)
    assert open_fds() == before
    os.close(state)


class Ear:
    """What `Heritage.hand_over` needs of a process."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def tell(self, kind: Kind, text: bytes = b"", fds: Any = ()) -> None:
        channel.send(self.sock, kind, 0, text, fds)


def test_kept_files_and_the_table_are_handed_over(pair: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    a, b = pair
    heritage, before = Heritage(), open_fds()
    (tmp_path / "f").write_bytes(b"kept")
    for inode in [*range(150), 3]:
        heritage.keep(inode, os.open(tmp_path / "f", os.O_RDONLY))
    heritage.drop(7)
    heritage.drop(7)
    heritage.hand_over(Ear(a), Table([Open(1, 2, False)], []))  # type: ignore[arg-type]
    got: dict[int, int] = {}
    while (message := channel.receive(b)).kind == Kind.KEPT:
        got |= dict(zip(message.json(), message.fds, strict=True))
    assert set(got) == set(range(150)) - {7}
    assert os.pread(got[3], 10, 0) == b"kept"
    with open(message.fds[0], "rb") as file:
        assert Table.from_json(file.read()) == Table([Open(1, 2, False)], [])
    for fd in got.values():
        os.close(fd)
    heritage.replace_state(os.memfd_create("new"))
    assert open_fds() == before + len(heritage.kept)
    heritage.close()
    assert open_fds() == before - 1


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
def port(ticking: tuple[Loop, list[float]]) -> Iterator[tuple[Loop, int]]:
    number = 2_000_000_000 + os.getpid()
    with closing(AdminPort(ticking[0], number, lambda question, answer: answer({"echo": question}))):
        yield ticking[0], number


def connected(made: Loop, number: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(WAIT_S)
    sock.connect(adminport.address(number))
    run(made)
    return sock


def test_questions_and_answers(port: tuple[Loop, int]) -> None:
    with connected(*port) as sock:
        for verb in ("a", "b"):
            sock.send(json.dumps({"verb": verb}).encode())
            run(port[0])
            assert json.loads(sock.recv(4096)) == {"echo": {"verb": verb}}


@pytest.mark.parametrize("garbage", [b"\xff\x00", b"{", b"[1]", b"null"])
def test_garbage_ends_that_connection_only(port: tuple[Loop, int], garbage: bytes) -> None:
    with connected(*port) as good, connected(*port) as bad:
        bad.send(garbage)
        run(port[0])
        assert bad.recv(4096) == b""
        good.send(b"{}")
        run(port[0])
        assert json.loads(good.recv(4096)) == {"echo": {}}


def test_connections_are_bounded(port: tuple[Loop, int]) -> None:
    socks = [connected(*port) for _ in range(adminport.MAX_CONNECTIONS + 1)]
    assert socks[0].recv(10) == b""
    socks[-1].send(b"{}")
    run(port[0])
    assert socks[-1].recv(4096)
    for sock in socks:
        sock.close()
    run(port[0])


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
