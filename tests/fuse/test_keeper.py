"""The keeper on the real device, with a file system process that is as small as can be (`tests.support.tiny_fs`)."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.keeper import admin, mountinfo
from tests.fuse.calls import error_of
from tests.support.child import Child, in_child
from tests.support.cluster import wait_until
from tests.support.keeper_mount import SIZE, WAIT_S, Mounted, mounting
from tests.support.kept import has_ended

_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    with mounting(tmp_path) as made:
        made.start("--deadline", "8", "--busy-wait", "1")
        yield made


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Service.


def test_reads_and_writes_pass_through(mounted: Mounted) -> None:
    """The file system process sees opens and closes, not a single READ or WRITE."""

    def use() -> tuple[str, int, int]:
        with open(mounted.path / "file", "r+b", buffering=0) as file:
            before = mounted.status()
            assert (before["backing_ids"], before["opens"]) == (1, 1)
            content = hashlib.sha256(file.read(SIZE)).hexdigest()
            os.pwrite(file.fileno(), b"through", 1000)
            with mmap.mmap(file.fileno(), SIZE) as mapped:
                mapped[2000:2004] = b"map!"
                mapped.flush()
            return content, before["requests"], mounted.status()["requests"]

    content, before, after = in_child(use)
    assert content == mounted.digest
    assert after - before <= 8, "getattr and fsync, no READ or WRITE"
    data = (mounted.shown / "file").read_bytes()
    assert (data[1000:1007], data[2000:2004]) == (b"through", b"map!")
    assert in_child(digest, mounted.path / "direct") == digest(mounted.shown / "direct")


def test_files_made_by_passthrough(mounted: Mounted) -> None:
    def make() -> bytes:
        temporary, final = mounted.path / "new.tmp", mounted.path / "new"
        temporary.write_bytes(b"x" * SIZE)
        os.replace(temporary, final)
        return final.read_bytes()

    assert in_child(make) == b"x" * SIZE
    assert in_child(os.listdir, mounted.path) == ["direct", "file", "new"]
    in_child(os.unlink, mounted.path / "new")
    assert not (mounted.shown / "new").exists()


def test_a_notification_does_not_wait_for_the_look_up_that_it_blocks(mounted: Mounted) -> None:
    """The kernel holds the directory's lock for the look-up; the notification needs that lock."""
    assert in_child(error_of, os.stat, mounted.path / "notify-0.5") == "ENOENT"
    assert mounted.status()["pending"] == 0


def test_look_ups_in_one_directory_are_not_queued_in_the_kernel(mounted: Mounted) -> None:
    slow = [Child(error_of, os.stat, mounted.path / f"sleep-0.{i}") for i in (6, 5, 4)]
    wait_until(lambda: mounted.status()["pending"] == len(slow), "all are under way")
    assert {child.join() for child in slow} == {"ENOENT"}


def as_nobody(path: Path) -> str:
    os.setgid(65534)
    os.setuid(65534)
    return error_of(os.stat, path)


