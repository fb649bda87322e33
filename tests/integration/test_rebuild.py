"""The master's disk is lost, empty or old: nothing is collected, and the names come back from what is noted beside the
blocks. Real processes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore import Client, Unavailable
from kvstore.core.errors import KvError
from kvstore.core.hashing import hash_block
from kvstore.core.types import Address
from kvstore.worker.reports import note as notes
from tests.support.child import in_child
from tests.support.cluster import Cluster, Process, Worker, wait_until
from tests.support.mounts import can_mount, mounted

KIB = 1 << 10
REBUILD = ("--rebuild", "--rebuild-workers", "2")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, workers=2) as cluster:
        yield cluster


def client_of(cluster: Cluster, worker: Worker | None = None) -> Client:
    return Client(cluster.url, worker_socket=worker.socket if worker else "", metadata_ttl_s=0.0, timeout_s=20)


def values(prefix: str, count: int) -> dict[str, bytes]:
    return {f"{prefix}/{i}": os.urandom(8 * KIB + i) for i in range(count)}


def put_all(client: Client, wanted: Mapping[str, bytes]) -> None:
    assert not [result for result in client.put_many(wanted) if isinstance(result, KvError)]


def blocks_of(worker: Worker) -> list[Path]:
    """In all its volumes."""
    roots = [root for root in (worker.volume, worker.memory) if root.is_dir()]
    return [p for root in roots for p in (root / "blocks").rglob("*.*.*")]


def files_of(cluster: Cluster) -> set[str]:
    return {path.name for worker in cluster.workers for path in blocks_of(worker)}


def noted(worker: Worker) -> set[str]:
    """Paths that stand beside its blocks."""
    found = set()
    for path in blocks_of(worker):
        try:
            note = notes.decode(os.getxattr(path, notes.ATTRIBUTE), Address.parse(path.name))
        except OSError:
            continue
        found |= {note.path} if note else set()
    return found


def wait_noted(cluster: Cluster, *paths: str) -> None:
    wait_until(lambda: set(paths) <= set().union(*map(noted, cluster.workers)), f"noted: {paths[:3]} …")


def data_of(cluster: Cluster) -> Path:
    return cluster.root / "master"


@contextmanager
def flags(process: Process, *more: str) -> Iterator[None]:
    before = list(process.argv)
    process.argv += more
    yield
    process.argv[:] = before


def start_master(cluster: Cluster, *more: str) -> None:
    with flags(cluster.master, *more):
        cluster.master.start()


def start_stopped(workers: Iterable[Worker]) -> None:
    for worker in workers:
        if worker.pid is None:
            worker.close()
            worker.start()


def notice(cluster: Cluster) -> str:
    return cluster.map().notice


def wait_complete(cluster: Cluster) -> None:
    wait_until(lambda: "complete" in notice(cluster), "the rebuild is complete", timeout_s=40)
    cluster.wait_live(*(worker.node for worker in cluster.workers))


def wait_ended(workers: Iterable[Worker]) -> None:
    for worker in workers:
        wait_until(lambda worker=worker: worker.pid is None, f"{worker.node} has ended")  # type: ignore[misc]


def check_all(cluster: Cluster, wanted: Mapping[str, bytes]) -> None:
    """Every name is there with its bytes, for every worker's clients."""
    for worker in cluster.workers:
        with client_of(cluster, worker) as client:
            assert client.get_many(list(wanted)) == list(wanted.values())


def lines(process: Process, text: str) -> list[str]:
    return [line for line in process.log.read_text().splitlines() if text in line]


# ---- lost, or empty ----


def test_a_lost_disk_is_refused_in_one_line_and_its_names_come_back(cluster: Cluster) -> None:
    first, second = cluster.workers
    kept = values("a/b", 40) | values("c", 20)
    with client_of(cluster, first) as client, client_of(cluster, second) as other:
        put_all(client, kept)
        put_all(other, more := values("second", 20))
        put_all(client, {"gone": b"x" * 100, "old name": b"y" * 200, "c/0": (newer := os.urandom(500))})
        wait_noted(cluster, "old name", "gone")
        client.remove("gone")
        client.mkdir("deep")
        client.rename("old name", "deep/new name")
        assert other.get("a/b/7") == kept["a/b/7"], "a second replica"
        kept |= more | {"deep/new name": b"y" * 200, "c/0": newer}
    wait_noted(cluster, *kept)
    wait_until(lambda: "a/b/7" in noted(second), "the replica has a note of its own")
    wait_until(lambda: len(files_of(cluster)) == len(kept), "what was removed and replaced is unlinked")
    before = files_of(cluster)
    cluster.master.kill()
    shutil.rmtree(data_of(cluster))
    for worker in cluster.workers:
        worker.stop()
        worker.start(wait=False)

    cluster.master.start()
    wait_ended(cluster.workers)
    for worker in cluster.workers:
        assert [line for line in lines(worker, "belongs to cluster") if "--rebuild" in line], worker.log_tail()
    assert files_of(cluster) == before, "nothing is collected by an empty master"

    cluster.master.stop()
    start_master(cluster, *REBUILD)  # on the database that the empty start has made
    start_stopped(cluster.workers)
    wait_complete(cluster)
    check_all(cluster, kept)
    with client_of(cluster, first) as client:
        assert not client.exists("gone")
        assert not client.exists("old name")
        client.put("afterwards", b"works")
        assert client.get("afterwards") == b"works"
        client.remove("afterwards")
    assert cluster.map().files == len(kept)
    wait_until(lambda: files_of(cluster) == before, "it is collected again")
    assert not [line for w in cluster.workers for line in lines(w, "lost state")]


