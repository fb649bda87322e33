"""How the master behaves at 1,000,000 entries: memory, opening, listing, Publish/s and Lookup keys/s.

    python bench/master_scale.py [--entries N] [--seconds S] [--data DIR]

The entries are made by the namespace's own code into a fresh database; then the real `kvstore master` opens it, and
this process talks to it over loopback. Figures of a shared machine: read them as ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from kvstore.core.types import Address, BlockId, Replica
from kvstore.master.main import DATABASE_DIRECTORY
from kvstore.master.namespace import tree
from kvstore.master.namespace.cluster import Cluster
from kvstore.master.namespace.mkdir import mkdir
from kvstore.master.namespace.publish import Mode, Name, Transaction, publish
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf, RocksDb
from kvstore.master.storage.records import (
    FORMAT,
    META_CLUSTER,
    META_FORMAT,
    ClusterRow,
    JournalLimits,
    NodeRow,
    VolumeRow,
    dump,
    pack_u64,
)
from kvstore.pb import common_pb2 as c
from kvstore.pb import master_pb2 as m
from kvstore.rpc import methods
from kvstore.rpc.link import AsyncLink
from kvstore.rpc.metadata import Caller

BATCH = 1000
BOOT, VOLUME = 7, 1
LIMITS = JournalLimits(1_000_000, 1 << 30)
DIRECTORY = "kv"
TIMEOUT_S = 60.0


def key(i: int) -> str:
    """Like a chunk of LMCache: its names are 64 hex digits and a model's name long."""
    return f"vllm@Qwen2-7B@1@0@{i * 0x9E3779B97F4A7C15 % 2**64:016x}"


def fill(path: Path, entries: int) -> float:
    """Seconds it took."""
    db = RocksDb(path)
    replica = Replica(VOLUME, "ssd", "n", "127.0.0.1:1")
    cluster = Cluster({VOLUME: replica}, {VOLUME: "n"}, {BOOT: 0}, {BOOT: "n"})
    change = Change.begin(db, time.time_ns(), LIMITS)
    tree.make_root(change)
    change.put(Cf.META, META_FORMAT, FORMAT)
    change.put(Cf.META, META_CLUSTER, dump(ClusterRow("bench")))
    change.put(Cf.VOLUMES, pack_u64(VOLUME), dump(VolumeRow("n", "ssd")))
    change.put(Cf.NODES, b"n", dump(NodeRow("127.0.0.1:1", "", "", "", BOOT, 1, 0, {BOOT: 0}, [VOLUME])))
    directory = mkdir(change, cluster.live, 0, DIRECTORY).inode
    db.write(change.ops())
    began = time.perf_counter()
    for first in range(0, entries, BATCH):
        change = Change.begin(db, time.time_ns(), LIMITS)
        names = [Name(key(i), block(i), VOLUME) for i in range(first, min(first + BATCH, entries))]
        publish(change, cluster, directory, [Transaction(Mode.REPLACE, names)])
        db.write(change.ops())
    db.flush()
    took = time.perf_counter() - began
    db.close()
    return took


def block(i: int) -> Address:
    return Address(BlockId(BOOT, i), 14 << 20, i)


async def start(data: Path) -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvstore", "master", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
        "--data", str(data), stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    async for line in process.stderr:
        ready = re.search(r"ready: gRPC at (\S+),", line.decode())
        if ready:
            return process, ready[1]
    raise SystemExit("the master did not start")


def rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


async def rate(seconds: float, in_flight: int, call: Callable[[], Awaitable[int]]) -> float:
    """Keys a second of `in_flight` callers, each call returning how many it was."""
    end, done = time.perf_counter() + seconds, 0

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < end:
            keys = await call()  # not "done += await": that adds to what done was before the wait
            done += keys

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return done / (time.perf_counter() - began)


class Load:
    """Calls against one master. `next` counts the blocks that were used up."""

    def __init__(self, link: AsyncLink, entries: int) -> None:
        self.link, self.entries, self.next = link, entries, entries

    async def beat(self) -> None:
        request = m.HeartbeatRequest(node="n", boot=BOOT, volumes=[c.Volume(id=VOLUME, tier="ssd")])
        await self.link.call(methods.HEARTBEAT, request, TIMEOUT_S)

    async def lookup(self, count: int) -> int:
        paths = [f"{DIRECTORY}/{key(random.randrange(self.entries))}" for _ in range(count)]
        await self.link.call(methods.LOOKUP, m.LookupRequest(paths=paths), TIMEOUT_S)
        return count

    async def publish(self, count: int) -> int:
        first, self.next = self.next, self.next + count
        names = [
            m.PublishName(
                path=f"{DIRECTORY}/{key(i)}", volume=VOLUME,
                address=c.Address(boot=BOOT, counter=i, length_bytes=14 << 20, hash=i),
            )
            for i in range(first, first + count)
        ]  # fmt: skip
        request = m.PublishRequest(transactions=[m.Transaction(names=names)])
        reply = await self.link.call(methods.PUBLISH, request, TIMEOUT_S)
        assert reply.results[0].error.code == 0, reply.results[0].error
        return count

    async def list(self) -> int:
        pages = self.link.stream(methods.LIST, m.ListRequest(path=DIRECTORY, names_only=True), TIMEOUT_S)
        return sum([len(page.names) async for page in pages])


async def measure(data: Path, entries: int, seconds: float) -> None:
    began = time.perf_counter()
    process, endpoint = await start(data)
    show("start of the process until ready", time.perf_counter() - began, "s")
    show("RSS after opening", rss_mib(process.pid), "MiB")
    link = AsyncLink(endpoint, Caller())
    load = Load(link, entries)
    beats = asyncio.create_task(heartbeats(load))
    began = time.perf_counter()
    listed = await load.list()
    show(f"list of {listed:,} names", time.perf_counter() - began, "s")
    for in_flight in (1, 64):
        for batch in (1, 64, 512):
            looked = await rate(seconds, in_flight, lambda n=batch: load.lookup(n))  # type: ignore[misc]
            show(f"Lookup, {batch} a call, {in_flight} in flight", looked, "keys/s")
    for in_flight in (1, 64):
        for batch in (1, 64):
            published = await rate(seconds, in_flight, lambda n=batch: load.publish(n))  # type: ignore[misc]
            show(f"Publish, {batch} a call, {in_flight} in flight", published, "keys/s")
    show("RSS at the end", rss_mib(process.pid), "MiB")
    beats.cancel()
    await link.close()
    process.terminate()
    await process.wait()


async def heartbeats(load: Load) -> None:
    while True:
        await load.beat()
        await asyncio.sleep(1)


def show(what: str, number: float, unit: str) -> None:
    print(f"{what:<44} {number:>12,.2f} {unit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each rate")
    parser.add_argument("--data", type=Path, help="keep the database here, and use the one that is there")
    options = parser.parse_args()
    data = options.data or Path(tempfile.mkdtemp(prefix="kvstore-bench-"))
    try:
        if not (data / DATABASE_DIRECTORY).exists():
            took = fill(data / DATABASE_DIRECTORY, options.entries)
            show(f"made {options.entries:,} entries", took, "s")
        began = time.perf_counter()
        RocksDb(data / DATABASE_DIRECTORY).close()
        show("opening the database", time.perf_counter() - began, "s")
        uvloop.run(measure(data, options.entries, options.seconds))
    finally:
        if options.data is None:
            shutil.rmtree(data)


if __name__ == "__main__":
    main()
