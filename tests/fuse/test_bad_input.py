"""Calls that make no sense, and bytes on the keeper's socket: an errno, no hang, and the mount goes on."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvstore.keeper import admin, mountinfo
from kvstore.keeper.adminport import MAX_BYTES, MAX_CONNECTIONS, address
from tests.support.child import in_child
from tests.support.cluster import wait_until
from tests.support.modes import Pair

HUGE: Final = (2**31, 2**40, 2**62, 2**63 - 4096, 2**63 - 1)
REFUSED: Final = {
    errno.EINVAL, errno.EFBIG, errno.EOVERFLOW, errno.ENOSPC, errno.ENXIO, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY,
    errno.ERANGE, errno.ENODATA, errno.ENAMETOOLONG, errno.EBADF, errno.EPERM, errno.E2BIG, errno.EISDIR, errno.ENOTDIR,
    errno.EXDEV, errno.ENOENT, errno.EFAULT, errno.EILSEQ, errno.EEXIST, errno.ENOTEMPTY, errno.EBUSY, errno.ESTALE, 0,
}  # fmt: skip
"""Everything but EIO and ETIMEDOUT."""
_GETDENTS64: Final = 217


@pytest.fixture(autouse=True)
def _lives_on(pair: Pair) -> Iterator[None]:
    """The same processes, with about the fds that they had; both mounts read and write."""
    pids = _pids(pair)
    before = {pid: _fds(pid) for pid in pids}
    yield
    in_child(_write_and_read, pair.a.path)
    in_child(_write_and_read, pair.b.path)
    assert _pids(pair) == pids, pair.cluster.logs()
    wait_until(lambda: all(_fds(pid) <= before[pid] + 24 for pid in pids), "they close what they opened")
    assert "Traceback" not in pair.cluster.logs()


def _pids(pair: Pair) -> list[int]:
    """Of the keeper, if there is one, and of the file system process."""
    if pair.mode == "plain":
        assert pair.a.process.pid is not None
        return [pair.a.process.pid]
    status = admin.status(str(pair.a.path))
    return [status["pid"], status["fs_pid"]]


def _fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _write_and_read(root: Path) -> None:
    (root / "after").write_bytes(b"served")
    assert (root / "after").read_bytes() == b"served"


def attempt(call: Callable[..., Any], *arguments: Any) -> None:
    """It works, or says in a usual way that it does not."""
    refusal = 0
    try:
        opened = call(*arguments)
        if call is os.open:
            os.close(opened)
    except OSError as error:
        refusal = error.errno or -1
    assert refusal in REFUSED, (call, arguments, errno.errorcode.get(refusal, refusal))


def fallocate(fd: int, at: int, size: int) -> None:
    """Without what libc makes of it where it is not offered: a write to each block."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, 0, at, size) < 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def offsets(d: Path) -> None:
    for at in (*HUGE, -1, -(2**63)):
        fd = os.open(d / "f", os.O_RDWR | os.O_CREAT, 0o644)
        for call, *arguments in (
            (os.pread, 10, at), (os.pwrite, b"x", at), (os.ftruncate, at), (os.lseek, at, os.SEEK_SET),
            (os.lseek, at, os.SEEK_END), (os.lseek, at, os.SEEK_HOLE), (os.lseek, at, os.SEEK_DATA),
            (fallocate, at, 1), (fallocate, 0, at), (os.write, b"y"), (os.fsync,),
        ):  # fmt: skip
            attempt(call, fd, *arguments)
        attempt(os.close, fd)
        attempt(os.truncate, d / "f", at)
        attempt(os.unlink, d / "f")
    assert os.listdir(d) == []


def flags(d: Path) -> None:
    (d / "f").write_bytes(b"data")
    for number in (0, 3, 0o777777777, 2**31 - 1, os.O_PATH, os.O_TMPFILE | os.O_RDWR, os.O_DIRECT, os.O_APPEND | 3):
        for name in ("f", "."):
            attempt(os.open, d / name, number & ~os.O_CREAT)


def ioctls(d: Path) -> None:
    (d / "f").write_bytes(b"data")
    numbers = random.Random(3).sample(range(2**32), 50)
    for name, flag in (("f", os.O_RDWR), ("f", os.O_RDONLY), (".", os.O_RDONLY)):
        fd = os.open(d / name, flag)
        for number in (0x5401, 0x541B, 0x80086601, 0x40086602, 0x40049409, 0x80045430, 0xC0185879, *numbers):
            attempt(fcntl.ioctl, fd, number, bytearray(4096))
        os.close(fd)