def test_clients_are_refused_and_reads_are_misses_until_it_is_complete(cluster: Cluster) -> None:
    first, second = cluster.workers
    kept = values("d", 10)
    with client_of(cluster, first) as client:
        put_all(client, kept)
    wait_noted(cluster, *kept)
    cluster.master.kill()
    shutil.rmtree(data_of(cluster))
    second.stop()
    start_master(cluster, *REBUILD)
    wait_until(lambda: "1 have told all" in notice(cluster), "the first worker has told all")
    with Client(cluster.url, worker_socket=first.socket, timeout_s=1) as client:
        assert client.get_many(list(kept)) == [None] * len(kept)
        with pytest.raises(Unavailable, match="takes names back"):
            client.put("d/0", b"too early")
        with pytest.raises(Unavailable):
            client.remove("d/0")
    assert len(blocks_of(first)) >= len(kept)

    cluster.master.kill()  # in the middle: what has begun begins anew, whatever it is told
    start_master(cluster, *REBUILD)
    second.start()
    wait_complete(cluster)
    check_all(cluster, kept)
    assert cluster.map().files == len(kept)


def test_a_rebuild_that_a_crash_cut_short_goes_on_without_being_told(cluster: Cluster) -> None:
    kept = values("d", 10)
    with client_of(cluster, cluster.workers[0]) as client:
        put_all(client, kept)
    wait_noted(cluster, *kept)
    cluster.master.kill()
    shutil.rmtree(data_of(cluster))
    start_master(cluster, "--rebuild", "--rebuild-workers", "3")  # one more than there are
    wait_until(lambda: "2 have told all" in notice(cluster), "both have told all")
    cluster.master.kill()
    start_master(cluster, "--discard", "--rebuild-workers", "3")
    wait_until(lambda: notice(cluster).startswith("discard: 2 workers"), "an operator may choose otherwise")
    cluster.master.kill()
    start_master(cluster, "--rebuild", "--rebuild-wait", "1s")
    wait_complete(cluster)
    check_all(cluster, kept)


def test_what_has_no_note_is_kept_until_an_operator_discards_it(cluster: Cluster) -> None:
    first, second = cluster.workers
    kept = values("d", 6)
    with client_of(cluster, first) as client, client_of(cluster, second) as other:
        put_all(client, kept)
        put_all(other, theirs := values("e", 3))
    wait_noted(cluster, *kept, *theirs)
    wait_until(lambda: len(files_of(cluster)) == 9, "nothing else is there")
    bare = next(path for path in blocks_of(first) if _path(path) == "d/3")
    os.removexattr(bare, notes.ATTRIBUTE)
    _swap_notes(*(path for path in blocks_of(first) if path != bare and _path(path) in ("d/4", "d/5")))
    before = files_of(cluster)
    cluster.master.kill()
    shutil.rmtree(data_of(cluster))
    start_master(cluster, *REBUILD)
    wait_complete(cluster)
    assert "3 blocks" in notice(cluster), "a note of another block is none"
    assert "--discard" in notice(cluster)
    check_all(cluster, {name: data for name, data in (kept | theirs).items() if name not in ("d/3", "d/4", "d/5")})
    for worker in cluster.workers:
        worker.restart()
    wait_until(lambda: all(lines(w, "registered as") for w in cluster.workers), "they are back")
    with client_of(cluster, second) as client:
        client.remove("e/0")
    wait_until(lambda: not _copies(second, theirs["e/0"]), "the other worker is whole and collects")
    assert before <= {path.name for path in blocks_of(first)} | {path.name for path in blocks_of(second)}
    assert _copies(first, theirs["e/0"]), "nothing of the first one goes, not even what was removed"

    cluster.master.stop()
    start_master(cluster, "--discard", "--rebuild-workers", "2")
    wait_complete(cluster)
    for worker in cluster.workers:
        worker.stop()
    _shorten_grace(cluster)
    for worker in cluster.workers:
        worker.start()
    unnamed = [kept[name] for name in ("d/3", "d/4", "d/5")]
    wait_until(lambda: not any(_copies(first, data) for data in unnamed), "now they go, as orphans do", timeout_s=40)
    wait_until(lambda: not _copies(first, theirs["e/0"]), "and what was removed")
    check_all(cluster, {name: kept[name] for name in ("d/0", "d/1", "d/2")})