@pytest.mark.parametrize(("options", "expected"), [((), "EACCES"), (("--allow-other",), "ok")])
def test_others_are_let_in_when_asked_for(options: tuple[str, ...], expected: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        with mounting(Path(name)) as made:
            made.start(*options)
            assert in_child(as_nobody, made.path / "file") == expected


def test_two_thousand_opens_leave_nothing(mounted: Mounted) -> None:
    def cycle(count: int) -> None:
        for _ in range(count):
            os.close(os.open(mounted.path / "file", os.O_RDONLY))
            os.close(os.open(mounted.path / "direct", os.O_RDONLY))

    def footprint() -> tuple[int, int, list[Any]]:
        """Open fds, resident KiB, counts: once all is closed."""
        wait_until(lambda: mounted.status()["opens"] == mounted.status()["pending"] == 0, "all is closed")
        status = mounted.status()
        home = Path(f"/proc/{status['pid']}")
        time.sleep(0.1)  # until the question's own connection is closed
        resident = next(line for line in (home / "status").read_text().splitlines() if line.startswith("VmRSS"))
        names = ("backing_ids", "offers", "kept", "answered_eio", "late_replies")
        return len(os.listdir(home / "fd")), int(resident.split()[1]), [status[n] for n in names]

    in_child(cycle, 200)
    fds, kib, counts = footprint()
    assert counts == [0, 0, 0, 0, 0]
    in_child(cycle, 1000)
    more_fds, more_kib, counts = footprint()
    assert (more_fds, counts) == (fds, [0, 0, 0, 0, 0])
    assert more_kib <= kib + 256


# Hand-over.


def read_until(stop: Path, path: Path, expected: str) -> int:
    """Open, read, verify, close, again and again; how often."""
    count = 0
    while not stop.exists():
        assert digest(path) == expected
        count += 1
    return count


def write_until(stop: Path, directory: Path, name: str) -> int:
    """Make, write, rename, read back; how often."""
    count = 0
    while not stop.exists():
        data = f"{name} {count}".encode() * 1000
        (directory / f"{name}.tmp").write_bytes(data)
        os.replace(directory / f"{name}.tmp", directory / name)
        assert (directory / name).read_bytes() == data
        count += 1
    return count


def read_open_file_until(stop: Path, path: Path, expected: str) -> float:
    """One open file, read all the time; the longest that one read took, in seconds."""
    longest = 0.0
    with open(path, "rb", buffering=0) as file:
        while not stop.exists():
            begin = time.monotonic()
            data = os.pread(file.fileno(), SIZE, 0)
            longest = max(longest, time.monotonic() - begin)
            assert hashlib.sha256(data).hexdigest() == expected
    return longest


@contextmanager
def under_load(mounted: Mounted, tmp_path: Path) -> Iterator[None]:
    """Readers and a writer, none of which may see an error."""
    stop = tmp_path / "stop"
    busy = [
        Child(read_until, stop, mounted.path / "file", mounted.digest),
        Child(read_until, stop, mounted.path / "file", mounted.digest),
        Child(write_until, stop, mounted.path, "w"),
    ]
    try:
        yield
    finally:
        stop.touch()
        counts = [child.join(30.0) for child in busy]
    assert min(counts) > 5, counts
    status = mounted.status()
    assert (status["answered_eio"], status["late_replies"]) == (0, 0)


def test_killed_under_load(mounted: Mounted, tmp_path: Path) -> None:
    with under_load(mounted, tmp_path):
        for _ in range(6):
            time.sleep(0.3)
            mounted.kill_fs()
        wait_until(lambda: mounted.status()["state"] == "serving", "somebody serves")
        time.sleep(0.5)
    status = mounted.status()
    assert (status["outages"], status["generation"]) == (6, 6)
    wait_until(lambda: mounted.status()["backing_ids"] == 0, "all is closed")


def test_upgraded_under_load(mounted: Mounted, tmp_path: Path) -> None:
    with under_load(mounted, tmp_path):
        for _ in range(4):
            time.sleep(0.3)
            before = mounted.status()["fs_pid"]
            done = admin.upgrade(str(mounted.path), sys.executable)
            assert (done.old_pid, done.new_pid) == (before, mounted.status()["fs_pid"])
            assert done.pause_s < 2.0
    status = mounted.status()
    assert (status["outages"], status["generation"]) == (0, 4)


def test_an_open_file_is_read_on_while_nobody_serves(tmp_path: Path) -> None:
    with mounting(tmp_path) as made:
        made.start("--deadline", "30", fs=("--start-delay", "1.5"))
        stop = tmp_path / "stop"
        reader = Child(read_open_file_until, stop, made.path / "file", made.digest)
        wait_until(lambda: made.status()["backing_ids"] == 1, "the file is open")
        made.kill_fs()
        wait_until(lambda: made.status()["state"] == "outage", "nobody serves")
        asked = time.monotonic()
        assert in_child(digest, made.path / "direct") == digest(made.shown / "direct")
        assert time.monotonic() - asked > 1.0, "it waited for the successor"
        stop.touch()
        assert reader.join() < 1.0


def stop_and_ask(pid: int, path: Path) -> str:
    """At once: who asks late, on a busy machine, may be answered by the successor."""
    os.kill(pid, signal.SIGSTOP)
    return error_of(os.stat, path)


def test_a_stopped_process_is_answered_for(tmp_path: Path) -> None:
    with mounting(tmp_path) as made:
        made.start("--deadline", "3", "--slow-deadline", "60", fs=("--start-delay", "2"))
        pid = int(made.status()["fs_pid"])
        begin = time.monotonic()
        assert in_child(stop_and_ask, pid, made.path / "file") == "EIO"
        assert 2.0 < time.monotonic() - begin < 8.0
        wait_until(lambda: made.status()["fs_pid"] not in (0, pid), "it was replaced")
        assert in_child(digest, made.path / "file") == made.digest


def test_a_client_killed_in_an_outage_leaves_nothing(tmp_path: Path) -> None:
    with mounting(tmp_path) as made:
        made.start("--deadline", "30", fs=("--start-delay", "1"))
        waiting = [Child(digest, made.path / "sleep-1.5"), Child(digest, made.path / "file")]
        wait_until(lambda: made.status()["pending"] >= 1, "it waits")
        made.kill_fs()
        for child in waiting:
            child.kill()
        assert in_child(digest, made.path / "file") == made.digest
        wait_until(lambda: made.status()["pending"] == made.status()["opens"] == 0, "nothing is left", 10.0)


# The end.


def test_unmounting_ends_the_keeper(mounted: Mounted) -> None:
    subprocess.run(["umount", str(mounted.path)], check=True, timeout=10)
    assert mounted.wait() == 0
    assert_gone(mounted)


def assert_gone(mounted: Mounted) -> None:
    assert not mounted.is_mounted()
    with pytest.raises(admin.NoKeeper):
        mounted.status()
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(mounted.shown).encode() in _bytes_of(p)]


