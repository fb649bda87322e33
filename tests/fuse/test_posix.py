"""What a person in a shell, and LMCache, do to files: the same as on a plain directory, errors included."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.client.messages import Publication, PublishName
from kvstore.client.meta import Meta
from kvstore.core.errors import KvError
from kvstore.rpc.failover import Failover
from kvstore.rpc.metadata import Caller
from tests.fuse.calls import expect, rename_with
from tests.fuse.conftest import Store
from tests.support.child import in_child

MIB = 1 << 20


@pytest.fixture
def place(store: Store, fresh: str) -> Path:
    path = store.a / fresh
    in_child(os.mkdir, path)
    return path


def create_write_read(d: Path) -> None:
    f = d / "f"
    f.write_bytes(b"hello")
    assert f.read_bytes() == b"hello"
    with f.open("ab") as out:
        out.write(b" world")
    assert f.read_bytes() == b"hello world"
    f.write_bytes(b"new")
    assert f.read_bytes() == b"new"
    assert f.stat().st_size == 3


def empty_and_touched(d: Path) -> None:
    f = d / "f"
    f.touch()
    assert (f.stat().st_size, f.read_bytes()) == (0, b"")
    os.utime(f, ns=(1_000_000_007, 2_000_000_009))
    assert f.stat().st_mtime_ns == 2_000_000_009
    f.write_bytes(b"x")
    assert abs(f.stat().st_mtime - time.time()) < 60
    f.touch()
    assert f.read_bytes() == b"x"


def random_writes_and_holes(d: Path) -> None:
    f = d / "f"
    with f.open("w+b") as out:
        out.seek(3 * MIB)
        out.write(b"end")
        out.seek(10)
        out.write(b"ten")
        out.flush()
        out.seek(0)
        assert out.read(16) == b"\0" * 10 + b"ten" + b"\0" * 3
    data = f.read_bytes()
    assert (len(data), data[10:13], data[-3:], data.count(0)) == (3 * MIB + 3, b"ten", b"end", 3 * MIB - 3)
    with f.open("r+b") as out:  # a sealed file is copied at its first change
        out.seek(11)
        out.write(b"E")
    assert f.read_bytes()[10:13] == b"tEn"
    assert f.stat().st_size == 3 * MIB + 3


def truncated(d: Path) -> None:
    f = d / "f"
    f.write_bytes(b"0123456789")
    os.truncate(f, 4)
    assert f.read_bytes() == b"0123"
    os.truncate(f, 6)
    assert f.read_bytes() == b"0123\0\0"
    os.truncate(f, 0)
    assert f.read_bytes() == b""
    with f.open("r+b") as out:
        out.write(b"abcdef")
        out.flush()
        out.truncate(2)
        assert os.fstat(out.fileno()).st_size == 2
        out.truncate(3)
    assert f.read_bytes() == b"ab\0"


def truncating_opens(d: Path) -> None:
    f = d / "f"
    f.write_bytes(b"old content")
    fd = os.open(f, os.O_WRONLY | os.O_TRUNC)
    assert os.fstat(fd).st_size == 0
    os.close(fd)
    assert f.read_bytes() == b""
    f.write_bytes(b"again")
    fd = os.open(f, os.O_RDWR)
    assert os.read(fd, 5) == b"again"
    os.close(fd)
    assert f.read_bytes() == b"again"


def two_appenders(d: Path) -> None:
    f = d / "f"
    f.write_bytes(b"")
    one, two = (os.open(f, os.O_WRONLY | os.O_APPEND) for _ in range(2))
    for i in range(10):
        os.write(one, b"a%d" % i)
        os.write(two, b"b%d" % i)
    os.close(one)
    os.close(two)
    assert f.read_bytes() == b"".join(b"a%db%d" % (i, i) for i in range(10))


def many_closes_of_one_file(d: Path) -> None:
    f = d / "f"
    fd = os.open(f, os.O_WRONLY | os.O_CREAT)
    for i in range(3):
        os.write(fd, b"%d" % i)
        os.close(os.dup(fd))
        assert f.read_bytes() == b"012"[: i + 1]  # a close publishes
    os.fsync(fd)
    os.write(fd, b"3")
    os.fsync(fd)
    assert f.read_bytes() == b"0123"
    os.close(fd)


def exclusive(d: Path) -> None:
    f = d / "f"
    os.close(os.open(f, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    expect(errno.EEXIST, os.open, f, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    assert f.exists()


def open_files_keep_their_content(d: Path) -> None:
    f, g = d / "f", d / "g"
    f.write_bytes(b"first" * 1000)
    removed, replaced, over = f.open("rb"), None, None
    f.unlink()
    assert not f.exists()
    assert os.fstat(removed.fileno()).st_nlink == 0
    assert removed.read() == b"first" * 1000
    f.write_bytes(b"second")
    replaced = f.open("rb")
    f.write_bytes(b"third")
    assert (replaced.read(), f.read_bytes()) == (b"second", b"third")
    over = f.open("rb")
    g.write_bytes(b"fourth")
    g.rename(f)
    assert (over.read(), f.read_bytes()) == (b"third", b"fourth")
    assert os.fstat(over.fileno()).st_nlink == 0
    for file in (removed, replaced, over):
        file.close()


def written_while_unlinked(d: Path) -> None:
    f = d / "f"
    with f.open("w+b") as out:
        out.write(b"abc")
        out.flush()
        f.unlink()
        out.write(b"def")
        out.flush()
        assert os.fstat(out.fileno()).st_nlink == 0
        out.seek(0)
        assert out.read() == b"abcdef"
    assert os.listdir(d) == []  # the close did not bring it back


def renamed_while_written(d: Path) -> None:
    f, g = d / "f", d / "g"
    with f.open("wb") as out:
        out.write(b"one")
        f.rename(g)
        out.write(b"two")
    assert os.listdir(d) == ["g"]
    assert g.read_bytes() == b"onetwo"


def renames(d: Path) -> None:
    file, other, directory, full = d / "file", d / "other", d / "dir", d / "full"
    file.write_bytes(b"1")
    other.write_bytes(b"2")
    directory.mkdir()
    full.mkdir()
    (full / "x").write_bytes(b"x")
    expect(errno.ENOENT, os.rename, d / "none", d / "any")
    expect(errno.EISDIR, os.rename, file, directory)
    expect(errno.ENOTDIR, os.rename, directory, file)
    expect(errno.ENOTEMPTY, os.rename, directory, full)
    expect(errno.EINVAL, os.rename, full, full / "below")
    expect(errno.EEXIST, rename_with, 1, file, other)  # RENAME_NOREPLACE
    expect(errno.EINVAL, rename_with, 2, file, other)  # RENAME_EXCHANGE
    rename_with(1, file, d / "free")
    os.rename(d / "free", file)
    os.rename(file, other)
    assert other.read_bytes() == b"1"
    os.rename(full, directory)
    assert (directory / "x").read_bytes() == b"x"
    os.rename(other, directory / "x")
    assert (directory / "x").read_bytes() == b"1"
    assert sorted(os.listdir(d)) == ["dir"]


def kinds_of_errors(d: Path) -> None:
    f, sub = d / "f", d / "sub"
    f.write_bytes(b"1")
    sub.mkdir()
    (sub / "x").write_bytes(b"1")
    expect(errno.ENOTEMPTY, os.rmdir, sub)
    expect(errno.ENOTDIR, os.rmdir, f)
    expect(errno.EISDIR, os.unlink, sub)
    expect(errno.EISDIR, os.open, sub, os.O_WRONLY)
    expect(errno.ENOTDIR, os.open, f / "x", os.O_RDONLY)
    expect(errno.EEXIST, os.mkdir, sub)
    expect(errno.EEXIST, os.mkdir, f)
    expect(errno.ENOENT, os.stat, d / "none")
    expect(errno.ENOENT, os.unlink, d / "none")
    expect(errno.ENOENT, os.rmdir, d / "none")
    expect(errno.ENAMETOOLONG, os.stat, d / ("x" * 256))
    expect(errno.EILSEQ, os.open, os.fsencode(d) + b"/\xff\xfe", os.O_CREAT | os.O_WRONLY)
    expect(errno.EILSEQ, os.stat, os.fsencode(d) + b"/\xff\xfe")
    expect(errno.EPERM, os.symlink, "f", d / "link")
    expect(errno.EPERM, os.link, f, d / "link")
    expect(errno.EPERM, os.mkfifo, d / "fifo")
    expect(errno.EPERM, os.mknod, d / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    expect(errno.ENODATA, os.getxattr, f, "user.x")
    expect(errno.ENODATA, os.removexattr, f, "user.x")
    expect(errno.ENOTSUP, os.setxattr, f, "user.x", b"1")
    assert all(name.startswith("user.kvstore.") for name in os.listxattr(f)), "ours only, and read-only"
    os.mknod(d / "regular", stat.S_IFREG | 0o600)
    assert (d / "regular").stat().st_mode == stat.S_IFREG | 0o600
    fd = os.open(f, os.O_RDONLY)
    expect(errno.EBADF, os.write, fd, b"x")
    os.close(fd)


def names(d: Path) -> None:
    for name in ("-1a@bfloat16.data", "x" * 255, "ä" * 127, "a b\n%", "…"):
        (d / name).write_bytes(name.encode())
        assert name in os.listdir(d)
        assert (d / name).read_bytes() == name.encode()


def attributes(d: Path) -> None:
    f = d / "f"
    f.write_bytes(b"1")
    os.chmod(f, 0o640)
    os.chown(f, 1234, 5678)
    s = f.stat()
    assert (stat.S_IMODE(s.st_mode), s.st_uid, s.st_gid, s.st_nlink) == (0o640, 1234, 5678, 1)
    f.write_bytes(b"22")  # a new version keeps them
    s = f.stat()
    assert (stat.S_IMODE(s.st_mode), s.st_uid, s.st_gid, s.st_size) == (0o640, 1234, 5678, 2)
    fd = os.open(f, os.O_WRONLY)
    os.write(fd, b"333")
    os.fchmod(fd, 0o600)
    os.utime(fd, ns=(5, 5_000_000_000))
    os.close(fd)
    s = f.stat()
    assert (stat.S_IMODE(s.st_mode), s.st_mtime_ns, s.st_size) == (0o600, 5_000_000_000, 3)
    os.chmod(d, 0o2770)
    os.chown(d, 0, 4321)
    (d / "sub").mkdir()
    (d / "g").touch(0)
    assert (d / "sub").stat().st_gid == (d / "g").stat().st_gid == 4321
    assert (d / "sub").stat().st_mode & stat.S_ISGID
    assert stat.S_IMODE((d / "g").stat().st_mode) == 0


def copied_with_the_usual_tools(d: Path) -> None:
    data = os.urandom(3 * MIB + 17)
    (d / "f").write_bytes(data)
    shutil.copy2(d / "f", d / "g")
    assert (d / "g").read_bytes() == data
    shutil.move(d / "g", d / "h")
    shutil.copytree(d, d.parent / f"{d.name}-copy")
    assert (d.parent / f"{d.name}-copy" / "h").read_bytes() == data
    shutil.rmtree(d.parent / f"{d.name}-copy")
    assert not (d.parent / f"{d.name}-copy").exists()


def mapped(d: Path) -> None:
    f = d / "f"
    f.write_bytes(b"x" * 10000)
    with f.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        assert view[:] == b"x" * 10000
    with f.open("r+b") as out:
        changed = mmap.mmap(out.fileno(), 0)
    changed[5000:5003] = b"map"  # after the close: the last bytes come without a flush
    changed.close()
    end = time.monotonic() + 10
    while f.read_bytes()[5000:5003] != b"map" and time.monotonic() < end:
        time.sleep(0.01)
    assert f.read_bytes()[4999:5004] == b"xmapx"


def locks(d: Path) -> None:
    f = d / "f"
    f.touch()
    with f.open("r+b") as one, f.open("r+b") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        expect(errno.EAGAIN, fcntl.flock, two, fcntl.LOCK_EX | fcntl.LOCK_NB)


def space(d: Path) -> None:
    s = os.statvfs(d)
    assert (s.f_bsize, s.f_frsize, s.f_namemax) == (4096, 4096, 255)
    assert s.f_blocks * 4096 == 2 << 30
    assert 0 < s.f_bavail <= s.f_blocks


CASES = [
    create_write_read, empty_and_touched, random_writes_and_holes, truncated, truncating_opens, two_appenders,
    many_closes_of_one_file, exclusive, open_files_keep_their_content, written_while_unlinked, renamed_while_written,
    renames, kinds_of_errors, names, attributes, copied_with_the_usual_tools, mapped, locks,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_on_the_mount(case: Callable[[Path], None], place: Path) -> None:
    in_child(case, place)


# Deliberate differences: some names and kinds are refused here, and a reader keeps the version that it opened.
ONLY_HERE = (kinds_of_errors, renames, names, open_files_keep_their_content)


@pytest.mark.parametrize("case", [c for c in CASES if c not in ONLY_HERE], ids=lambda c: c.__name__)
def test_a_plain_directory_does_the_same(case: Callable[[Path], None], tmp_path: Path) -> None:
    place = tmp_path / "plain"
    place.mkdir()
    case(place)


def test_space(place: Path) -> None:
    in_child(space, place)


def test_a_long_listing_is_whole_and_its_positions_hold(store: Store, place: Path) -> None:
    expected = {f"n{i:05}" for i in range(10_000)}
    publish_empty(store, [f"{place.name}/{name}" for name in expected])

    def work() -> None:
        assert sorted(os.listdir(place)) == sorted(expected)
        seen = []
        with os.scandir(place) as entries:
            for i, entry in enumerate(entries):
                seen.append(entry.name)
                if i == 100:  # what comes and goes meanwhile moves nothing else
                    for gone in range(50):
                        (place / f"n{gone:05}").unlink()
                    (place / "m").touch()
        assert len(seen) == len(set(seen))
        assert {name for name in expected if name >= "n00050"} <= set(seen) <= expected | {"m"}
        assert len(os.listdir(place)) == 10_000 - 50 + 1

    in_child(work)


def publish_empty(store: Store, paths: list[str]) -> None:
    link = Failover([store.cluster.master.facts["ENDPOINT"]], Caller())
    try:
        results = Meta(link, 1).publish([Publication([PublishName(path)]) for path in paths], timeout_s=20)
    finally:
        link.close()
    assert [r for r in results if isinstance(r, KvError)] == []


def test_a_listing_can_go_back_and_on(store: Store, place: Path) -> None:
    """seekdir to where telldir was, over a page boundary of our own, with names gone meanwhile."""
    publish_empty(store, [f"{place.name}/n{i:05}" for i in range(3000)])

    def work() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
        directory = ctypes.c_void_p(libc.opendir(os.fsencode(place)))
        libc.telldir.restype = ctypes.c_long

        def next_name() -> str | None:
            entry = libc.readdir(directory)
            return ctypes.string_at(entry + 19).decode() if entry else None  # after ino, off, reclen and type

        first = [next_name() for _ in range(50)]
        middle = libc.telldir(directory)
        rest = []
        while (name := next_name()) is not None:
            rest.append(name)
        (place / "n02000").unlink()
        libc.seekdir(directory, ctypes.c_long(middle))
        again = []
        while (name := next_name()) is not None:
            again.append(name)
        libc.closedir(directory)
        assert len(first) + len(rest) == 3000
        assert again == [name for name in rest if name != "n02000"]

    in_child(work)


def test_a_name_of_this_mount_is_seen_by_the_other_at_once(store: Store, fresh: str) -> None:
    in_child(os.mkdir, store.a / fresh)
    data = os.urandom(2 * MIB)
    for i in range(5):
        in_child((store.a / fresh / f"f{i}").write_bytes, data)
        assert in_child((store.b / fresh / f"f{i}").read_bytes) == data


def test_a_late_close_does_not_bring_a_removed_file_back(store: Store, fresh: str) -> None:
    in_child(os.mkdir, store.a / fresh)

    def work() -> list[str]:
        with (store.a / fresh / "f").open("wb") as out:
            out.write(b"1")
            out.flush()
            (store.b / fresh / "f").unlink()
            out.write(b"2")
        return os.listdir(store.a / fresh)

    assert in_child(work) == []


def test_exclusive_create_on_two_mounts_has_one_winner(store: Store, fresh: str) -> None:
    in_child(os.mkdir, store.a / fresh)

    def work() -> int:
        wins = 0
        for mount in (store.a, store.b):
            try:
                os.close(os.open(mount / fresh / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                continue
            wins += 1
        return wins

    assert in_child(work) == 1


def test_an_outdated_inode_is_looked_up_again(store: Store, fresh: str) -> None:
    """The kernel remembers its number for a second; the open finds that it is gone, and the caller sees nothing."""
    path_a, path_b = store.a / fresh, store.b / fresh
    in_child(path_a.write_bytes, b"first")

    def work() -> bytes:
        path_b.stat()
        path_a.write_bytes(b"second")
        end = time.monotonic() + 10
        while path_b.read_bytes() != b"second" and time.monotonic() < end:
            pass  # at most metadata_ttl: a whole version all the time
        return path_b.read_bytes()

    assert in_child(work) == b"second"


def test_other_users_are_let_in_and_kept_out(store: Store, fresh: str) -> None:
    path = store.a / fresh
    in_child(path.write_bytes, b"secret")
    in_child(os.chmod, path, 0o600)

    def as_nobody() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        expect(errno.EACCES, os.open, path, os.O_RDONLY)
        assert path.stat().st_size == 6

    # The way to the mount point is private to root in a test's directory.
    for parent in reversed(path.parents[1:]):
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)
    in_child(as_nobody)