def test_what_was_given_up_or_replaced_is_no_reason_to_ask_an_operator(cluster: Cluster) -> None:
    first, second = cluster.workers
    with client_of(cluster, first) as client, client_of(cluster, second) as other:
        put_all(client, kept := values("d", 6))
        wait_noted(cluster, *kept)
        assert other.get("d/0") == kept["d/0"], "a second replica"
        wait_until(lambda: "d/0" in noted(second), "it has a note")
        second.stop()  # and hears of nothing that comes now
        client.put("d/0", newer := os.urandom(500))
        wait_until(lambda: all(map(_is_noted, _copies(first, newer))), "it is noted")
        cluster.master.kill()
        with pytest.raises(KvError):
            client.put("in flight", in_flight := os.urandom(700), timeout_s=0.5)
        shutil.rmtree(data_of(cluster))
        start_master(cluster, *REBUILD)
        second.start()
        wait_complete(cluster)
        assert "--discard" not in notice(cluster)
        check_all(cluster, kept | {"d/0": newer})
        wait_until(lambda: not _copies(second, kept["d/0"]), "what a later one has replaced goes", timeout_s=40)
        wait_until(lambda: not _copies(first, in_flight), "so does what nobody has published", timeout_s=40)


def _path(file: Path) -> str:
    note = notes.decode(os.getxattr(file, notes.ATTRIBUTE), Address.parse(file.name))
    return note.path if note else ""


def _swap_notes(one: Path, other: Path) -> None:
    mine, theirs = (os.getxattr(path, notes.ATTRIBUTE) for path in (one, other))
    os.setxattr(one, notes.ATTRIBUTE, theirs)
    os.setxattr(other, notes.ATTRIBUTE, mine)


def _copies(worker: Worker, data: bytes) -> list[Path]:
    return [path for path in blocks_of(worker) if Address.parse(path.name).hash == hash_block(data)]


def _shorten_grace(cluster: Cluster) -> None:
    for worker in cluster.workers:
        text = worker.config.read_text()
        worker.config.write_text(text.replace('session_grace = "60s"', 'session_grace = "500ms"'))


def test_an_operator_may_discard_what_workers_have(cluster: Cluster) -> None:
    with client_of(cluster, cluster.workers[0]) as client:
        put_all(client, values("d", 10))
    wait_noted(cluster, "d/9")
    cluster_id = cluster.map().cluster
    cluster.master.kill()
    shutil.rmtree(data_of(cluster))
    for worker in cluster.workers:
        worker.stop()
    _shorten_grace(cluster)
    start_master(cluster, "--discard", "--rebuild-workers", "2")
    for worker in cluster.workers:
        worker.start()
    wait_complete(cluster)
    assert cluster.map().cluster == cluster_id, "clients and workers need not learn another one"
    wait_until(lambda: not files_of(cluster), "the old blocks go", timeout_s=40)
    with client_of(cluster, cluster.workers[0]) as client:
        assert not client.exists("d/9")
        client.put("d/9", b"new")
    check_all(cluster, {"d/9": b"new"})


# ---- old ----


