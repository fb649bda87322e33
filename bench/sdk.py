"""The SDK beside the plain file, in one run: put, get of a local block, get from a peer, each as MB/s and as a ratio.

    python -m bench.sdk [--json]

Starts a store of two workers on loopback. Rounds of all kinds take turns, so that a noisy neighbour meets them all
alike, and the best round of each counts. Puts and plain writes use fresh names (on ext4 a rename over a file flushes
data) and do not wait for the disk. "first" asks the master for each name, "again" finds it in the client's cache, as a
caller does who asked `exists` before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.client.aio import AsyncClient
from kvstore.client.sync import Client
from tests.support.cluster import Cluster

BLOCK_BYTES = 14 << 20
"""An LMCache chunk of Qwen2-7B: 256 tokens."""
BLOCKS = 8
ROUNDS = 5


class Bench:
    """`rates`: what was measured → MB/s of its best round."""

    def __init__(self, root: Path, cluster: Cluster) -> None:
        self.rates: dict[str, float] = {}
        self._root, self._cluster = root, cluster
        self._data = [os.urandom(BLOCK_BYTES) for _ in range(BLOCKS)]
        self._buffer = bytearray(BLOCK_BYTES)
        self._round = 0

    def run(self) -> None:
        local, peer = (worker.socket for worker in self._cluster.workers)
        with (
            Client(self._cluster.url, worker_socket=local) as client,
            Client(self._cluster.url, worker_socket=peer) as other,
            Client(self._cluster.url, worker_socket="") as remote,
        ):
            for self._round in range(ROUNDS):
                self._measure("plain write", lambda i: self._plain(i).write_bytes(self._data[i]))
                self._measure("put, local worker", lambda i: client.put(self._name(i), self._data[i]))
                self._measure("plain read", self._read_plain)
                self._measure("get_into, local block, first", lambda i: client.get_into(self._name(i), self._buffer))
                self._measure("get_into, local block, again", lambda i: client.get_into(self._name(i), self._buffer))
                self._measure(
                    "get_into, from a peer, no worker", lambda i: remote.get_into(self._name(i), self._buffer)
                )
                self._measure(
                    "get_into, from a peer by the worker", lambda i: other.get_into(self._name(i), self._buffer)
                )
                self._measure("put, no worker", lambda i: remote.put(f"r/{self._name(i)}", self._data[i]))
                asyncio.run(self._in_loop(local))
                self._check(client, other, remote)
                self._clean(client)

    def ratios(self) -> dict[str, float]:
        """Of each kind to the plain file."""
        read, write = self.rates["plain read"], self.rates["plain write"]
        return {
            name: rate / (write if "put" in name else read) for name, rate in self.rates.items() if "plain" not in name
        }

    async def _in_loop(self, socket: str) -> None:
        url, paths = self._cluster.url, [self._name(i) for i in range(BLOCKS)]
        buffers = [self._buffer] * BLOCKS  # the same one: this measures moving, not memory
        async with AsyncClient(url, worker_socket=socket) as client, AsyncClient(url, worker_socket="") as remote:
            await client.exists_many(paths)
            await remote.exists_many(paths)
            with self._timed("asyncio get_into, local block, again"):
                for path in paths:
                    await client.get_into(path, self._buffer)
            with self._timed("asyncio get_many_into, local blocks, again"):
                await client.get_many_into(paths, buffers)
            with self._timed("asyncio get_into, from a peer, no worker"):
                for path in paths:
                    await remote.get_into(path, self._buffer)

    def _check(self, *clients: Client) -> None:
        """Outside of what is timed: they were the right bytes."""
        for client in clients:
            assert client.get_many([self._name(i) for i in range(BLOCKS)]) == self._data

    def _measure(self, name: str, step: Callable[[int], object]) -> None:
        with self._timed(name):
            for i in range(BLOCKS):
                step(i)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        rate = BLOCKS * BLOCK_BYTES / (time.perf_counter() - begin) / 1e6
        self.rates[name] = max(self.rates.get(name, 0.0), rate)

    def _name(self, index: int) -> str:
        return f"b{self._round}/{index}"

    def _plain(self, index: int) -> Path:
        return self._root / f"plain-{self._round}-{index}"

    def _read_plain(self, index: int) -> None:
        with open(self._plain(index), "rb", buffering=0) as file:
            file.readinto(self._buffer)

    def _clean(self, client: Client) -> None:
        for i in range(BLOCKS):
            client.remove(self._name(i))
            client.remove(f"r/{self._name(i)}")
            self._plain(i).unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvs-bench-") as root, Cluster(Path(root), 2, capacity="2GiB") as cluster:
        bench = Bench(Path(root), cluster)
        bench.run()
    ratios = bench.ratios()
    if arguments.json:
        print(json.dumps({"mb_per_s": bench.rates, "ratio_to_plain": ratios}))
        return
    print(f"{BLOCKS} blocks of {BLOCK_BYTES >> 20} MiB, best of {ROUNDS} rounds")
    for name, rate in bench.rates.items():
        ratio = f"{ratios[name]:6.2f} × plain" if name in ratios else ""
        print(f"  {name:<48} {rate:8,.0f} MB/s {ratio}")


if __name__ == "__main__":
    main()
