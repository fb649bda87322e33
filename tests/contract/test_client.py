"""One suite for `AsyncClient` and `Client`, each with and without a local worker, against a store of real processes."""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore import (
    AlreadyExists,
    Client,
    InvalidRequest,
    IsDirectory,
    NameTooLong,
    NotDirectory,
    NotEmpty,
    NotFound,
    Timeout,
    TooLarge,
    Unavailable,
)
from kvstore.client.messages import RemoveKind
from tests.support.blocking import BlockingClient, LoopThread
from tests.support.cluster import Cluster

MIB = 1 << 20
SIZES = [0, 1, 4096, 256 * 1024, 256 * 1024 + 1, MIB, MIB + 1, 5 * MIB + 7]
"""Around the sizes at which something changes: no block, inline I/O, one frame, one piece of the hash."""
_fresh = itertools.count()


class Kind(NamedTuple):
    name: str
    in_loop: bool
    local: bool


KINDS = [
    Kind("async-local", True, True),
    Kind("async-remote", True, False),
    Kind("sync-local", False, True),
    Kind("sync-remote", False, False),
]
Connect = Callable[..., Any]
"""Makes a client of the kind under test, whose root is the test's directory; takes the options of `connect`."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), workers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture
def root() -> str:
    """A directory that no other test uses."""
    return f"t{next(_fresh)}"


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def connect(request: pytest.FixtureRequest, cluster: Cluster, loop: LoopThread, root: str) -> Connect:
    kind: Kind = request.param
    make = functools.partial(BlockingClient, loop) if kind.in_loop else Client
    socket = cluster.workers[0].socket if kind.local else ""
    return functools.partial(make, f"{cluster.url}/{root}", worker_socket=socket)


@pytest.fixture
def client(connect: Connect, tmp_path: Path) -> Iterator[Any]:
    staging = tmp_path / "staging"
    staging.mkdir()
    with connect(staging_dir=str(staging)) as client:
        yield client
    assert not list(staging.iterdir()), "a temporary file was left behind"


@pytest.fixture
def other(cluster: Cluster, root: str) -> Iterator[Client]:
    """Somebody else, on the other node, who believes nothing for longer than a moment."""
    with Client(f"{cluster.url}/{root}", worker_socket=cluster.workers[1].socket, metadata_ttl_s=0) as other:
        yield other


# ---- values ----


@pytest.mark.parametrize("size", SIZES)
def test_what_was_put_is_got_back_here_and_elsewhere(client: Any, other: Client, size: int) -> None:
    data = os.urandom(size)
    put = client.put("a/b/value", data)
    assert put.created
    assert put.entry.length_bytes == size
    assert client.get("a/b/value") == data
    assert other.get("a/b/value") == data


@pytest.mark.parametrize("size", SIZES)
def test_get_into_fills_the_front_of_a_larger_buffer(client: Any, size: int) -> None:
    data, buffer = os.urandom(size), bytearray(b"\xaa" * (size + 3))
    client.put("v", data)
    assert client.get_into("v", buffer) == size
    assert buffer == data + b"\xaa" * 3


def test_any_contiguous_buffer_can_be_put(client: Any) -> None:
    doubles = memoryview(bytearray(os.urandom(160))).cast("d")
    client.put("doubles", doubles)
    assert client.get("doubles") == doubles.tobytes()


def test_a_strided_view_is_refused(client: Any) -> None:
    with pytest.raises(InvalidRequest, match="contiguous"):
        client.put("v", memoryview(b"abcdef")[::2])


def test_a_buffer_that_is_too_small_is_refused_and_left_alone(client: Any) -> None:
    client.put("v", b"12345")
    buffer = bytearray(4)
    with pytest.raises(InvalidRequest, match="4 bytes"):
        client.get_into("v", buffer)
    assert buffer == bytes(4)


def test_a_read_only_buffer_is_refused(client: Any) -> None:
    client.put("v", b"12345")
    with pytest.raises(InvalidRequest, match="read-only"):
        client.get_into("v", bytes(5))


def test_a_later_put_replaces_and_is_seen_at_once_by_its_client(client: Any, other: Client) -> None:
    client.put("v", b"first")
    assert client.get("v") == b"first"
    inode = client.stat("v").inode
    client.put("v", b"second, and longer")
    assert client.get("v") == b"second, and longer"
    assert other.get("v") == b"second, and longer"
    assert client.stat("v").inode != inode


def test_equal_content_keeps_the_entry(client: Any) -> None:
    first = client.put("v", b"same")
    again = client.put("v", b"same")
    assert not again.created
    assert again.entry.inode == first.entry.inode


def test_if_absent_keeps_what_is_there(client: Any) -> None:
    assert client.put("v", b"first", if_absent=True).created
    kept = client.put("v", b"second", if_absent=True)
    assert not kept.created
    assert kept.entry.length_bytes == 5
    assert client.get("v") == b"first"


def test_one_of_many_concurrent_if_absent_puts_creates(connect: Connect) -> None:
    results: list[Any] = []

    def run(value: bytes) -> None:
        with connect() as one:
            results.append((value, one.put("v", value, if_absent=True)))

    threads = [threading.Thread(target=run, args=(b"value %d" % i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [value for value, put in results if put.created]
    assert len(results) == 4
    assert len(winners) == 1
    with connect() as client:
        assert client.get("v") == winners[0]


def test_put_many_is_one_publish_with_a_result_for_each(client: Any) -> None:
    items = {f"m/{i}": os.urandom(i * 50_000) for i in range(12)}
    results = client.put_many(items)
    assert all(result.created for result in results)
    assert client.get_many(list(items)) == list(items.values())


def test_an_item_of_put_many_that_fails_does_not_hold_up_the_others(client: Any) -> None:
    client.mkdir("dir", parents=True)
    good, bad = client.put_many([("good", b"1"), ("dir", b"2")])
    assert good.created
    assert isinstance(bad, IsDirectory)
    assert client.get("good") == b"1"


def test_the_later_of_two_items_of_one_name_wins(client: Any) -> None:
    client.put_many([("v", b"first"), ("v", b"second")])
    assert client.get("v") == b"second"


def test_get_many_gives_none_for_whatever_cannot_be_read(client: Any) -> None:
    client.put("a", b"1")
    client.put("empty", b"")
    assert client.get_many(["a", "none", "a/below-a-file", "", "empty"]) == [b"1", None, None, None, b""]


def test_get_many_into_tells_the_sizes(client: Any) -> None:
    values = {f"v{i}": os.urandom(100_000 + i) for i in range(3)}
    client.put_many(values)
    buffers = [bytearray(100_010) for _ in range(4)]
    assert client.get_many_into([*values, "none"], buffers) == [100_000, 100_001, 100_002, None]
    assert [bytes(b[: len(v)]) for b, v in zip(buffers, values.values(), strict=False)] == list(values.values())


def test_get_many_into_wants_a_buffer_a_path(client: Any) -> None:
    with pytest.raises(InvalidRequest, match="1 buffers"):
        client.get_many_into(["a", "b"], [bytearray(1)])


def test_empty_batches_are_fine(client: Any) -> None:
    assert client.put_many([]) == []
    assert client.get_many([]) == []
    assert client.exists_many([]) == []


def test_more_blocks_than_fit_into_one_message(client: Any) -> None:
    values = {f"v{i:03}": b"value %d" % i for i in range(150)}
    client.put_many(values)
    assert client.get_many(list(values)) == list(values.values())


# ---- misses and wrong requests ----


def test_a_name_that_is_not_there_is_not_found(client: Any) -> None:
    with pytest.raises(NotFound) as caught:
        client.get("none")
    assert caught.value.reason == "no_name"


def test_a_directory_is_not_a_value(client: Any) -> None:
    client.mkdir("d", parents=True)
    with pytest.raises(IsDirectory):
        client.get("d")
    with pytest.raises(IsDirectory):
        client.put("d", b"1")


def test_a_file_is_not_a_directory(client: Any) -> None:
    client.put("f", b"1")
    with pytest.raises(NotDirectory):
        client.put("f/below", b"2")
    with pytest.raises(NotDirectory):
        client.stat("f/below")


@pytest.mark.parametrize("path", ["../up", "a/./b", "nul\0", "\udcff"])
def test_a_wrong_path_is_refused_before_anything_is_sent(client: Any, path: str) -> None:
    for call in (client.get, client.stat, client.remove, client.exists):
        with pytest.raises(InvalidRequest):
            call(path)
    with pytest.raises(InvalidRequest):
        client.put(path, b"1")


def test_a_name_that_is_too_long_is_refused(client: Any) -> None:
    with pytest.raises(NameTooLong):
        client.put("n" * 256, b"1")


WRONG_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("put", (None, b"1"), {}),
    ("put", (b"key", b"1"), {}),
    ("put", ("v", None), {}),
    ("put", ("v", "text"), {}),
    ("put", ("v", 5), {}),
    ("put_many", (None,), {}),
    ("put_many", ("text",), {}),
    ("put_many", ([1, 2],), {}),
    ("put_many", ([("v",)],), {}),
    ("put_many", ({1: b"1"},), {}),
    ("get", (None,), {}),
    ("get", (5,), {}),
    ("get_into", ("v", 5), {}),
    ("get_into", ("v", None), {}),
    ("get_into", ("v", "text"), {}),
    ("get_many", (None,), {}),
    ("get_many", ("abc",), {}),
    ("get_many", ([b"v"],), {}),
    ("get_many_into", (["v"], None), {}),
    ("get_many_into", (["v"], [5]), {}),
    ("exists", (b"v",), {}),
    ("exists_many", ("abc",), {}),
    ("stat", (None,), {}),
    ("remove", (5,), {}),
    ("remove", ("v",), {"kind": "file"}),
    ("rename", ("v", None), {}),
    ("mkdir", (b"d",), {}),
    ("mkdir", ("d",), {"mode": "rwx"}),
    ("mkdir", ("d",), {"mode": -1}),
    ("statfs", (5,), {}),
    ("put_file", ("v", 0), {}),
    ("put_file", ("v", None), {}),
    ("put_file", (None, "none"), {}),
    ("get_file", ("v", 5), {}),
]


@pytest.mark.parametrize(("name", "args", "options"), WRONG_CALLS)
def test_a_wrong_type_is_refused_with_what_is_right(
    client: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="must be"):
        getattr(client, name)(*args, **options)


@pytest.mark.parametrize("options", [{"after": 5}, {"limit": -1}, {"limit": "many"}, {"timeout_s": -1}])
def test_a_wrong_option_of_a_listing_is_refused(client: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="must be"):
        list(client.list("", **options))


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e12])
def test_a_timeout_without_end_is_long(client: Any, tmp_path: Path, timeout_s: float) -> None:
    client.put("d/v", b"1", timeout_s=timeout_s)
    assert client.get("d/v", timeout_s=timeout_s) == b"1"
    assert client.exists("d/v", timeout_s=timeout_s)
    assert [name for name, _ in client.list("d", timeout_s=timeout_s)] == ["v"]
    assert client.get_file("d/v", tmp_path / "out", timeout_s=timeout_s) == 1
    client.remove("d/v", timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", [float("nan"), -1, "5"])
def test_what_is_no_timeout_is_refused(client: Any, connect: Connect, timeout_s: Any) -> None:
    for call in (client.get, client.stat, client.exists, client.remove):
        with pytest.raises(InvalidRequest, match="timeout_s"):
            call("v", timeout_s=timeout_s)
    with pytest.raises(InvalidRequest, match="timeout_s"):
        client.put("v", b"1", timeout_s=timeout_s)
    with pytest.raises(InvalidRequest, match="timeout_s"):
        connect(timeout_s=timeout_s)


def test_a_listing_without_time_is_a_timeout(client: Any) -> None:
    client.put("v", b"1")
    with pytest.raises(Timeout):
        list(client.list("", timeout_s=0))


def test_a_deadline_that_has_passed_is_a_timeout_for_a_put_and_a_miss_for_a_get(client: Any) -> None:
    client.put("v", b"1")
    with pytest.raises(Timeout):
        client.put("v", b"2", timeout_s=0)
    with pytest.raises(NotFound) as caught:
        client.get("v", timeout_s=0)
    assert caught.value.reason == "timeout"
    assert client.get("v") == b"1"


def test_a_closed_client_says_so(connect: Connect) -> None:
    client = connect()
    client.put("v", b"1")
    client.close()
    with pytest.raises(Unavailable, match="closed"):
        client.put("v", b"2")


# ---- names ----


def test_exists(client: Any) -> None:
    client.put("d/v", b"1")
    assert client.exists("d/v")
    assert client.exists_many(["d", "d/v", "d/none", "none", "d/v/below"]) == [True, True, False, False, False]


def test_stat_of_a_file_and_a_directory(client: Any) -> None:
    client.put("d/v", b"123")
    entry = client.stat("d/v")
    assert (entry.is_dir, entry.length_bytes, entry.mode & 0o7777) == (False, 3, 0o644)
    assert entry.address is not None
    assert entry.replicas
    assert client.stat("d").is_dir
    assert client.stat("").is_dir


def test_list_is_in_order_and_can_begin_behind_a_name(client: Any) -> None:
    client.put_many({f"d/{i:02}": b"x" for i in range(20)})
    client.mkdir("d/sub")
    names = [name for name, _ in client.list("d")]
    assert names == [f"{i:02}" for i in range(20)] + ["sub"]
    assert [name for name, _ in client.list("d", after="07", limit=3)] == ["08", "09", "10"]
    assert dict(client.list("d"))["sub"].is_dir


def test_list_of_what_is_no_directory(client: Any) -> None:
    client.put("f", b"1")
    with pytest.raises(NotDirectory):
        list(client.list("f"))
    with pytest.raises(NotFound):
        list(client.list("none"))


def test_remove(client: Any, other: Client) -> None:
    client.put("d/v", b"1")
    assert client.exists("d/v")
    with pytest.raises(NotEmpty):
        client.remove("d")
    client.remove("d/v")
    assert not client.exists("d/v")
    assert not other.exists("d/v")
    with pytest.raises(NotFound):
        client.remove("d/v")
    client.remove("d", kind=RemoveKind.DIRECTORY)
    assert not client.exists("d")


def test_remove_of_the_wrong_kind(client: Any) -> None:
    client.put("d/v", b"1")
    with pytest.raises(IsDirectory):
        client.remove("d", kind=RemoveKind.FILE)
    with pytest.raises(NotDirectory):
        client.remove("d/v", kind=RemoveKind.DIRECTORY)


def test_rename_of_a_file(client: Any) -> None:
    client.put("a", b"1")
    assert client.get("a") == b"1"
    client.rename("a", "b")
    assert client.get("b") == b"1"
    assert not client.exists("a")


def test_rename_replaces_unless_told_not_to(client: Any) -> None:
    client.put("a", b"1")
    client.put("b", b"2")
    assert client.get("b") == b"2"
    with pytest.raises(AlreadyExists):
        client.rename("a", "b", no_replace=True)
    client.rename("a", "b")
    assert client.get("b") == b"1"


def test_rename_of_a_directory_takes_along_what_the_client_believed(client: Any) -> None:
    client.put("old/deep/v", b"1")
    assert client.get("old/deep/v") == b"1"
    client.rename("old", "new")
    assert not client.exists("old/deep/v")
    assert client.get("new/deep/v") == b"1"


def test_mkdir(client: Any) -> None:
    with pytest.raises(NotFound):
        client.mkdir("a/b/c")
    assert client.mkdir("a/b/c", parents=True).is_dir
    assert client.mkdir("a/b/c", parents=True).is_dir
    with pytest.raises(AlreadyExists):
        client.mkdir("a/b/c")


def test_statfs_and_the_cluster_map(client: Any, cluster: Cluster) -> None:
    client.put("v", b"1")
    statfs = client.statfs()
    assert statfs.capacity_bytes == 2 * 256 * MIB
    assert statfs.files >= 1
    assert {n.id for n in client.cluster_map().nodes if n.live} == {w.node for w in cluster.workers}


def test_the_cache_is_believed_within_its_ttl_only(connect: Connect, other: Client) -> None:
    with connect(metadata_ttl_s=3600) as believer, connect(metadata_ttl_s=0) as sceptic:
        for client in (believer, sceptic):
            client.put("v", b"old")
            assert client.get("v") == b"old"
        other.put("v", b"new")
        assert sceptic.get("v") == b"new"
        assert believer.get("v") in (b"old", b"new"), "whatever it is, it is a whole version"


def test_a_cached_entry_whose_block_is_gone_is_looked_up_again(
    connect: Connect, cluster: Cluster, other: Client
) -> None:
    with connect(metadata_ttl_s=3600) as client:
        client.put("v", b"old")
        assert client.get("v") == b"old"
        for worker in cluster.workers:
            for path in worker.block_files:
                path.unlink(missing_ok=True)  # what nobody owns any more goes by itself
        other.put("v", b"new")
        assert client.get("v") == b"new"


# ---- files ----


@pytest.mark.parametrize("size", [0, 5, 9 * MIB + 3])
def test_files_go_in_and_out(client: Any, tmp_path: Path, size: int) -> None:
    source, target, moved = tmp_path / "in", tmp_path / "out", list[int]()
    source.write_bytes(os.urandom(size))
    assert client.put_file("d/v", source, progress=moved.append).created
    assert sum(moved) == size
    assert client.get("d/v") == source.read_bytes()
    moved.clear()
    assert client.get_file("d/v", target, progress=moved.append) == size
    assert sum(moved) == size
    assert target.read_bytes() == source.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["in", "out"]


def test_a_miss_leaves_no_file(client: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        client.get_file("none", tmp_path / "out")
    assert not [p for p in tmp_path.iterdir() if p.is_file()]


def test_a_local_file_that_is_not_there_is_an_os_error(client: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        client.put_file("v", tmp_path / "none")


def test_what_is_no_regular_file_is_refused(client: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="regular"):
        client.put_file("v", tmp_path / "pipe")
    assert not client.exists("v")


# ---- many at once ----


def test_many_threads_share_one_client(client: Any) -> None:
    failures: list[Exception] = []

    def run(number: int) -> None:
        try:
            for turn in range(5):
                data = os.urandom(300_000) + b"%d %d" % (number, turn)
                client.put(f"t{number}", data)
                assert client.get(f"t{number}") == data
        except Exception as error:  # noqa: BLE001 - judged by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_no_fd_is_lost(client: Any) -> None:
    client.put_many({f"v{i}": os.urandom(300_000) for i in range(10)})
    client.get_many([f"v{i}" for i in range(10)])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        client.get_many([f"v{i}" for i in range(10)])
        client.put("w", os.urandom(300_000))
        client.get("w")
        with pytest.raises(NotFound):
            client.get("none")
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_value_beyond_the_limit_is_too_large(client: Any) -> None:
    huge = mmap.mmap(-1, (1 << 30) + 1)  # never touched, so it takes no memory
    with pytest.raises(TooLarge):
        client.put("v", huge)
