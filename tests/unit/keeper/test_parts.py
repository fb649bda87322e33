"""The keeper's smaller parts: loop, channel, sockets, what is handed over."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.keeper import channel, loop
from kvstore.keeper.channel import Again, Closed, Inheritance, Kind, Message, Open, Table
from kvstore.keeper.heritage import Heritage
from kvstore.keeper.loop import IN, Loop
from kvstore.keeper.process import FsProcess

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
        assert heritage.hear(Message(Kind.KEEP, inode, b"", [os.open(tmp_path / "f", os.O_RDONLY)]))
    for _ in range(2):
        assert not heritage.hear(Message(Kind.DROP, 7, b"", []))
    assert not heritage.hear(Message(Kind.KEEP, 8, b"", [])), "nothing came with it"
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
    assert heritage.hear(Message(Kind.STATE, 0, b"", [os.memfd_create("new")]))
    assert open_fds() == before + len(heritage.kept)
    heritage.close()
    assert open_fds() == before - 1
