"""The mount and a plain directory side by side: any sequence of calls, by several processes, has the same answers.

Where the mount promises something else than POSIX, the plain side is `tests.support.promise`, which keeps the promise
with plain files. `DIFFERENCES` says what and why, and nothing else may differ. `KVSTORE_LONG=1` looks for longer, at
random, and makes failures small (with ``-o faulthandler_timeout=0``).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from tests.support import fsops
from tests.support.dual import (
    ACTORS,
    DIRECTORIES,
    ODD,
    Handle,
    Scan,
    SideBySide,
    World,
    attribute_setter,
    shared_world,
    tell,
)
from tests.support.fsops import Call, Failed, call
from tests.support.modes import MODES
from tests.support.promise import Opened, is_temporary

DIFFERENCES: Final = {
    "published at close": "A reader has the version that he opened, whole; a writer's bytes show at his close or "
    "fsync, as a new version. A reader of a cache must never see half of a file.",
    "temporary name appears at close": "Nobody may publish what is being written. So a second writer's create makes a "
    "file of his own.",
    "temporary name written again": "An open for writing makes a new version, empty unless it reads or appends: two "
    "writers never mix their bytes. The former version waits for a second rename, or an unlink.",
    "no temporary directories": "Nothing below one could be published: EPERM.",
    "no way back to a temporary name": "Others would see the name vanish: EXDEV, and mv(1) copies.",
    "hidden from other mounts": "A temporary name is known to its own mount alone.",
    "attributes of an open version": "What changes them elsewhere (on another mount, by a writer's descriptor, by a "
    "close that replaces the version) a reader's fstat shows when the kernel asks again, after metadata_ttl.",
    "all is data": "SEEK_DATA and SEEK_HOLE see no holes.",
    "refused": "Links, devices and users' attributes are not offered.",
}
"""Not compared at all: inode numbers, sizes and link counts of directories, blocks, times that nobody set."""

REFUSED: Final = (
    ("EPERM", call(fsops.hard_link, "d/a", "refused")),
    ("EPERM", call(fsops.symbolic_link, "d/a", "refused")),
    ("EPERM", call(fsops.make_fifo, "refused")),
    ("ENOTSUP", call(fsops.set_attribute, "d", "user.x")),
    ("ENODATA", call(fsops.get_attribute, "d", "user.x")),
    ("ENOTSUP", call(fsops.unnamed, "d")),
)
LONG: Final = bool(os.environ.get("KVSTORE_LONG"))
PROFILE: Final = settings(
    max_examples=2000 if LONG else 50,
    stateful_step_count=100 if LONG else 50,
    derandomize=not LONG,
    database=None,
    deadline=None,
    # Making a failure smaller takes minutes, more than a test may take here.
    phases=(Phase.generate, Phase.shrink) if LONG else (Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
MIB: Final = 1 << 20

actors = st.integers(0, ACTORS - 1)
picks = st.integers(0, 9999)
"""The how manieth of those that are there: of open files, of paths."""
offsets = st.one_of(st.integers(0, 300), st.sampled_from((4095, 4096, 8191, 65_537, MIB - 1, MIB, 2 * MIB + 5)))
sizes = st.one_of(st.integers(0, 300), st.sampled_from((4096, 4097, 65_536, 131_073, MIB, MIB + 7)))
accesses = st.sampled_from((os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR))
creations = st.sampled_from((0, os.O_CREAT, os.O_CREAT, os.O_CREAT | os.O_EXCL))
extras = st.sampled_from((0, 0, os.O_TRUNC, os.O_APPEND))
modes = st.sampled_from((0o600, 0o644, 0o755, 0o000))
locks = st.sampled_from((fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN))
old_times = st.integers(1, fsops.OLD_NS - 1)


class Dual(SideBySide):
    """The operations. What happens to an open file first, then what happens to names."""

    @rule(actor=actors, path=picks, access=accesses, creation=creations, extra=extras, mode=modes)
    def open_file(self, actor: int, path: int, access: int, creation: int, extra: int, mode: int) -> None:
        name, flags = self.path(path), access | creation | extra
        if not (self.promise.is_written(name) and flags & (os.O_CREAT | os.O_ACCMODE | os.O_TRUNC)):
            self.open(actor, name, flags, mode)  # two writers of one temporary name at a time: test_temporary

    @rule(actor=actors, path=picks)
    def open_elsewhere(self, actor: int, path: int) -> None:
        name, number = self.path(path), next(self.numbers)
        wanted = call(fsops.open_file, number, name, os.O_RDONLY)
        answer = self.step(actor, wanted, self.elsewhere(name, wanted), "other")
        self.keep(answer, name, Handle(number, actor, "other", os.O_RDONLY, Opened()))

    @precondition(lambda self: len(self.handles) > 2)
    @rule(pick=picks)
    def close_file(self, pick: int) -> None:
        self.close(self.handles[pick % len(self.handles)])

    @precondition(lambda self: self.here)
    @rule(pick=picks)
    def dup(self, pick: int) -> None:
        handle = self.here[pick % len(self.here)]
        if handle.opened.copy is None or not handle.opened.copy.is_hidden:
            self.duplicate(handle)  # the close of a duplicate shows a temporary name: test_maps

    @precondition(lambda self: self.handles)
    @rule(pick=picks, size=sizes, offset=st.none() | offsets)
    def read(self, pick: int, size: int, offset: int | None) -> None:
        handle = self.handles[pick % len(self.handles)]
        wanted = call(fsops.read, handle.number, size)
        if offset is not None:
            wanted = call(fsops.pread, handle.number, offset, size)
        self.step(handle.actor, wanted, side=handle.side)

    @precondition(lambda self: self.writers)
    @rule(pick=picks, size=sizes, offset=st.none() | offsets)
    def write(self, pick: int, size: int, offset: int | None) -> None:
        handle, data = self.writers[pick % len(self.writers)], self.data(size)
        wanted = call(fsops.write, handle.number, data)
        if offset is not None:
            wanted = call(fsops.pwrite, handle.number, offset, data)
        self.step(handle.actor, wanted)

    @precondition(lambda self: self.handles)
    @rule(pick=picks, offset=st.integers(-10, 400), whence=st.sampled_from((os.SEEK_SET, os.SEEK_CUR, os.SEEK_END)))
    def seek(self, pick: int, offset: int, whence: int) -> None:
        handle = self.handles[pick % len(self.handles)]
        self.step(handle.actor, call(fsops.seek, handle.number, offset, whence), side=handle.side)

    @precondition(lambda self: self.here)
    @rule(pick=picks, offset=offsets, whence=st.sampled_from((os.SEEK_DATA, os.SEEK_HOLE)))
    def seek_data(self, pick: int, offset: int, whence: int) -> None:
        handle = self.here[pick % len(self.here)]
        self.differs("all is data")
        promised = call(fsops.seek_as_if_all_were_data, handle.number, offset, whence)
        self.step(handle.actor, call(fsops.seek, handle.number, offset, whence), promised)

    @precondition(lambda self: self.here)
    @rule(pick=picks, size=offsets)
    def truncate_open(self, pick: int, size: int) -> None:
        handle = self.here[pick % len(self.here)]
        self.step(handle.actor, call(fsops.truncate_open, handle.number, size))

    @precondition(lambda self: self.here)
    @rule(pick=picks, data_only=st.booleans())
    def sync(self, pick: int, data_only: bool) -> None:
        handle = self.here[pick % len(self.here)]
        self.step(handle.actor, call(fsops.sync, handle.number, data_only))
        self.promise.synced(handle.opened)

    @precondition(lambda self: self.handles)
    @rule(pick=picks)
    def stat_open(self, pick: int) -> None:
        handle = self.handles[pick % len(self.handles)]
        wanted, copy = call(fsops.stat_open, handle.number), handle.opened.copy
        if copy is None or copy.superseded:
            self.differs("attributes of an open version")
            self.step(handle.actor, wanted, side=handle.side, seen=lambda found: (found.kind, found.size))
        else:
            self.step(handle.actor, wanted)

    @precondition(lambda self: self.writers)
    @rule(pick=picks, mode=modes, mtime_ns=old_times, times=st.booleans())
    def set_open_attributes(self, pick: int, mode: int, mtime_ns: int, times: bool) -> None:
        handle = self.writers[pick % len(self.writers)]
        wanted = call(fsops.chmod_open, handle.number, mode)
        if times:
            wanted = call(fsops.set_times_open, handle.number, mtime_ns)
        self.step(handle.actor, wanted)
        self.promise.open_attributes_changed(handle.opened, attribute_setter(mode, mtime_ns, times))

    @precondition(lambda self: self.handles)
    @rule(pick=picks, page=st.integers(0, 300), size=st.integers(1, 20_000), shared=st.booleans())
    def read_map(self, pick: int, page: int, size: int, shared: bool) -> None:
        handle = self.handles[pick % len(self.handles)]
        length = self.size_of(handle)
        if length == 0:
            return
        offset = page % -(-length // fsops.PAGE_BYTES) * fsops.PAGE_BYTES
        # Beyond the end is SIGBUS, on every file system.
        wanted = call(fsops.read_map, handle.number, offset, min(size, length - offset), shared)
        self.step(handle.actor, wanted, side=handle.side)

    @precondition(lambda self: self.here)
    @rule(pick=picks, offset=offsets, size=st.integers(1, 20_000), shared=st.booleans(), synced=st.booleans())
    def write_map(self, pick: int, offset: int, size: int, shared: bool, synced: bool) -> None:
        handle = self.here[pick % len(self.here)]
        length = self.size_of(handle)
        if length == 0:
            return
        offset %= length
        data = self.data(min(size, length - offset))
        answer = self.step(handle.actor, call(fsops.write_map, handle.number, offset, data, shared, synced))
        if synced and not isinstance(answer, Failed):  # msync is an fsync, but with passthrough nobody is told
            self.step(handle.actor, call(fsops.sync, handle.number, False))
            self.promise.synced(handle.opened)

    @precondition(lambda self: self.writers)
    @rule(pick=picks, other=picks, at=offsets, to=offsets, size=sizes, sends=st.booleans())
    def copy_between(self, pick: int, other: int, at: int, to: int, size: int, sends: bool) -> None:
        target = self.writers[pick % len(self.writers)]
        able = [h for h in self.here if h.actor == target.actor]
        source = able[other % len(able)]
        if source.opened.copy is target.opened.copy:
            return  # what a file sends to itself depends on the size of the pieces
        wanted = call(fsops.copy_range, source.number, at, target.number, to, size)
        if sends:
            wanted = call(fsops.send_file, target.number, source.number, at, size)
        self.step(source.actor, wanted)

    @precondition(lambda self: self.here)
    @rule(pick=picks, kind=locks, start=st.integers(0, 20), length=st.integers(0, 20), whole=st.booleans())
    def lock(self, pick: int, kind: int, start: int, length: int, whole: bool) -> None:
        handle = self.here[pick % len(self.here)]
        wanted = call(fsops.lock_range, handle.number, kind, start, length)
        self.step(handle.actor, call(fsops.flock, handle.number, kind) if whole else wanted)

    @rule(actor=actors, path=picks, content=st.booleans(), elsewhere=st.booleans())
    def look(self, actor: int, path: int, content: bool, elsewhere: bool) -> None:
        name = self.path(path)
        wanted = call(fsops.read_file if content else fsops.stat_path, name)
        if elsewhere:
            self.step(actor, wanted, self.elsewhere(name, wanted), "other")
        else:
            self.step(actor, wanted)

    @rule(actor=actors, path=picks, size=offsets)
    def truncate(self, actor: int, path: int, size: int) -> None:
        self.cut(actor, self.path(path), size)

    @rule(actor=actors, path=picks, mode=modes, mtime_ns=old_times, times=st.booleans())
    def set_attributes(self, actor: int, path: int, mode: int, mtime_ns: int, times: bool) -> None:
        name = self.path(path)
        wanted = call(fsops.set_times, name, mtime_ns) if times else call(fsops.chmod, name, mode)
        if not isinstance(self.step(actor, wanted), Failed):
            self.promise.attributes_changed(name, attribute_setter(mode, mtime_ns, times))

    @rule(actor=actors, source=picks, new=picks, no_replace=st.booleans())
    def rename(self, actor: int, source: int, new: int, no_replace: bool) -> None:
        old_name, new_name = self.path(source), self.path(new)
        if ".tmp" in (old_name, new_name) or self.promise.is_written(new_name):
            return  # what is temporary would change with the directory's name; two writers of one temporary name
        wanted = call(fsops.rename, old_name, new_name, int(no_replace))
        promised = self.promise.rename(old_name, new_name, int(no_replace))
        if isinstance(self.step(actor, wanted, promised), Failed):
            return
        written_again = old_name in self.promise.rewritten and old_name != new_name
        self.promise.renamed(old_name, new_name)
        if written_again:
            self.ask(actor, ("mount", call(fsops.unlink, old_name)))
            self.promise.rewritten.discard(old_name)
            self.step(actor, call(fsops.stat_path, old_name))

    @rule(actor=actors, path=picks)
    def unlink(self, actor: int, path: int) -> None:
        name = self.path(path)
        if not isinstance(self.step(actor, call(fsops.unlink, name)), Failed):
            self.promise.unlinked(name)

    @rule(actor=actors, path=st.sampled_from((*DIRECTORIES, *ODD, "a", "x.tmp")), remove=st.booleans())
    def directory(self, actor: int, path: str, remove: bool) -> None:
        if remove:
            self.step(actor, call(fsops.remove_directory, path))
        else:
            self.step(actor, call(fsops.make_directory, path), self.promise.make_directory(path))

    @rule(actor=actors, path=st.sampled_from((*DIRECTORIES, ".", ".", "a")), elsewhere=st.booleans())
    def names_in(self, actor: int, path: str, elsewhere: bool) -> None:
        wanted = call(fsops.names_in, path)
        if not elsewhere or is_temporary(path):
            self.step(actor, wanted)
            return
        answer, expected = self.ask(actor, ("other", wanted), ("plain", wanted))
        if isinstance(expected, list):
            expected = [name for name in expected if not is_temporary(f"{path}/{name}")]
        assert answer == expected, f"{wanted} on the other mount"

    @precondition(lambda self: len(self.scans) < 2)
    @rule(actor=actors, path=st.sampled_from((".", "d")))
    def begin_scan(self, actor: int, path: str) -> None:
        if not (self.promise.tree / path).is_dir():
            return
        number, fd = next(self.numbers), os.open(self.promise.tree / path, os.O_RDONLY)
        there = set(os.listdir(fd))
        self.scans.append(Scan(number, actor, fd, there, there.copy()))
        self.ask(actor, ("mount", call(fsops.begin_scan, number, path)))

    @precondition(lambda self: self.scans)
    @rule(pick=picks, buffer_bytes=st.integers(40, 120))
    def scan_on(self, pick: int, buffer_bytes: int) -> None:
        """One or two names at a time. Who was there all the time is seen once, whatever comes and goes."""
        scan = self.scans[pick % len(self.scans)]
        answer, again = self.ask(
            scan.actor,
            ("mount", call(fsops.scan_on, scan.number, buffer_bytes)),
            ("mount", call(fsops.scan_on, scan.number, buffer_bytes)),
        )
        tell(f"{scan.actor} {scan.number} goes on: {answer}, {again}")
        if isinstance(answer, Failed):  # as on every file system, when the directory is gone
            assert answer == Failed("ENOENT")
            assert os.fstat(scan.fd).st_nlink == 0
        else:
            scan.seen += [*answer, *again]
            if again:
                return
            assert scan.stayed <= set(scan.seen) <= scan.came
            assert len(scan.seen) == len(set(scan.seen))
        self.ask(scan.actor, ("mount", call(fsops.end_scan, scan.number)))
        os.close(scan.fd)
        self.scans.remove(scan)

    @rule(actor=actors, refused=st.sampled_from(REFUSED))
    def refuse(self, actor: int, refused: tuple[str, Call]) -> None:
        error, wanted = refused
        self.differs("refused")
        if (self.promise.tree / "d/a").exists():
            assert self.ask(actor, ("mount", wanted)) == [Failed(error)]
            self.step(actor, call(fsops.stat_path, "refused"))


@pytest.fixture(scope="module", params=MODES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with shared_world(tmp_path_factory.mktemp("dual"), request.param, DIFFERENCES) as world:
        yield world


@pytest.mark.slow
def test_mount_and_plain_directory_agree(world: World) -> None:
    Dual.world = world
    run_state_machine_as_test(Dual, settings=PROFILE)
    assert not LONG or world.differed == set(DIFFERENCES), "a difference that never shows is none"
