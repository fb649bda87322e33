"""The directories that `bench.mount` compares: a plain one, and one store on the same disk mounted in each mode."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bench import cpu
from tests.support.cluster import Cluster, Process, ProcessFailed
from tests.support.mounts import mounted

PLAIN: Final = "plain directory"
PASSTHROUGH: Final = "passthrough"
KEEP_CACHE: Final = "keep_cache"
DIRECT_IO: Final = "direct_io"
MODES: Final = {
    PASSTHROUGH: ("--passthrough", "on"),
    KEEP_CACHE: ("--passthrough", "off"),
    DIRECT_IO: ("--passthrough", "off", "--direct-io"),
}
"""Mode → options of ``kvstore mount``."""
CAPACITY: Final = "16GiB"
IDLE_TIMEOUT_S: Final = 10.0


class Place(NamedTuple):
    """`pids`: who works for it."""

    name: str
    directory: Path
    pids: dict[str, list[int]]


class Places:
    """Iterates over the places. `absent`: mode → why it is not among them."""

    def __init__(self, cluster: Cluster, plain: Path) -> None:
        self._cluster = cluster
        self._places = [Place(PLAIN, plain, {})]
        self.absent: dict[str, str] = {}

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places)

    def add(self, mode: str, directory: Path, mount: Process) -> None:
        pid = pid_of(mount)
        below = cpu.children(pid)
        ours = {"keeper": [pid], "file system": below} if below else {"file system": [pid]}
        store = {"worker": [pid_of(self._cluster.workers[0])], "master": [pid_of(self._cluster.master)]}
        self._places.append(Place(mode, directory, {**ours, **store}))

    def settle(self) -> None:
        """Until the worker has unlinked what was removed: nobody works for the place before in the next one's time."""
        end = time.monotonic() + IDLE_TIMEOUT_S
        while self._cluster.workers[0].block_files and time.monotonic() < end:
            time.sleep(0.05)


def pid_of(process: Process) -> int:
    if (pid := process.pid) is None:
        raise ProcessFailed(f"{process.name} does not run any more\n{process.log_tail()}")
    return pid


@contextmanager
def running(home: Path, modes: Iterable[str]) -> Iterator[Places]:
    """A store and its mounts below `home`; whatever happens they are stopped and unmounted in the end.

    A mode that this machine does not have is left out. Raises ProcessFailed when there is no mount at all.
    """
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(home, workers=1, capacity=CAPACITY, tick="1s"))
        places = Places(cluster, home / "plain")
        os.mkdir(home / "plain")
        for mode in modes:
            try:
                options = *MODES[mode], "--path", f"/{mode}"
                mount = stack.enter_context(mounted(cluster, home / mode, cluster.workers[0], *options))
            except ProcessFailed as failure:
                places.absent[mode] = str(failure).strip().splitlines()[-1]
            else:
                places.add(mode, mount.path, mount.process)
        if len(list(places)) == 1:
            raise ProcessFailed(f"no mode of the mount works here: {places.absent}")
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not cut the clean-up short
        yield places