def test_an_old_disk_takes_back_what_it_lacks(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.workers
    with client_of(cluster, first) as client, client_of(cluster, second) as other:
        put_all(client, kept := values("before", 20))
        client.mkdir("empty directory")
        _copy(cluster, tmp_path / "copy")
        put_all(other, more := values("after", 20))
        client.rename("before/0", "renamed")
        client.put("before/1", b"replaced")
        client.remove("before/2")
        kept = more | kept | {"renamed": kept["before/0"], "before/1": b"replaced"}
        del kept["before/0"], kept["before/2"]
    wait_noted(cluster, *kept)
    wait_until(lambda: len(files_of(cluster)) == len(kept), "what is gone is unlinked")
    before = files_of(cluster)
    _put_back(cluster, tmp_path / "copy")
    cluster.master.start()
    for worker in cluster.workers:
        wait_until(lambda w=worker: bool(lines(w, "lost state")), "it says so")  # type: ignore[misc]
    cluster.wait_live(first.node, second.node)
    assert "--rebuild" in lines(first, "lost state")[0]
    for worker in cluster.workers:
        worker.restart()
    wait_until(lambda: files_of(cluster) == before, "nothing is collected, after a restart of the workers neither")

    with client_of(cluster, first) as client:  # rolled back, then overtaken
        put_all(client, newest := values("newest", 30) | {"before/1": b"replaced once more"})
        client.remove("before/3")
    kept |= newest
    wait_noted(cluster, *newest)
    before = files_of(cluster)
    cluster.master.stop()
    start_master(cluster, *REBUILD)
    wait_complete(cluster)
    assert before <= files_of(cluster)
    del kept["before/3"]
    check_all(cluster, kept)
    with client_of(cluster, first) as client:
        assert client.stat("empty directory").is_dir
        assert not client.exists("before/0")
        assert not client.exists("before/2")
        assert not client.exists("before/3")


def test_a_rebuild_of_a_database_that_lacks_nothing_changes_nothing(cluster: Cluster) -> None:
    with client_of(cluster, cluster.workers[0]) as client:
        put_all(client, kept := values("d", 10))
        client.rename("d/0", "e")
        kept["e"] = kept.pop("d/0")
    wait_noted(cluster, *kept)
    sequence = cluster.map().sequence
    cluster.master.stop()
    start_master(cluster, *REBUILD)
    wait_complete(cluster)
    check_all(cluster, kept)
    assert cluster.map().files == 10
    assert cluster.map().sequence < sequence + 20, "only the workers' registrations"


def _copy(cluster: Cluster, target: Path) -> None:
    cluster.master.stop()
    shutil.copytree(data_of(cluster), target)
    cluster.master.start()
    cluster.wait_live(*(worker.node for worker in cluster.workers))


def _put_back(cluster: Cluster, copy: Path) -> None:
    cluster.master.stop()
    shutil.rmtree(data_of(cluster))
    shutil.copytree(copy, data_of(cluster))


# ---- tiers, replicas, boots ----


def test_names_of_all_tiers_and_several_boots_come_back(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=2, memory="16MiB") as cluster:
        first, second = cluster.workers
        kept: dict[str, bytes] = {}
        for boot in range(3):
            with client_of(cluster, first) as client, client_of(cluster, second) as other:
                put_all(client, mine := values(f"boot {boot}", 8))
                kept |= mine
                for name in list(mine)[:4]:  # hot ones rise to memory, and are fetched
                    assert client.get(name) == client.get(name) == other.get(name)
            wait_noted(cluster, *kept)
            wait_until(lambda: bool(list((first.memory / "blocks").rglob("*.*.*"))), "some rose to memory")
            for worker in cluster.workers:
                worker.restart()
            cluster.wait_live(first.node, second.node)
        wait_until(lambda: all(_is_noted(p) for w in cluster.workers for p in blocks_of(w)), "each copy is noted")
        cluster.master.kill()
        shutil.rmtree(data_of(cluster))
        start_master(cluster, *REBUILD)
        wait_complete(cluster)
        with client_of(cluster, first) as client:
            tiers = {replica.tier for name in kept for replica in client.stat(name).replicas}
            assert tiers == {"mem", "ssd"}
        check_all(cluster, kept)


def _is_noted(file: Path) -> bool:
    try:
        return bool(_path(file))
    except OSError:
        return False


# ---- a mount that lived through it ----


@pytest.mark.skipif(not can_mount(), reason="needs root and /dev/fuse")
@pytest.mark.parametrize("shown", ["/", "/a/b/"])
def test_a_mount_goes_on_after_a_rebuild(cluster: Cluster, tmp_path: Path, shown: str) -> None:
    """Also one of a directory, which has another inode number by then."""
    with mounted(cluster, tmp_path / "mnt", cluster.workers[0], "--path", shown) as mount:

        def write(names: list[str]) -> None:
            (mount / "d").mkdir(exist_ok=True)
            for name in names:
                (mount / "d" / name).write_bytes(name.encode())

        def read(names: list[str]) -> list[bytes]:
            return [(mount / "d" / name).read_bytes() for name in names]

        in_child(write, names := [f"f{i}" for i in range(5)])
        wait_noted(cluster, *(f"{shown}d/{name}".lstrip("/") for name in names))
        assert in_child(read, names) == [name.encode() for name in names]
        cluster.master.kill()
        shutil.rmtree(data_of(cluster))
        start_master(cluster, *REBUILD)
        wait_complete(cluster)

        def is_back() -> bool:
            try:
                return bool(in_child(read, names) == [name.encode() for name in names])
            except OSError:
                return False

        wait_until(is_back, "the mount reads by the new inode numbers")
        in_child(write, ["new"])
        assert sorted(in_child(os.listdir, mount / "d")) == [*names, "new"]
        assert in_child(read, ["new"]) == [b"new"]
        check_all(cluster, {f"{shown}d/{name}".lstrip("/"): name.encode() for name in [*names, "new"]})
