"""What the mount says of files and directories in ``user.kvstore.*`` attributes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvstore import Client
from tests.fuse.conftest import Store
from tests.support.child import in_child
from tests.support.cluster import wait_until
from tests.support.mounts import mounted

MIB = 1 << 20


def attributes(path: Path) -> dict[str, str]:
    return {name.removeprefix("user.kvstore."): os.getxattr(path, name).decode() for name in os.listxattr(path)}


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def test_a_file_says_where_it_is_and_how_hot(store: Store, fresh: str) -> None:
    directory = store.a / fresh
    in_child(os.mkdir, directory)
    in_child(write, directory / "x", os.urandom(MIB))
    first = in_child(attributes, directory / "x")
    node = store.cluster.workers[0].node
    assert (first["tier"], first["node"], first["pin"], first["expiry"]) == ("ssd", node, "no", "never")
    for _ in range(3):
        in_child(Path.read_bytes, directory / "x")
    assert float(in_child(attributes, directory / "x")["heat"]) > float(first["heat"])
    before = float(in_child(attributes, directory / "x")["heat"])
    for _ in range(3):
        in_child(os.stat, directory / "x")
        in_child(os.listdir, directory)
    assert float(in_child(attributes, directory / "x")["heat"]) <= before, "probes are no use"


def test_policies_show_in_attributes(store: Store, fresh: str) -> None:
    directory = store.a / fresh
    in_child(os.mkdir, directory)
    in_child(write, directory / "x", os.urandom(MIB))
    assert in_child(attributes, directory) == {"pin": "no", "quota": "none", "used": "none", "ttl": "none"}
    with Client(store.cluster.url, worker_socket="") as client:
        client.set_policy(fresh, quota_bytes=64 * MIB, ttl_s=3600.0, pinned=True)
        wait_until(
            lambda: (
                in_child(attributes, directory)
                == {"pin": "yes", "quota": str(64 * MIB), "used": str(MIB), "ttl": "3600"}
            ),
            "counted",
        )
        wait_until(lambda: in_child(attributes, directory / "x")["pin"] == "yes", "its worker knows the pin")
        assert in_child(attributes, directory / "x")["expiry"] == "never", "what is pinned does not expire"
        client.set_policy(fresh, pinned=False)
        wait_until(lambda: 3000 < expiry(directory / "x") <= 3600, "its worker knows the TTL")


def expiry(path: Path) -> float:
    value: str = in_child(attributes, path)["expiry"]
    return float(value) if value.replace(".", "").isdigit() else 0.0


def test_they_can_only_be_read_and_nothing_else_is_kept(store: Store, fresh: str) -> None:
    directory = store.a / fresh
    in_child(os.mkdir, directory)
    in_child(write, directory / "x", b"1")
    for name in ("user.kvstore.tier", "user.other"):
        with pytest.raises(OSError, match=os.strerror(errno.ENOTSUP)):
            in_child(os.setxattr, directory / "x", name, b"1")
    for path, name in ((directory / "x", "user.kvstore.quota"), (directory, "user.kvstore.tier")):
        with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
            in_child(os.getxattr, path, name)


def test_an_empty_file_has_no_block_to_tell_of(store: Store, fresh: str) -> None:
    directory = store.a / fresh
    in_child(os.mkdir, directory)
    in_child(write, directory / "empty", b"")
    assert in_child(attributes, directory / "empty") == {"pin": "no"}


def test_statfs_of_a_mount_below_a_quota(store: Store, fresh: str, tmp_path: Path) -> None:
    with Client(store.cluster.url, worker_socket="") as client:
        client.mkdir(fresh)
        client.set_policy(fresh, quota_bytes=64 * MIB)
    with mounted(store.cluster, tmp_path / "below", store.cluster.workers[0], "--path", f"/{fresh}") as mount:
        in_child(write, mount / "x", os.urandom(MIB))
        found = in_child(os.statvfs, mount.path)
        assert found.f_blocks * found.f_frsize == 64 * MIB
        wait_until(lambda: free_bytes(mount.path) == 63 * MIB, "what was published is counted")


def free_bytes(path: Path) -> int:
    found = in_child(os.statvfs, path)
    free: int = found.f_bavail * found.f_frsize
    return free