def _bytes_of(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_unmounts(mounted: Mounted, number: signal.Signals) -> None:
    assert mounted.process is not None
    mounted.process.send_signal(number)
    assert mounted.wait() == 0
    assert_gone(mounted)


def test_a_busy_mount_is_detached_and_its_holder_named(mounted: Mounted) -> None:
    assert mounted.process is not None
    script = f"f = open({str(mounted.path / 'file')!r}, 'rb'); print(flush=True); input()"
    script += "; assert len(f.read()) == 3 << 20; print('read')"
    user = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert user.stdout is not None
        user.stdout.readline()
        mounted.process.terminate()
        assert mounted.wait() == 0
        assert_gone(mounted)
        assert f"[{user.pid}]: fd 3 ({mounted.path}/file)" in mounted.log.read_text()
        assert "is busy" in mounted.log.read_text()
        output, _ = user.communicate(b"\n", timeout=WAIT_S)
        assert output == b"read\n", "what passes through goes on for whoever has it open"
    finally:
        user.kill()
        user.communicate()


def test_a_killed_keeper_leaves_a_mount_that_can_be_cleaned(mounted: Mounted) -> None:
    fs_pid = mounted.status()["fs_pid"]
    assert mounted.process is not None
    mounted.process.kill()
    mounted.wait()
    assert in_child(error_of, os.stat, mounted.path / "file") == "ENOTCONN"
    wait_until(lambda: has_ended(fs_pid), "the file system process ended too")
    with pytest.raises(admin.NoKeeper, match="dead"):
        mounted.status()
    subprocess.run(["umount", "-l", str(mounted.path)], check=True, timeout=10)
    assert_gone(mounted)
    mounted.start()
    assert in_child(digest, mounted.path / "file") == mounted.digest


def test_an_aborted_connection_leaves_no_dead_mount(mounted: Mounted) -> None:
    there = mountinfo.find(str(mounted.path))
    assert there is not None
    control = Path(f"/sys/fs/fuse/connections/{there.minor}/abort")
    if not control.exists():
        subprocess.run(["mount", "-t", "fusectl", "none", "/sys/fs/fuse/connections"], check=True, timeout=10)
    control.write_text("1")
    assert mounted.wait() == 0
    assert_gone(mounted)


def test_unmounted_while_nobody_serves(tmp_path: Path) -> None:
    with mounting(tmp_path) as made:
        made.start("--deadline", "30", fs=("--start-delay", "1"))
        made.kill_fs()
        wait_until(lambda: made.status()["state"] == "outage", "nobody serves")
        begin = time.monotonic()
        assert _libc.umount2(os.fsencode(made.path), 0) == 0
        assert made.wait() == 0
        assert time.monotonic() - begin < 5.0
        assert_gone(made)


@pytest.mark.parametrize(
    ("where", "why"), [("missing", "No such file"), ("file", "Not a directory"), ("link", "symbolic links")]
)
def test_where_nothing_can_be_mounted(tmp_path: Path, where: str, why: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    command = [sys.executable, "-m", "kvstore.keeper", str(tmp_path / where), "--"]
    command += [sys.executable, "-m", "tests.support.tiny_fs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=WAIT_S, text=True, check=False)
    assert done.returncode == 1
    assert f"cannot mount on {tmp_path / where}: " in done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr
