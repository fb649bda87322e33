"""What POSIX calls answer: the table of `tests.fuse.test_errors`.

Each row begins with the tree of `SET_UP`: ``file``, ``other``, ``empty/``, ``full/x`` and a closed temporary ``x.tmp``.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.support import fsops
from tests.support.fsops import Bytes, Call, Side, call

OK: Final = "ok"
NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4
HUGE: Final = 1 << 62
NOBODY: Final = 65534
BAD_NAME: Final = os.fsdecode(b"\xff\xfe")
LONGEST, TOO_LONG = "x" * 255, "x" * 256


class Row(NamedTuple):
    """`calls` in order; the last one answers `error`, on a plain directory `plain`, those before it succeed."""

    error: str
    calls: tuple[Call, ...]
    plain: str
    reason: str

    @property
    def label(self) -> str:
        calls = ",".join(map(repr, self.calls))
        return f"{self.error}-{calls}".replace(TOO_LONG, "x*256").replace(LONGEST, "x*255")


def same(error: str, *calls: Call) -> Row:
    return Row(error, calls, error, "")


def differs(error: str, plain: str, reason: str, *calls: Call) -> Row:
    return Row(error, calls, plain, reason)


# ---- calls that only this table makes ----


def make_node(side: Side, path: str, kind: int) -> None:
    os.mknod(fsops.at(side, path), kind | 0o600, os.makedev(1, 3))


def bind_socket(side: Side, path: str) -> None:
    """By its name in the working directory: the whole path is too long for an address."""
    os.chdir(side.root)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)


def read_link(side: Side, path: str) -> str:
    return os.readlink(fsops.at(side, path))


def remove_attribute(side: Side, path: str, name: str) -> None:
    os.removexattr(fsops.at(side, path), name)


def attributes_of(side: Side, path: str) -> list[str]:
    names = os.listxattr(fsops.at(side, path))
    return [name for name in names if not name.startswith("user.kvstore.")]


def change_owner(side: Side, path: str, uid: int, gid: int) -> None:
    os.chown(fsops.at(side, path), uid, gid)


def reserve(side: Side, handle: int, size: int) -> None:
    """posix_fallocate(3), which writes where fallocate(2) is not offered."""
    os.posix_fallocate(side.fds[handle], 0, size)


def become_nobody(side: Side) -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def map_directory(side: Side, path: str) -> None:
    fd = os.open(fsops.at(side, path), os.O_RDONLY)
    try:
        fsops.Map(fd, 4096).close()
    finally:
        os.close(fd)


def move_out(side: Side, path: str) -> None:
    """To another file system."""
    os.rename(fsops.at(side, path), f"/dev/shm/kvstore-{os.getpid()}")


def round_trip(side: Side, name: str) -> None:
    (side.root / name).write_bytes(name.encode())
    if name not in os.listdir(side.root) or (side.root / name).read_bytes() != name.encode():
        raise OSError(errno.EIO, "another name or content came back")
    os.rename(side.root / name, side.root / "renamed")
    os.rename(side.root / "renamed", side.root / name)
    os.unlink(side.root / name)


# ---- the table ----


def opened(path: str, flags: int) -> Call:
    return call(fsops.open_file, 1, path, flags)


def renames() -> Iterator[Row]:
    """From each kind of thing to each: rows are sources, columns targets."""
    targets = ("file", "other", "empty", "full", "new", "none/new", "file/new", "full/x")
    answers = {
        "file": f"{OK} {OK} EISDIR EISDIR {OK} ENOENT ENOTDIR {OK}",
        "empty": f"ENOTDIR ENOTDIR {OK} ENOTEMPTY {OK} ENOENT ENOTDIR ENOTDIR",
        "full": f"ENOTDIR ENOTDIR {OK} {OK} {OK} ENOENT ENOTDIR EINVAL",
        "missing": "ENOENT ENOENT ENOENT ENOENT ENOENT ENOENT ENOTDIR ENOENT",
        "none/x": "ENOENT ENOENT ENOENT ENOENT ENOENT ENOENT ENOENT ENOENT",
        "file/x": "ENOTDIR ENOTDIR ENOTDIR ENOTDIR ENOTDIR ENOTDIR ENOTDIR ENOTDIR",
        "full/x": f"{OK} {OK} EISDIR ENOTEMPTY {OK} ENOENT ENOTDIR {OK}",
        "x.tmp": f"{OK} {OK} EISDIR EISDIR {OK} ENOENT ENOTDIR {OK}",
        ".": "EBUSY EBUSY EBUSY EBUSY EBUSY ENOENT ENOTDIR EBUSY",
    }
    for source, row in answers.items():
        for target, answer in zip(targets, row.split(), strict=True):
            yield same(answer, call(fsops.rename, source, target))
    yield from (
        same("EINVAL", call(fsops.rename, "full", "full/new")),
        same("ENOENT", call(fsops.rename, "full", "full/new/new")),
        same("EBUSY", call(fsops.rename, "file", ".")),
        same("ENOTDIR", call(fsops.rename, "file", "new/")),
        same(OK, call(fsops.rename, "empty", "new/")),
        same("EEXIST", call(fsops.rename, "file", "other", NOREPLACE)),
        same("EEXIST", call(fsops.rename, "file", "file", NOREPLACE)),
        same("EEXIST", call(fsops.rename, "empty", "full", NOREPLACE)),
        same("EEXIST", call(fsops.rename, "x.tmp", "file", NOREPLACE)),
        same(OK, call(fsops.rename, "file", "new", NOREPLACE)),
        same(OK, call(fsops.rename, "x.tmp", "new", NOREPLACE)),
        same("ENOENT", call(fsops.rename, "missing", "new", NOREPLACE)),
        same("EINVAL", call(fsops.rename, "file", "other", NOREPLACE | EXCHANGE)),
        same("EINVAL", call(fsops.rename, "file", "other", 1 << 20)),
        differs("EINVAL", OK, "not offered", call(fsops.rename, "file", "other", EXCHANGE)),
        differs("EINVAL", OK, "not offered", call(fsops.rename, "file", "other", WHITEOUT)),
        same("ENOENT", call(fsops.rename, "file", "missing", EXCHANGE)),
        differs("EXDEV", OK, "others would see the name vanish", call(fsops.rename, "file", "y.tmp")),
        differs("EXDEV", OK, "others would see the name vanish", call(fsops.rename, "empty", "y.tmp")),
        same("ENOTDIR", call(fsops.rename, "empty", "x.tmp")),
        same("EXDEV", call(move_out, "file")),
    )


def names_and_kinds() -> Iterator[Row]:
    for function in (fsops.unlink, fsops.remove_directory):
        yield from (
            same("ENOENT", call(function, "missing")),
            same("ENOENT", call(function, "none/x")),
            same("ENOTDIR", call(function, "file/x")),
            same("ENAMETOOLONG", call(function, TOO_LONG)),
        )
    make_temporary, closed = opened("empty/y.tmp", os.O_CREAT | os.O_WRONLY), call(fsops.close, 1)
    yield from (
        same(OK, call(fsops.unlink, "file")),
        same(OK, call(fsops.unlink, "x.tmp")),
        same("EISDIR", call(fsops.unlink, "empty")),
        same("EISDIR", call(fsops.unlink, ".")),
        same("ENOTDIR", call(fsops.unlink, "file/")),
        same(OK, call(fsops.remove_directory, "empty")),
        same("ENOTEMPTY", call(fsops.remove_directory, "full")),
        same("ENOTDIR", call(fsops.remove_directory, "file")),
        same("ENOTDIR", call(fsops.remove_directory, "x.tmp")),
        same("EINVAL", call(fsops.remove_directory, "empty/.")),
        same("ENOTEMPTY", call(fsops.remove_directory, "empty/..")),
        same("ENOTEMPTY", make_temporary, closed, call(fsops.remove_directory, "empty")),
        same("ENOTEMPTY", make_temporary, closed, call(fsops.rename, "full", "empty")),
        same("EEXIST", call(fsops.make_directory, "empty")),
        same("EEXIST", call(fsops.make_directory, "file")),
        same("EEXIST", call(fsops.make_directory, ".")),
        same("ENOENT", call(fsops.make_directory, "none/x")),
        same("ENOTDIR", call(fsops.make_directory, "file/x")),
        same(OK, call(fsops.make_directory, "new/")),
        same(OK, call(fsops.make_directory, ".tmp")),
        same(OK, call(fsops.make_directory, LONGEST)),
        same("ENAMETOOLONG", call(fsops.make_directory, TOO_LONG)),
        differs("EPERM", OK, "below it nothing could be published", call(fsops.make_directory, "y.tmp")),
        same("EEXIST", call(fsops.make_directory, "x.tmp")),
        same("ENOENT", call(fsops.stat_path, "missing")),
        same("ENOTDIR", call(fsops.stat_path, "file/x")),
        same("ENOTDIR", call(fsops.stat_path, "file/")),
        same("ENOTDIR", call(fsops.stat_path, "file/..")),
        same("ENOTDIR", call(fsops.names_in, "file")),
        same("ENOENT", call(fsops.names_in, "missing")),
    )


def names_as_such() -> Iterator[Row]:
    for name in (
        LONGEST,
        "ä" * 127 + "a",
        "-rf",
        "--",
        "-1a@bfloat16.data",
        " ",
        "a b\n%",
        "…",
        ".a",
        "...",
        "~",
        "*?[",
        ".tmp",
    ):
        yield same(OK, call(round_trip, name))
    for function in (fsops.stat_path, fsops.read_file):
        yield same("ENAMETOOLONG", call(function, TOO_LONG))
        yield same("ENAMETOOLONG", call(function, "/".join(["empty/.."] * 600)))
        yield differs("EILSEQ", "ENOENT", "names are UTF-8", call(function, BAD_NAME))
    yield from (
        same("ENAMETOOLONG", opened(TOO_LONG, os.O_CREAT | os.O_WRONLY)),
        same("ENAMETOOLONG", opened("ä" * 128, os.O_CREAT | os.O_WRONLY)),
        same("ENAMETOOLONG", opened("x" * 252 + ".tmp", os.O_CREAT | os.O_WRONLY)),
        same("ENAMETOOLONG", call(fsops.rename, "file", TOO_LONG)),
        differs("EILSEQ", OK, "names are UTF-8", opened(BAD_NAME, os.O_CREAT | os.O_WRONLY)),
        differs("EILSEQ", OK, "names are UTF-8", opened(BAD_NAME + ".tmp", os.O_CREAT | os.O_WRONLY)),
        differs("EILSEQ", OK, "names are UTF-8", call(fsops.make_directory, BAD_NAME)),
        differs("EILSEQ", OK, "names are UTF-8", call(fsops.rename, "file", BAD_NAME)),
        differs("EILSEQ", "ENOENT", "names are UTF-8", call(fsops.unlink, BAD_NAME)),
        differs("EILSEQ", OK, "no UTF-8", opened(os.fsdecode(b"\xed\xa0\x80"), os.O_CREAT | os.O_WRONLY)),
    )  # fmt: skip


def opens() -> Iterator[Row]:
    create, exclusive = os.O_CREAT | os.O_WRONLY, os.O_CREAT | os.O_EXCL | os.O_WRONLY
    yield from (
        same("EEXIST", opened("file", exclusive)),
        same("EEXIST", opened("empty", exclusive)),
        same("EEXIST", opened("x.tmp", exclusive)),
        same(OK, opened("new", exclusive)),
        same(OK, opened("y.tmp", exclusive)),
        same("ENOENT", opened("missing", os.O_RDONLY)),
        same("ENOENT", opened("missing.tmp", os.O_RDWR)),
        same("ENOENT", opened("none/x", create)),
        same("ENOTDIR", opened("file/x", create)),
        same("ENOTDIR", opened("file", os.O_RDONLY | os.O_DIRECTORY)),
        same("ENOTDIR", opened("file/", os.O_RDONLY)),
        same("ENOTDIR", opened("x.tmp", os.O_RDONLY | os.O_DIRECTORY)),
        same("EINVAL", opened("new", create | os.O_DIRECTORY)),
        same(OK, opened("empty", os.O_RDONLY | os.O_DIRECTORY)),
        same("EISDIR", opened("empty", os.O_WRONLY)),
        same("EISDIR", opened("empty", os.O_RDWR)),
        same("EISDIR", opened("empty", os.O_RDONLY | os.O_TRUNC)),
        same("EISDIR", opened("empty", os.O_RDONLY | os.O_CREAT)),
        same("EISDIR", opened("new/", create)),
        same("EISDIR", opened("file/", create)),
        same("EISDIR", opened(".", os.O_RDWR)),
    )
    for flags in (
        "O_NOFOLLOW",
        "O_SYNC",
        "O_DSYNC",
        "O_NOATIME",
        "O_NONBLOCK",
        "O_DIRECT",
        "O_PATH",
        "O_NOCTTY",
        "O_ASYNC",
    ):
        yield same(OK, opened("file", os.O_RDONLY | getattr(os, flags)))
        if flags != "O_PATH":
            yield same(OK, opened("y.tmp", os.O_RDWR | os.O_CREAT | getattr(os, flags)))
    yield differs("ENOTSUP", OK, "every file has a name", opened("empty", os.O_TMPFILE | os.O_RDWR))
    yield same("ENOTDIR", opened("file", os.O_TMPFILE | os.O_RDWR))


def descriptors() -> Iterator[Row]:
    reader, writer, both = opened("file", os.O_RDONLY), opened("file", os.O_WRONLY), opened("file", os.O_RDWR)
    data = Bytes(1, 10)
    yield from (
        same("EBADF", reader, call(fsops.write, 1, data)),
        same("EBADF", writer, call(fsops.read, 1, 10)),
        same("EINVAL", reader, call(fsops.truncate_open, 1, 0)),
        same("EISDIR", opened("empty", os.O_RDONLY), call(fsops.read, 1, 10)),
        same("EBADF", opened("file", os.O_PATH), call(fsops.read, 1, 10)),
        same("EINVAL", both, call(fsops.seek, 1, -1, os.SEEK_SET)),
        same("EINVAL", both, call(fsops.seek, 1, -11, os.SEEK_END)),
        same("EINVAL", both, call(fsops.seek, 1, 0, 99)),
        same("ENXIO", both, call(fsops.seek, 1, 10, os.SEEK_DATA)),
        same("ENXIO", both, call(fsops.seek, 1, 10, os.SEEK_HOLE)),
        same("EINVAL", both, call(fsops.pread, 1, -1, 10)),
        same("EINVAL", both, call(fsops.pwrite, 1, -1, data)),
        same("EFBIG", both, call(fsops.pwrite, 1, HUGE, data)),
        same("EINVAL", both, call(fsops.truncate_open, 1, -1)),
        same("EFBIG", both, call(fsops.truncate_open, 1, HUGE)),
        same("EFBIG", call(fsops.truncate, "file", HUGE)),
        same("EFBIG", call(fsops.truncate, "x.tmp", HUGE)),
        same("EINVAL", call(fsops.truncate, "file", -1)),
        same("EISDIR", call(fsops.truncate, "empty", 0)),
        same("ENOENT", call(fsops.truncate, "missing", 0)),
        same("ENOTDIR", call(fsops.truncate, "file/x", 0)),
        same("EACCES", reader, call(fsops.write_map, 1, 0, data, True, False)),
        same("EACCES", writer, call(fsops.read_map, 1, 0, 10, True)),
        same(OK, reader, call(fsops.write_map, 1, 0, data, False, False)),
        same("ENODEV", call(map_directory, "empty")),
        same("EBADF", reader, call(fsops.copy_range, 1, 0, 1, 5, 5)),
        same("EINVAL", both, call(fsops.copy_range, 1, 0, 1, 5, 10)),
        same("EBADF", opened("file", os.O_RDWR | os.O_APPEND), call(fsops.copy_range, 1, 0, 1, 20, 10)),
        same(OK, both, call(fsops.copy_range, 1, 0, 1, 20, 10)),
        same(OK, both, call(reserve, 1, 100_000)),
        same("EBADF", reader, call(reserve, 1, 100_000)),
        same("EINVAL", both, call(reserve, 1, 0)),
        same("EBADF", reader, call(fsops.lock_range, 1, 2, 0, 1)),
        same("EBADF", writer, call(fsops.lock_range, 1, 1, 0, 1)),
    )


def what_is_not_offered() -> Iterator[Row]:
    reason = "not offered"
    for kind in (stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK):
        yield differs("EPERM", OK, reason, call(make_node, "new", kind))
        yield same("EEXIST", call(make_node, "file", kind))
    yield from (
        same(OK, call(make_node, "new", stat.S_IFREG)),
        same(OK, call(make_node, "y.tmp", stat.S_IFREG)),
        same("EEXIST", call(make_node, "file", stat.S_IFREG)),
        same("EEXIST", call(make_node, "x.tmp", stat.S_IFREG)),
        differs("EPERM", OK, reason, call(bind_socket, "new")),
        differs("EPERM", OK, reason, call(fsops.hard_link, "file", "new")),
        differs("EPERM", OK, reason, call(fsops.hard_link, "x.tmp", "new")),
        same("EPERM", call(fsops.hard_link, "empty", "new")),
        same("EEXIST", call(fsops.hard_link, "file", "other")),
        same("ENOENT", call(fsops.hard_link, "missing", "new")),
        differs("EPERM", OK, reason, call(fsops.symbolic_link, "file", "new")),
        same("EEXIST", call(fsops.symbolic_link, "file", "other")),
        same("EINVAL", call(read_link, "file")),
        same("ENODATA", call(fsops.get_attribute, "file", "user.x")),
        same("ENODATA", call(fsops.get_attribute, "file", "security.capability")),
        same("ENODATA", call(remove_attribute, "file", "user.x")),
        same(OK, call(attributes_of, "file")),
        same("ENOENT", call(fsops.get_attribute, "missing", "user.x")),
        differs("ENOTSUP", OK, reason, call(fsops.set_attribute, "file", "user.x")),
        differs("ENOTSUP", OK, reason, call(fsops.set_attribute, "x.tmp", "user.x")),
        differs("ENOTSUP", OK, reason, call(fsops.set_attribute, "empty", "trusted.x")),
    )  # fmt: skip


def rights() -> Iterator[Row]:
    """As a user who owns nothing here: root made it all, ``chmod 1777`` makes a directory that everybody may use."""
    nobody = call(become_nobody)
    secret, shared = call(fsops.chmod, "file", 0o600), call(fsops.chmod, "full", 0o1777)
    mine = opened("full/mine", os.O_CREAT | os.O_WRONLY)
    yield from (
        same(OK, nobody, call(fsops.read_file, "file")),
        same("EACCES", secret, nobody, call(fsops.read_file, "file")),
        same("EACCES", nobody, opened("file", os.O_WRONLY)),
        same("EACCES", nobody, opened("new", os.O_CREAT | os.O_WRONLY)),
        same("EACCES", nobody, opened("y.tmp", os.O_CREAT | os.O_WRONLY)),
        same("EACCES", nobody, call(fsops.make_directory, "new")),
        same("EACCES", nobody, call(fsops.unlink, "file")),
        same("EACCES", nobody, call(fsops.remove_directory, "empty")),
        same("EACCES", nobody, call(fsops.rename, "file", "new")),
        same("EACCES", nobody, call(fsops.truncate, "file", 0)),
        same("EPERM", nobody, call(fsops.chmod, "file", 0o666)),
        same("EPERM", nobody, call(change_owner, "file", NOBODY, NOBODY)),
        same("EPERM", nobody, call(fsops.set_times, "file", 1)),
        same("EACCES", call(fsops.chmod, "full", 0o700), nobody, call(fsops.stat_path, "full/x")),
        same("EACCES", call(fsops.chmod, "full", 0o711), nobody, call(fsops.names_in, "full")),
        same("EPERM", shared, nobody, call(fsops.unlink, "full/x")),
        same("EPERM", shared, nobody, call(fsops.rename, "full/x", "full/new")),
        same(OK, shared, nobody, mine),
        same(OK, shared, nobody, mine, call(fsops.chmod, "full/mine", 0o640)),
        same(OK, shared, nobody, mine, call(fsops.unlink, "full/mine")),
        same("EPERM", shared, nobody, mine, call(fsops.rename, "full/mine", "full/x")),
        same("EPERM", shared, nobody, mine, call(change_owner, "full/mine", 0, 0)),
    )


TABLE: Final = [
    row
    for rows in (renames, names_and_kinds, names_as_such, opens, descriptors, what_is_not_offered, rights)
    for row in rows()
]
SET_UP: Final = (
    *(call(fsops.make_directory, name) for name in ("", "empty", "full")),
    *(
        each
        for name in ("file", "other", "full/x", "x.tmp")
        for each in (
            call(fsops.open_file, 0, name, os.O_CREAT | os.O_WRONLY),
            call(fsops.write, 0, Bytes(len(name), 10)),
            call(fsops.close, 0),
        )
    ),
)
