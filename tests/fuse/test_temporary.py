"""Temporary names on a real mount:

LMCache's puts, two writers of one name, and what other mounts see of them (rule 24).
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.fuse.calls import expect, rename_with
from tests.support.child import Child, in_child
from tests.support.kept import kill_fs
from tests.support.modes import MODES, Pair, mounted_pair

MIB = 1 << 20


@pytest.fixture(scope="module", params=MODES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with mounted_pair(tmp_path_factory.mktemp("store"), request.param) as pair:
        yield pair


@pytest.fixture
def place(store: Pair, fresh: str) -> Path:
    path = store.a / fresh
    in_child(os.mkdir, path)
    return path


def open_to_write(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def put(directory: Path, key: str, data: bytes) -> None:
    """As LMCache's fs connector does it."""
    fd = open_to_write(directory / f"{key}.tmp")
    os.fstat(fd)
    os.write(fd, data[:28])
    os.write(fd, data[28:])
    os.close(fd)
    os.rename(directory / f"{key}.tmp", directory / f"{key}.data")


def one_put(d: Path) -> None:
    data = os.urandom(14 * MIB)
    put(d, "k", data)
    assert (d / "k.data").read_bytes() == data
    assert os.listdir(d) == ["k.data"]


def half_written_is_nobody_s(d: Path) -> None:
    fd = open_to_write(d / "k.tmp")
    os.write(fd, b"half")
    assert os.listdir(d) == []
    assert not (d / "k.tmp").exists()
    os.close(fd)
    assert os.listdir(d) == ["k.tmp"]
    assert (d / "k.tmp").read_bytes() == b"half"


def two_writers_at_once(d: Path) -> None:
    """On a plain directory one of them publishes a mix, and the other's rename fails."""
    one, two = open_to_write(d / "k.tmp"), open_to_write(d / "k.tmp")
    os.write(one, b"1" * MIB)
    os.write(two, b"2" * 2 * MIB)
    os.write(one, b"1" * MIB)
    os.close(two)
    os.rename(d / "k.tmp", d / "k.data")
    assert (d / "k.data").read_bytes() == b"2" * 2 * MIB
    os.close(one)
    os.rename(d / "k.tmp", d / "k.data")
    assert (d / "k.data").read_bytes() == b"1" * 2 * MIB
    assert os.listdir(d) == ["k.data"]


def two_writers_both_closed(d: Path) -> None:
    for byte in (b"1", b"2"):
        fd = open_to_write(d / "k.tmp")
        os.write(fd, byte * MIB)
        os.close(fd)
    for _ in range(2):
        os.rename(d / "k.tmp", d / "k.data")
        assert (d / "k.data").read_bytes() in (b"1" * MIB, b"2" * MIB)
    with pytest.raises(FileNotFoundError):
        os.rename(d / "k.tmp", d / "k.data")


def a_second_put_after_a_torn_one(d: Path) -> None:
    """A process died in a put and started again: the torn file of its first life must not be published."""
    fd = open_to_write(d / "k.tmp")
    os.write(fd, b"torn")
    os.close(fd)
    put(d, "k", b"whole" * 100)
    assert (d / "k.data").read_bytes() == b"whole" * 100


def without_truncation_a_stale_file_leaves_no_tail(d: Path) -> None:
    """LMCache's O_DIRECT mode opens without O_TRUNC."""
    (d / "k.tmp").write_bytes(b"x" * 10_000)
    fd = os.open(d / "k.tmp", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"short")
    os.close(fd)
    os.rename(d / "k.tmp", d / "k.data")
    assert (d / "k.data").read_bytes() == b"short"