def attributes(d: Path) -> None:
    (d / "f").write_bytes(b"data")
    names = [
        "",
        "user",
        "user.",
        "user." + "x" * 250,
        "user." + "x" * 5000,
        "user.kvstore." + "x" * 200,
        "user.é",
        "trusted.x",
    ]
    for name, path in itertools.product(names, (d / "f", d, d / "gone")):
        attempt(os.getxattr, path, name)
        attempt(os.setxattr, path, name, b"x" * 65536)
        attempt(os.setxattr, path, name, b"")
        attempt(os.removexattr, path, name)
    attempt(os.listxattr, d / "f")


def listings(d: Path) -> None:
    for i in range(20):
        (d / f"f{i}").touch()
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(4096)
    for at, size in itertools.product((0, 1, 19, 2**31, 2**62, 2**63 - 1), (0, 1, 24, 4096)):
        fd = os.open(d, os.O_RDONLY | os.O_DIRECTORY)
        attempt(os.lseek, fd, at, os.SEEK_SET)
        if libc.syscall(_GETDENTS64, fd, buffer, size) < 0:
            assert ctypes.get_errno() in REFUSED
        os.close(fd)
    assert len(os.listdir(d)) == 20


def names(d: Path) -> None:
    """Everything that takes a name, with names of no kind."""
    other = os.fsencode(d / "file")
    Path(os.fsdecode(other)).write_bytes(b"data")
    noise = random.Random(7)
    odd = [noise.randbytes(n).replace(b"/", b"\xfe").replace(b"\0", b"\xff") for n in (1, 5, 60, 255, 256, 4000)]
    odd += [b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"x" * 256, "é".encode() * 128, b"a\n", b"\x7f\x1b[2J", b"..", b"."]
    for name in odd:
        path = os.fsencode(d) + b"/" + name
        for call, *arguments in (
            (os.stat, path), (os.mkdir, path), (os.rmdir, path), (os.open, path, os.O_CREAT | os.O_WRONLY),
            (os.rename, other, path), (os.rename, path, other), (os.link, other, path), (os.symlink, name, path),
            (os.readlink, path), (os.mknod, path), (os.unlink, path), (os.open, path + b".tmp", os.O_CREAT | os.O_RDWR),
            (os.truncate, path, 5), (os.chmod, path, 0o7777), (os.utime, path, (2**33, 2**33)), (os.listxattr, path),
        ):  # fmt: skip
            if name not in (b".", b"..") or call in (os.stat, os.mkdir, os.open, os.link, os.mknod, os.symlink):
                attempt(call, *arguments)
    assert os.path.isdir(d)


@pytest.mark.parametrize("calls", [offsets, flags, ioctls, attributes, listings, names], ids=lambda f: f.__name__)
def test_calls_that_make_no_sense(place: Path, calls: Callable[[Path], None]) -> None:
    in_child(calls, place)


QUESTIONS: Final = [
    b"", b"x", b"\xff\xfe", b"[]", b"null", b"1e999", b"{}", b'{"verb": 5}', b'{"verb": "upgrade"}', b"[" * 60_000,
    b'{"verb": "upgrade", "python": ["x"]}', b'{"verb": "nothing"}', b'{"a":' * 10_000, b"9" * 60_000,
    random.Random(1).randbytes(4096), b"x" * MAX_BYTES,
]  # fmt: skip


def test_bytes_on_the_keepers_socket(pair: Pair) -> None:
    there = mountinfo.find(str(pair.a.path))
    assert there is not None
    if pair.mode == "plain":  # no keeper, no socket
        with pytest.raises(ConnectionRefusedError):
            _connected(there.minor)
        return
    for question in QUESTIONS:
        with _connected(there.minor) as sock:
            sock.send(question)
            sock.recv(MAX_BYTES)  # an answer that names the mistake, or the end
    with open(os.devnull, "rb") as null, _connected(there.minor) as sock:
        for _ in range(50):
            socket.send_fds(sock, [b'{"verb": "status"}'], [null.fileno()] * 250)
            assert sock.recv(MAX_BYTES).startswith(b"{")
        assert _fds(_pids(pair)[0]) < 200, "fds that came along are closed"
    silent = [_connected(there.minor) for _ in range(3 * MAX_CONNECTIONS)]
    assert admin.status(str(pair.a.path))["state"] == "serving"
    for sock in silent:
        sock.close()


def _connected(connection: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    try:
        sock.connect(address(connection))
    except OSError:
        sock.close()
        raise
    return sock
