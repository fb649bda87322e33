"""A sealed block cannot be changed through the mount.

Neither close nor rename ends writing: a duplicate of the descriptor, a forked child or a shared map can go on (rule 5).
After every step each block on the workers' disks still has the hash that its name says, and readers get a version that
was whole at some moment.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.calls import error_of
from tests.support.child import in_child
from tests.support.fsops import Bytes, Map
from tests.support.modes import Pair
from tests.support.sealed import AT, CHANGED, FIRST, NEW, SIZE, Blocks, await_version, put

PROT_READ_WRITE: Final = 3


# ---- each way to change a file that is sealed: it returns what the file holds then ----


def by_write(path: Path, look: Callable[[], None]) -> bytes:
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, NEW, AT)
    look()
    os.fsync(fd)
    look()
    os.close(fd)
    return CHANGED


def by_append(path: Path, look: Callable[[], None]) -> bytes:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, NEW)
    look()
    os.close(fd)
    return FIRST + NEW


def by_truncating_open(path: Path, look: Callable[[], None]) -> bytes:
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    look()
    os.write(fd, NEW)
    look()
    os.close(fd)
    return NEW


def by_ftruncate(path: Path, look: Callable[[], None]) -> bytes:
    fd = os.open(path, os.O_RDWR)
    os.ftruncate(fd, AT)
    look()
    os.close(fd)
    return FIRST[:AT]


def by_truncate(path: Path, look: Callable[[], None]) -> bytes:
    os.truncate(path, SIZE + 10)
    look()
    return FIRST + bytes(10)


def by_map(path: Path, look: Callable[[], None]) -> bytes:
    fd = os.open(path, os.O_RDWR)
    view = Map(fd, SIZE, writable=True)
    view.write(AT, NEW)
    look()
    view.sync()
    look()
    view.close()
    os.close(fd)
    return CHANGED


def by_copy(path: Path, look: Callable[[], None]) -> bytes:
    put(path.with_name("source"), NEW)
    source, target = os.open(path.with_name("source"), os.O_RDONLY), os.open(path, os.O_WRONLY)
    assert os.copy_file_range(source, target, len(NEW), 0, AT) == len(NEW)
    look()
    os.close(source)
    os.close(target)
    return CHANGED


def by_sendfile(path: Path, look: Callable[[], None]) -> bytes:
    put(path.with_name("source"), NEW)
    source, target = os.open(path.with_name("source"), os.O_RDONLY), os.open(path, os.O_WRONLY)
    os.lseek(target, AT, os.SEEK_SET)
    assert os.sendfile(target, source, 0, len(NEW)) == len(NEW)
    look()
    os.close(source)
    os.close(target)
    return CHANGED


WAYS: Final = [
    by_write, by_append, by_truncating_open, by_ftruncate, by_truncate, by_map, by_copy, by_sendfile,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_change_makes_a_new_version(
    pair: Pair, place: Path, way: Callable[[Path, Callable[[], None]], bytes]
) -> None:
    def work() -> None:
        path, blocks = place / "k", Blocks(pair.cluster)
        put(path, FIRST)
        blocks.check()
        reader = os.open(path, os.O_RDONLY)
        shared, private = Map(reader, SIZE), Map(reader, SIZE, shared=False, writable=True)
        private.write(0, NEW)

        def look() -> None:
            blocks.check()
            assert os.pread(reader, SIZE + 1, 0) == shared.read() == FIRST

        last = way(path, look)
        await_version(path, {FIRST}, last)
        look()
        assert private.read(0, len(NEW)) == NEW

    in_child(work)


# ---- writers that go on after close and rename ----


def write_to_a_duplicate(path: Path, check: Callable[[], None]) -> None:
    fd = os.open(path.with_suffix(".tmp"), os.O_WRONLY | os.O_CREAT)
    os.write(fd, FIRST)
    late = os.dup(fd)
    os.close(fd)
    path.with_suffix(".tmp").rename(path)
    check()
    os.pwrite(late, NEW, AT)
    check()
    os.fsync(late)
    check()
    os.close(late)


def write_in_a_child(path: Path, check: Callable[[], None]) -> None:
    """The child inherits the descriptor; its parent closes and renames."""
    ready, go = os.pipe()
    fd = os.open(path.with_suffix(".tmp"), os.O_RDWR | os.O_CREAT)
    os.write(fd, FIRST)
    pid = os.fork()
    if pid == 0:
        os.read(ready, 1)
        os.pwrite(fd, NEW, AT)
        os._exit(0)
    os.close(fd)
    path.with_suffix(".tmp").rename(path)
    check()
    os.write(go, b"!")
    assert os.waitpid(pid, 0)[1] == 0


def write_to_a_map(path: Path, check: Callable[[], None]) -> None:
    fd = os.open(path.with_suffix(".tmp"), os.O_RDWR | os.O_CREAT)
    os.write(fd, FIRST)
    view = Map(fd, SIZE, writable=True)
    os.close(fd)
    path.with_suffix(".tmp").rename(path)
    check()
    view.write(AT, NEW)
    check()
    view.sync()
    check()
    view.close()


def write_to_a_dirty_map(path: Path, check: Callable[[], None]) -> None:
    """The same page is dirty before the close: a later store leaves no trace, not even a time."""
    fd = os.open(path.with_suffix(".tmp"), os.O_RDWR | os.O_CREAT)
    os.write(fd, FIRST)
    view = Map(fd, SIZE, writable=True)
    view.write(AT, FIRST[AT : AT + len(NEW)])
    os.close(fd)
    view.write(AT, FIRST[AT : AT + len(NEW)])
    path.with_suffix(".tmp").rename(path)
    check()
    view.write(AT, NEW)
    check()
    view.close()


def write_to_a_map_of_an_ordinary_file(path: Path, check: Callable[[], None]) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, FIRST)
    view = Map(fd, SIZE, writable=True)
    os.close(fd)
    check()
    view.write(AT, NEW)
    check()
    view.close()


LATE: Final = [
    write_to_a_duplicate, write_in_a_child, write_to_a_map, write_to_a_dirty_map, write_to_a_map_of_an_ordinary_file,
]  # fmt: skip


MAPPED: Final = (write_to_a_map, write_to_a_dirty_map, write_to_a_map_of_an_ordinary_file)


@pytest.mark.parametrize("late", LATE, ids=lambda late: late.__name__)
def test_a_late_writer_changes_no_block(
    pair: Pair, place: Path, late: Callable[[Path, Callable[[], None]], None]
) -> None:
    """What was published stays; what is written later becomes a version of its own with the last close.

    Two differences. By passthrough a map goes on when its file is closed, and nobody hears of later stores: they are
    not published. In plain mode they reach the mount at some time; a temporary name that is renamed just then is
    still being written, and on its own mount shows what is written until the close publishes it.
    """
    unheard = pair.mode == "passthrough" and late in MAPPED
    live = pair.mode == "plain" and late is write_to_a_dirty_map

    def work() -> None:
        path, blocks = place / "k", Blocks(pair.cluster)
        readers: dict[int, bytes] = {}

        def check() -> None:
            blocks.check()
            fd = os.open(path, os.O_RDONLY)
            readers[fd] = os.pread(fd, SIZE + 1, 0)
            assert readers[fd] in (FIRST, CHANGED)
            for reader, version in readers.items():
                assert live or os.pread(reader, SIZE + 1, 0) == version

        late(path, check)
        check()
        if not unheard:
            await_version(path, {FIRST}, CHANGED)
            await_version(pair.b / place.name / "k", {FIRST}, CHANGED)
        check()
        assert os.listdir(place) == ["k"]

    in_child(work)


def test_a_late_writer_of_a_removed_name_brings_nothing_back(pair: Pair, place: Path) -> None:
    def work() -> None:
        path, blocks = place / "k", Blocks(pair.cluster)
        fd = os.open(path.with_suffix(".tmp"), os.O_RDWR | os.O_CREAT)
        os.write(fd, FIRST)
        late, view = os.dup(fd), Map(fd, SIZE, writable=True)
        os.close(fd)
        path.with_suffix(".tmp").rename(path)
        path.unlink()
        os.pwrite(late, NEW, AT)
        view.write(0, NEW)
        os.close(late)
        view.close()
        blocks.check()
        assert os.listdir(place) == []

    in_child(work)


def test_many_late_writers_at_once_change_no_block(pair: Pair, place: Path) -> None:
    """Puts of one name, each followed by late writes of every kind, while all blocks are looked at again and again."""

    def storm(seed: int) -> None:
        for turn in range(10):
            data = Bytes(seed * 1000 + turn, 50_000 + 10_000 * seed)
            fd = os.open(place / "k.tmp", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.write(fd, data.value)
            late, view = os.dup(fd), Map(fd, data.size, writable=True)
            os.close(fd)
            (place / "k.tmp").rename(place / "k")
            os.pwrite(late, NEW, turn)
            view.write(turn, NEW)
            os.close(late)
            view.close()

    def work() -> None:
        blocks, pids = Blocks(pair.cluster), []
        for seed in range(3):
            pid = os.fork()
            if pid == 0:
                storm(seed)
                os._exit(0)
            pids.append(pid)
        while pids:
            blocks.check()
            pid, status = os.waitpid(pids[0], os.WNOHANG)
            if pid:
                assert status == 0
                pids.pop(0)
        blocks.check()

    in_child(work)


# ---- what a reader's descriptor can be made to do ----


def test_a_reader_cannot_write(pair: Pair, place: Path) -> None:
    def work() -> None:
        path, blocks = place / "k", Blocks(pair.cluster)
        put(path, FIRST)
        fd = os.open(path, os.O_RDONLY)
        assert error_of(lambda: os.write(fd, NEW)) == "EBADF"
        assert error_of(lambda: os.ftruncate(fd, 0)) == "EINVAL"
        assert error_of(lambda: Map(fd, SIZE, writable=True)) == "EACCES"
        view = Map(fd, SIZE)
        assert view.protect(PROT_READ_WRITE) == errno.EACCES
        blocks.check()
        assert os.pread(fd, SIZE + 1, 0) == view.read() == path.read_bytes() == FIRST

    in_child(work)


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY | os.O_TRUNC], ids=["rdwr", "trunc"])
def test_a_reader_opens_its_descriptor_again_to_write(pair: Pair, place: Path, flags: int) -> None:
    """By /proc/self/fd the kernel opens the inode, not the name. A refusal is fine; a changed block is not."""

    def work() -> None:
        path, blocks = place / "k", Blocks(pair.cluster)
        put(path, FIRST)
        fd = os.open(path, os.O_RDONLY)
        again = []
        assert error_of(lambda: again.append(os.open(f"/proc/self/fd/{fd}", flags))) in ("ok", "ESTALE", "EACCES")
        for writer in again:
            os.pwrite(writer, NEW, AT)
            blocks.check()
            os.close(writer)
        blocks.check()
        assert os.pread(fd, SIZE + 1, 0) == FIRST

    in_child(work)


def test_a_writer_opens_its_descriptor_again(pair: Pair, place: Path) -> None:
    """The same file, under a temporary name as under an ordinary one."""

    def work() -> None:
        for name in ("k.tmp", "ordinary"):
            fd = os.open(place / name, os.O_RDWR | os.O_CREAT)
            os.write(fd, FIRST)
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            assert os.pread(again, SIZE + 1, 0) == FIRST
            os.pwrite(again, NEW, AT)
            assert os.pread(fd, SIZE + 1, 0) == CHANGED
            os.close(again)
            os.close(fd)
            assert (place / name).read_bytes() == CHANGED

    in_child(work)