def direct(d: Path) -> None:
    buffer = mmap.mmap(-1, 64 * 4096)
    buffer[:] = bytes(range(256)) * (64 * 4096 // 256)
    fd = os.open(d / "k.tmp", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    assert os.write(fd, buffer) == len(buffer)
    os.close(fd)
    os.rename(d / "k.tmp", d / "k.data")
    fd = os.open(d / "k.data", os.O_RDONLY | os.O_DIRECT)
    target = mmap.mmap(-1, 64 * 4096)
    assert os.readv(fd, [target]) == len(buffer)
    assert target[:] == buffer[:]
    os.close(fd)


def appended_and_reread(d: Path) -> None:
    f = d / "k.tmp"
    f.write_bytes(b"one")
    with f.open("ab") as out:
        out.write(b"two")
    assert f.read_bytes() == b"onetwo"
    with f.open("r+b") as out:
        assert out.read(3) == b"one"
        out.write(b"TWO")
    assert f.read_bytes() == b"oneTWO"
    f.write_bytes(b"new")
    assert f.read_bytes() == b"new"
    f.unlink()
    assert os.listdir(d) == []


def moved_about(d: Path) -> None:
    (d / "a.tmp").write_bytes(b"1")
    (d / "b.tmp").write_bytes(b"2")
    os.rename(d / "a.tmp", d / "b.tmp")
    assert os.listdir(d) == ["b.tmp"]
    assert (d / "b.tmp").read_bytes() == b"1"
    os.rename(d / "b.tmp", d / "c")
    assert (d / "c").read_bytes() == b"1"
    expect(errno.EXDEV, os.rename, d / "c", d / "c.tmp")
    shutil.move(d / "c", d / "c.tmp")  # copies
    assert os.listdir(d) == ["c.tmp"]
    with pytest.raises(PermissionError):
        os.mkdir(d / "directory.tmp")
    expect(errno.ENOTEMPTY, os.rmdir, d)
    shutil.rmtree(d)
    assert not d.exists()


def directory_of_temporary_files(d: Path) -> None:
    """LMCache's relative_tmp_dir."""
    (d / ".tmp").mkdir()
    (d / ".tmp" / "k.data").write_bytes(b"123")
    assert os.listdir(d / ".tmp") == ["k.data"]
    os.rename(d / ".tmp" / "k.data", d / "k.data")
    assert (d / "k.data").read_bytes() == b"123"
    assert os.listdir(d / ".tmp") == []
    os.rmdir(d / ".tmp")


def directories_keep_what_is_temporary_in_them(d: Path) -> None:
    """Renamed, a file in them would be listed, and neither opened nor removed."""
    for name in (".tmp", "pre", "sub"):
        (d / name).mkdir()
        (d / name / "k").write_text(name)
    expect(errno.EXDEV, os.rename, d / ".tmp", d / "post")
    expect(errno.EXDEV, os.rename, d / "pre", d / "sub" / ".tmp")
    expect(errno.EXDEV, rename_with, 1, d / "pre", d / "sub" / ".tmp")
    expect(errno.ENOENT, os.rename, d / "nothing", d / "post")
    os.rename(d / ".tmp", d / "sub" / ".tmp")
    os.rename(d / "pre", d / "x")
    shutil.move(d / "sub" / ".tmp", d / "post")  # copies
    shutil.move(d / "x", d / ".tmp")
    assert (d / "post" / "k").read_text() == ".tmp"
    assert (d / ".tmp" / "k").read_text() == "pre"
    os.rename(d / ".tmp" / "k", d / "k")
    os.rmdir(d / ".tmp")
    os.rename(d / "k", d / ".tmp")
    os.rename(d / ".tmp", d / "k")
    assert sorted(os.listdir(d)) == ["k", "post", "sub"]
    shutil.rmtree(d)


def renamed_by_another_process(d: Path) -> None:
    """mv(1) has no version of its own."""
    for data in (b"older", b"newer"):
        in_child((d / "k.tmp").write_bytes, data)
    os.rename(d / "k.tmp", d / "k.data")
    assert (d / "k.data").read_bytes() == b"newer"


def written_on_through_a_duplicate(d: Path) -> None:
    """Neither close nor rename end writing: a duplicate goes on, in a copy that its own close publishes."""
    fd = open_to_write(d / "k.tmp")
    os.write(fd, b"one")
    other = os.dup(fd)
    os.close(fd)
    os.rename(d / "k.tmp", d / "k.data")
    sealed = os.open(d / "k.data", os.O_RDONLY)
    os.write(other, b"two")
    assert (d / "k.data").read_bytes() == b"one"
    os.close(other)
    assert (d / "k.data").read_bytes() == b"onetwo"
    assert os.pread(sealed, 100, 0) == b"one"
    os.close(sealed)


def renamed_with_no_replace(d: Path) -> None:
    (d / "k.tmp").write_bytes(b"new")
    (d / "k").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        rename_with(1, d / "k.tmp", d / "k")
    assert (d / "k").read_bytes() == b"old"
    (d / "k").unlink()
    rename_with(1, d / "k.tmp", d / "k")
    assert (d / "k").read_bytes() == b"new"


def empty(d: Path) -> None:
    (d / "k.tmp").touch()
    os.rename(d / "k.tmp", d / "k.data")
    assert (d / "k.data").read_bytes() == b""


CASES = [
    one_put, half_written_is_nobody_s, two_writers_at_once, two_writers_both_closed, a_second_put_after_a_torn_one,
    without_truncation_a_stale_file_leaves_no_tail, direct, appended_and_reread, moved_about,
    directory_of_temporary_files, directories_keep_what_is_temporary_in_them, renamed_by_another_process,
    written_on_through_a_duplicate, renamed_with_no_replace, empty,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_temporary_names(case: Callable[[Path], None], place: Path) -> None:
    in_child(case, place)


def put_and_fork(directory: Path) -> Iterator[str]:
    """A put with a fork in its middle: the child closes what it inherited, which flushes the half."""
    fd = open_to_write(directory / "k.tmp")
    os.write(fd, b"1" * MIB)
    yield "half"
    in_child(os.close, fd)
    yield "flushed"
    os.write(fd, b"1" * MIB)
    os.close(fd)
    os.rename(directory / "k.tmp", directory / "k.data")
    yield "renamed"


def take_steps(told: Connection, teller: Connection, steps: Iterator[str]) -> None:
    """One each time it is told to; says which."""
    teller.close()
    for step in steps:
        told.send(step)
        told.recv()


def beside_a_flushed_half(d: Path, finish: Callable[[Path], None]) -> None:
    """A whole version, closed but for a duplicate, when another process has flushed the half of its own; `finish`
    renames or removes it. That process goes on to the end of its put.
    """
    teller, told = Pipe()
    other = Child(take_steps, told, teller, put_and_fork(d))
    told.close()
    assert teller.recv() == "half"
    fd = open_to_write(d / "k.tmp")
    os.write(fd, b"2" * MIB)
    duplicate = os.dup(fd)
    os.close(fd)
    teller.send(None)
    assert teller.recv() == "flushed"
    finish(d)
    teller.send(None)
    assert teller.recv() == "renamed"
    assert (d / "k.data").read_bytes() == b"1" * 2 * MIB
    teller.send(None)
    other.join()
    os.close(duplicate)
    assert os.listdir(d) == ["k.data"]


def rename_in_a_thread(d: Path) -> None:
    """As LMCache does: not in the thread that opened it."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(os.rename, d / "k.tmp", d / "k.data").result()
    assert (d / "k.data").read_bytes() == b"2" * MIB


def give_up(d: Path) -> None:
    """As LMCache does when a put fails."""
    os.unlink(d / "k.tmp")


@pytest.mark.parametrize("finish", [rename_in_a_thread, give_up], ids=lambda finish: finish.__name__)
def test_a_process_means_its_own(store: Pair, place: Path, finish: Callable[[Path], None]) -> None:
    in_child(beside_a_flushed_half, place, finish)
    if store.mode == "passthrough":  # a successor knows whose is whose
        in_child(beside_a_flushed_half, place, partial(finish_after_a_kill, finish, store.a.path))


def finish_after_a_kill(finish: Callable[[Path], None], mount: Path, d: Path) -> None:
    kill_fs(mount)
    finish(d)


def test_other_mounts_never_see_them(store: Pair, place: Path) -> None:
    there = store.b / place.name
    in_child((place / "k.tmp").write_bytes, b"1")
    assert in_child(os.listdir, there) == []
    assert not in_child((there / "k.tmp").exists)


def test_writers_in_four_processes_on_two_mounts_share_their_names(store: Pair, fresh: str) -> None:
    """No put fails, every read at every moment is a whole version that somebody wrote, nothing is left behind."""
    in_child(os.mkdir, store.a / fresh)
    keys, rounds = 3, 4

    def content(key: int, writer: int, turn: int) -> bytes:
        head = b"%d %d %d " % (key, writer, turn)
        body = head * ((200_000 + 50_000 * writer) // len(head))
        return hashlib.sha256(body).digest() + body

    def write(directory: Path, writer: int) -> None:
        for turn, key in itertools.product(range(rounds), range(keys)):
            put(directory, f"k{key}", content(key, writer, turn))

    def read_once(path: Path) -> bool:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return False
        assert hashlib.sha256(data[32:]).digest() == data[:32]
        return True

    def read(directory: Path) -> int:
        return sum(read_once(directory / f"k{key}.data") for _ in range(rounds * 4) for key in range(keys))

    writers = [Child(write, (store.a if i % 2 else store.b) / fresh, i) for i in range(4)]
    readers = [Child(read, mount / fresh) for mount in (store.a, store.b)]
    for writer in writers:
        writer.join(60)
    for reader in readers:
        reader.join(60)
    for mount in (store.a, store.b):
        assert in_child(os.listdir, mount / fresh) == [f"k{key}.data" for key in range(keys)]
        assert in_child(read, mount / fresh) == rounds * 4 * keys
