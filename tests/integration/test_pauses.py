"""A pause is not a death (rule 17): a process that was stopped for long (a VM that was suspended, a debugger) goes on
as if nothing had been, by itself, within two seconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from kvstore.client.sync import Client
from kvstore.core.errors import KvError
from tests.support.cluster import Cluster, Process, wait_until

PAUSE_S: Final = 30.0
SHORT_PAUSE_S: Final = 3.0
"""With ticks of 0.1 s: six times what makes a worker dead."""
BACK_S: Final = 2.0
LATE_S: Final = 3.0
"""A busy machine's, on top."""
DATA: Final = os.urandom(50_000)


def seconds_until(condition: Callable[[], bool], what: str) -> float:
    begin = time.monotonic()
    wait_until(condition, what, BACK_S + LATE_S)
    return time.monotonic() - begin


def pause(process: Process, pause_s: float) -> None:
    process.signal(signal.SIGSTOP)
    time.sleep(pause_s)
    process.signal(signal.SIGCONT)


class Place:
    """A store with a client on each of two nodes, and one that is on none; `v` lies on node 0 alone."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self.cluster = cluster
        sockets = (cluster.workers[0].socket, cluster.workers[1].socket, "")
        self.clients = [
            stack.enter_context(Client(cluster.url, worker_socket=path, metadata_ttl_s=0.0)) for path in sockets
        ]
        self.clients[0].put("v", DATA)
        assert all(client.get("v") == DATA for client in self.clients[::2])

    def all_read(self) -> bool:
        return all(client.get_many(["v"]) == [DATA] for client in self.clients)

    def all_write(self) -> bool:
        """Each through its own node."""
        try:
            for i, client in enumerate(self.clients):
                client.put(f"w{i}", os.urandom(1000))
            homes = [{r.node for r in self.clients[i].stat(f"w{i}").replicas} for i in range(2)]
        except KvError:
            return False
        return homes == [{"node-0"}, {"node-1"}]

    def check_back(self) -> None:
        assert seconds_until(self.all_read, "all can read") < BACK_S + LATE_S
        assert seconds_until(self.all_write, "all can write, each to its own node") < BACK_S + LATE_S


def pause_master(root: Path, pause_s: float, tick: str) -> None:
    """It slept, so it heard nobody; that is no news of anybody."""
    with ExitStack() as stack:
        place = Place(stack.enter_context(Cluster(root, workers=2, tick=tick)), stack)
        pause(place.cluster.master, pause_s)
        place.check_back()
        log = place.cluster.master.log.read_text()
        assert "no heartbeat" not in log, "nobody was declared dead"


def pause_worker(root: Path, pause_s: float, tick: str) -> None:
    with ExitStack() as stack:
        place = Place(stack.enter_context(Cluster(root, workers=2, tick=tick)), stack)
        first = place.cluster.workers[0]
        boots = first.log.read_text().count("registered as")
        pause(first, pause_s)
        place.check_back()
        assert "no heartbeat" in place.cluster.master.log.read_text(), "long enough to be taken for dead"
        assert first.log.read_text().count("registered as") == boots, "it is the same start of it"
        assert place.clients[2].get("v") == DATA


def pause_both(root: Path, pause_s: float, tick: str) -> None:
    """A whole machine."""
    with ExitStack() as stack:
        place = Place(stack.enter_context(Cluster(root, workers=2, tick=tick)), stack)
        everybody = [place.cluster.master, *place.cluster.workers]
        for process in everybody:
            process.signal(signal.SIGSTOP)
        time.sleep(pause_s)
        for process in everybody:
            process.signal(signal.SIGCONT)
        place.check_back()


PAUSES: Final = (pause_master, pause_worker, pause_both)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(len(PAUSES)) as pool:
        yield pool


@pytest.mark.parametrize("kind", PAUSES, ids=lambda f: f.__name__)
def test_a_short_pause(tmp_path: Path, kind: Callable[[Path, float, str], None]) -> None:
    kind(tmp_path, SHORT_PAUSE_S, "100ms")


def test_half_a_minute(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """With the ticks that are the default, all kinds at the same time."""
    roots = [tmp_path / kind.__name__ for kind in PAUSES]
    for root in roots:
        root.mkdir()
    for future in [pool.submit(kind, root, PAUSE_S, "1s") for kind, root in zip(PAUSES, roots, strict=True)]:
        future.result(PAUSE_S + 120.0)
