"""A mount of a directory that was removed and made anew by somebody else: it shows what is at its path by now."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.client.messages import RemoveKind
from tests.support.child import in_child
from tests.support.cluster import Cluster, wait_until
from tests.support.modes import MODES, mode_options
from tests.support.mounts import Mount, mounted

SHOWN = "a/shown"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("store"), workers=1) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.url, worker_socket="", metadata_ttl_s=0.0) as client:
        yield client


@pytest.fixture(params=MODES)
def mount(cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Mount]:
    options = ("--path", f"/{SHOWN}", *mode_options(request.param))
    with mounted(cluster, tmp_path / "m", cluster.workers[0], *options) as mount:
        yield mount


def remove(client: Client, mount: Mount) -> None:
    """The directory, once the mount has seen it."""
    in_child(os.stat, mount.path)
    for name, _ in client.list(SHOWN):
        client.remove(f"{SHOWN}/{name}")
    client.remove(SHOWN, kind=RemoveKind.DIRECTORY)


def names(mount: Mount) -> list[str]:
    return sorted(in_child(os.listdir, mount.path))


def test_what_is_at_the_path_by_now_is_shown(client: Client, mount: Mount) -> None:
    in_child((mount / "old").write_bytes, b"old")
    remove(client, mount)
    client.mkdir(SHOWN)
    client.put(f"{SHOWN}/new", b"new")
    assert names(mount) == ["new"]
    assert in_child((mount / "new").read_bytes) == b"new"
    in_child((mount / "mine").write_bytes, b"mine")
    in_child(os.rename, mount / "mine", mount / "renamed")
    in_child((mount / "d").mkdir)
    assert {name for name, _ in client.list(SHOWN)} == {"d", "new", "renamed"}
    assert in_child(os.stat, mount.path).st_ino == 1
    assert in_child(os.statvfs, mount.path).f_blocks > 0
    in_child(os.chmod, mount.path, 0o750)
    assert client.stat(SHOWN).mode & 0o777 == 0o750
    in_child(os.rmdir, mount / "d")
    in_child(os.unlink, mount / "renamed")
    wait_until(lambda: names(mount) == ["new"], "only what is there is listed")


def test_a_put_that_was_under_way_ends_at_the_new_place(client: Client, mount: Mount) -> None:
    in_child((mount / "x.tmp").write_bytes, b"bytes")
    remove(client, mount)
    client.mkdir(SHOWN)
    in_child(os.rename, mount / "x.tmp", mount / "x")
    assert client.get(f"{SHOWN}/x") == b"bytes"
    client.remove(f"{SHOWN}/x")


def test_where_none_is_it_is_made_as_at_the_start(client: Client, mount: Mount) -> None:
    remove(client, mount)
    in_child((mount / "x").write_bytes, b"bytes")
    assert client.get(f"{SHOWN}/x") == b"bytes"
