"""The memory that a worker may have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.core.errors import InvalidRequest
from kvstore.worker.volumes import memory
from tests.support.worker_kit import MIB

GIB = 1 << 30


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 8388608 kB\n", "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/\n", {}, 8 * GIB),
        ("0::/pod/a\n", {"sys/fs/cgroup/pod/memory.max": f"{GIB}\n", "sys/fs/cgroup/pod/a/memory.max": "max\n"}, GIB),
        ("0::/a\n", {"sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ("4:cpu,memory:/b\n0::/\n", {"sys/fs/cgroup/memory/b/memory.limit_in_bytes": f"{3 * GIB}"}, 3 * GIB),
        ("4:memory:/b\n", {"sys/fs/cgroup/memory/b/memory.limit_in_bytes": "9223372036854771712"}, 8 * GIB),
    ],
)
def test_the_lowest_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str], limit: int) -> None:
    assert memory.limit_bytes(machine(tmp_path, cgroup, files)) == limit


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a\n", {"sys/fs/cgroup/a/memory.max": f"{100 * MIB}"})
    memory.check(90 * MIB, root)
    with pytest.raises(InvalidRequest, match=r"91.0 MiB.*may have 100 MiB.*lower its capacity to 90.0 MiB"):
        memory.check(91 * MIB, root)


def test_where_nothing_is_known_nothing_is_refused(tmp_path: Path) -> None:
    memory.check(1 << 60, tmp_path)


def test_a_volume_on_a_file_system_that_is_not_its_tiers_is_told_of(tmp_path: Path) -> None:
    assert "lies on tmpfs: it takes memory" in memory.doubt("ssd", "/dev/shm")
    assert memory.doubt("mem", "/dev/shm") == ""
    disk = os.path.dirname(os.path.abspath(__file__))
    assert memory.doubt("ssd", disk) == ""
    assert "Is a tmpfs to be mounted there?" in memory.doubt("mem", disk)
