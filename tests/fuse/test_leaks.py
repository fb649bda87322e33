"""Thousands of files opened, made and removed: afterwards every process has what it had before."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.fuse.calls import error_of
from tests.support.cluster import Cluster, Worker, wait_until
from tests.support.crew import Crew, shift
from tests.support.kept import fs_pid, kill_fs, status
from tests.support.modes import MODES, mode_options
from tests.support.mounts import Mount, mounted
from tests.support.puts import get, put
from tests.support.versions import content

LONG: Final = bool(os.environ.get("KVSTORE_LONG"))
CYCLES: Final = 20_000 if LONG else 300
"""On each mount; every one opens three files or so."""
WARM_UP: Final = 200
GROWTH_BYTES: Final = 12 << 20
"""What caches may still take after the warm-up; a leak of 1 KiB a cycle shows in the long form."""
SETTLE_S: Final = 30.0
"""Idle spares and dead blocks go within seconds."""
KILLS: Final = 30 if LONG else 3
KEPT: Final = ("opens", "backing_ids", "offers", "kept", "pending")
"""Of the keeper's status; nothing is open when they are compared."""

pytestmark = pytest.mark.slow


class Running(NamedTuple):
    """A mount and the worker of its node."""

    mode: str
    worker: Worker
    mount: Mount

    @property
    def pids(self) -> dict[str, int]:
        """The processes of the node. In plain mode the mount's is the one that serves."""
        main, worker = self.mount.process.pid, self.worker.pid
        assert main is not None
        assert worker is not None
        if self.mode == "plain":
            return {"mount": main, "worker": worker}
        return {"keeper": main, "mount": fs_pid(self.mount.path), "worker": worker}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Running]]:
    """A store with a node for each mode."""
    settings = '[mount]\ntemp_ttl = "2s"\n'
    with Cluster(tmp_path, workers=len(MODES)) as cluster, ExitStack() as stack:
        running = []
        for mode, worker in zip(MODES, cluster.workers, strict=True):
            mount = mounted(cluster, tmp_path / mode, worker, *mode_options(mode), settings=settings)
            running.append(Running(mode, worker, stack.enter_context(mount)))
        yield running


# ---- what is counted ----


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


def counts(node: Running) -> dict[str, int]:
    """Whatever has to be the same again."""
    found = {f"fds of {name}": len(os.listdir(f"/proc/{pid}/fd")) for name, pid in node.pids.items()}
    found["staging files"] = len(os.listdir(node.worker.volume / "staging"))
    found["blocks"] = len(node.worker.block_files)
    if node.mode == "passthrough":
        kept = status(node.mount.path)
        found |= {name: kept[name] for name in KEPT}
    return found


def settle(nodes: list[Running]) -> None:
    """Until what goes by itself has gone."""
    for node in nodes:
        wait_until(lambda node=node: counts(node)["staging files"] == 0, "no staging file is left", SETTLE_S)  # type: ignore[misc]
        wait_until(lambda node=node: counts(node)["blocks"] == 0, "no block is left", SETTLE_S)  # type: ignore[misc]


# ---- what is done ----


def a_put_read_and_removed(directory: Path, turn: int) -> None:
    luck = random.Random(turn)
    put(directory, 0, content(0, 0, turn, luck.randrange(1000, 200_000)), luck)
    for _ in range(2):
        version = get(directory, 0)
        assert version is not None
        assert version.turn == turn
    os.unlink(directory / "0.data")


def an_ordinary_file(directory: Path, turn: int) -> None:
    path = directory / "f"
    path.write_bytes(b"x" * 5000)
    with path.open("r+b") as writer:
        writer.seek(4000)
        writer.write(b"y" * 4000)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert view[3999:4001] == b"xy"
    path.unlink()


def a_file_that_loses_its_name(directory: Path, turn: int) -> None:
    """Open while it is removed. An unlinked temporary name comes back when another writer of it closes."""
    for name in ("f", "k.tmp"):
        path = directory / name
        path.write_bytes(b"x" * 100)
        with path.open("rb") as reader, path.open("r+b") as writer:
            writer.write(b"y")
            path.unlink()
            assert len(reader.read()) == 100
        path.unlink(missing_ok=True)


def failures(directory: Path, turn: int) -> None:
    """Calls that are refused half-way."""
    assert error_of(os.open, directory / "none", os.O_RDONLY) == "ENOENT"
    assert error_of(os.rename, directory / "none.tmp", directory / "none") == "ENOENT"
    (directory / "k.tmp").touch()
    assert error_of(os.rename, directory / "k.tmp", directory / "none" / "k") == "ENOENT"
    assert error_of(os.mkdir, directory / "k.tmp") != "ok"
    (directory / "k.tmp").unlink()


def directories(directory: Path, turn: int) -> None:
    (directory / "d").mkdir()
    assert os.listdir(directory) == ["d"]
    with os.scandir(directory / "d") as entries:
        assert list(entries) == []
    (directory / "d").rmdir()


KINDS: Final[list[Callable[[Path, int], None]]] = [
    a_put_read_and_removed, an_ordinary_file, a_put_read_and_removed, a_file_that_loses_its_name, failures, directories,
]  # fmt: skip


def cycles(directory: Path, count: int) -> None:
    do(directory, range(count))


def cycles_until(directory: Path, stop: Path) -> None:
    do(directory, shift(stop))


def do(directory: Path, turns: Iterable[int]) -> None:
    directory.mkdir()
    for turn in turns:
        KINDS[turn % len(KINDS)](directory, turn)
    directory.rmdir()


def run(crew: Crew, nodes: list[Running], name: str, count: int) -> None:
    """On all mounts at the same time, each in a directory of its own."""
    crew.together([crew.start(cycles, node.mount / f"{name}-{node.mode}", count) for node in nodes], 30 + count / 10)
    settle(nodes)


def test_nothing_is_left_of_thousands_of_files(nodes: list[Running], tmp_path: Path) -> None:
    with Crew(tmp_path) as crew:
        run(crew, nodes, "warm-up", WARM_UP)
        before = [counts(node) for node in nodes]
        memory = [{name: resident_bytes(pid) for name, pid in node.pids.items()} for node in nodes]
        run(crew, nodes, "cycles", CYCLES)
    for node, counted, resident in zip(nodes, before, memory, strict=True):
        wait_until(lambda node=node, counted=counted: counts(node) == counted, f"{counted} again", SETTLE_S)  # type: ignore[misc]
        growth = {name: resident_bytes(pid) - resident[name] for name, pid in node.pids.items()}
        print(node.mode, counted, {name: f"{size / 2**20:.1f} MiB" for name, size in growth.items()})
        assert max(growth.values()) < GROWTH_BYTES


def test_hand_overs_leave_nothing(nodes: list[Running], tmp_path: Path) -> None:
    """Killed in the middle of all this: what nobody has open any more is given back by the successor."""
    node = nodes[MODES.index("passthrough")]
    with Crew(tmp_path) as crew:
        run(crew, [node], "warm-up", len(KINDS))
        before = counts(node)
        working = crew.start(cycles_until, node.mount / "cycles", crew.stop)
        for _ in range(KILLS):
            kill_fs(node.mount.path)
            time.sleep(0.3)  # its successor does some work
        crew.call_off()
        working.join(30)
        settle([node])
    wait_until(lambda: counts(node) == before, f"{before} again", SETTLE_S)
