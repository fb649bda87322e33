"""What is mounted where, without touching it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.core.errors import AlreadyExists, NotDirectory
from kvstore.fuse import mountpoint
from kvstore.fuse.mountpoint import Mounted, parse_mountinfo

TEXT = r"""
22 27 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw
42 27 0:39 / /mnt/a\040b\134c rw,relatime - fuse.kvstore kvstore rw,user_id=0
43 27 254:0 /home /home rw,relatime shared:1 master:2 - ext4 /dev/vda rw
44 27 0:40 / /mnt/gone - fuse
broken
"""


def test_mountinfo() -> None:
    mounts = parse_mountinfo(TEXT)
    assert mounts == [
        Mounted("0:20", "/sys", "sysfs"),
        Mounted("0:39", "/mnt/a b\\c", "fuse.kvstore"),
        Mounted("254:0", "/home", "ext4"),
        Mounted("0:40", "/mnt/gone", "fuse"),
    ]


def test_the_topmost_mount_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "1 1 0:1 / /m rw - ext4 a rw\n2 1 0:2 / /m rw - fuse.kvstore kvstore rw\n3 1 0:3 / /m/x rw - proc p rw\n"
    info = tmp_path / "mountinfo"
    info.write_text(lines)
    monkeypatch.setattr(mountpoint, "MOUNTINFO", str(info))
    assert mountpoint.find("/m") == Mounted("0:2", "/m", "fuse.kvstore")
    assert mountpoint.find("/n") is None


def test_the_directory_is_made(tmp_path: Path) -> None:
    assert mountpoint.prepare(str(tmp_path / "a" / "b")) == []
    assert (tmp_path / "a" / "b").is_dir()


def test_files_that_the_mount_will_hide_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "forgotten").touch()
    (line,) = mountpoint.prepare(str(tmp_path))
    assert "is not empty" in line


def test_a_file_is_no_mount_point(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(NotDirectory, match="not a directory"):
        mountpoint.prepare(str(tmp_path / "f"))


def test_what_others_mounted_is_left_alone() -> None:
    with pytest.raises(AlreadyExists, match="unmount it first"):
        mountpoint.prepare("/proc")


def test_the_last_part_is_never_resolved(tmp_path: Path) -> None:
    """Resolving it would stat it, and a dead mount may never answer."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert mountpoint.absolute(str(tmp_path / "link" / "m")) == str(tmp_path / "real" / "m")
    assert mountpoint.absolute(str(tmp_path / "link")) == str(tmp_path / "link")


def test_detaching_what_is_not_mounted_is_no_error(tmp_path: Path) -> None:
    mountpoint.detach(str(tmp_path))
    assert mountpoint.unmount(str(tmp_path))
