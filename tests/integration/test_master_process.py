"""The real master process on loopback: start, refusals, bad input over the wire, and kill -9 under load."""

from __future__ import annotations

import asyncio
import random
import re
import resource
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from kvstore.core.errors import (
    AlreadyExists,
    Denied,
    InvalidRequest,
    KvError,
    NotDirectory,
    NotFound,
    Stale,
    Unavailable,
)
from kvstore.core.limits import MAX_BATCH
from kvstore.core.types import Address, Entry
from kvstore.pb import common_pb2 as c
from kvstore.pb import master_pb2 as m
from kvstore.rpc import entries, methods
from kvstore.rpc.link import AsyncLink
from kvstore.rpc.metadata import Caller

WAIT_S = 20.0
BOOT, VOLUME = 7, 1


class Process:
    """A running ``kvstore master``: its endpoints are in its ready line, and nowhere else."""

    def __init__(self, process: asyncio.subprocess.Process, grpc: str, http: str) -> None:
        self.process, self.grpc, self.http = process, grpc, http

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.wait_for(self.process.communicate(), WAIT_S)

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(self.process.communicate(), WAIT_S)
        assert self.process.returncode is not None
        return self.process.returncode


async def spawn(data: Path, listen: str = "127.0.0.1:0", *more: str) -> asyncio.subprocess.Process:
    arguments = ["master", "--listen", listen, "--http", "127.0.0.1:0", "--data", str(data), *more]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvstore", *arguments, stderr=asyncio.subprocess.PIPE
    )


async def start(data: Path) -> Process:
    process = await spawn(data)
    assert process.stderr is not None
    async with asyncio.timeout(WAIT_S):
        async for line in process.stderr:
            ready = re.search(r"ready: gRPC at (\S+), HTTP at (\S+),", line.decode())
            if ready:
                return Process(process, ready[1], ready[2])
    pytest.fail("the master ended before it was ready")


async def refused(data: Path, listen: str = "127.0.0.1:0") -> tuple[int | None, str]:
    """(exit code, what it said) of a master that cannot start."""
    process = await spawn(data, listen)
    _, said = await asyncio.wait_for(process.communicate(), WAIT_S)
    return process.returncode, said.decode()


@asynccontextmanager
async def running(data: Path) -> AsyncIterator[tuple[Process, AsyncLink]]:
    process = await start(data)
    link = AsyncLink(process.grpc, Caller(session=1))
    try:
        yield process, link
    finally:
        await link.close()
        if process.process.returncode is None:
            await process.kill()


def registration(**other: Any) -> m.RegisterRequest:
    volumes = [c.Volume(id=VOLUME, tier="ssd", capacity_bytes=1 << 30)]
    return m.RegisterRequest(**dict[str, Any](node="n", boot=BOOT, endpoint="h:1", volumes=volumes) | other)


def name(path: str, counter: int) -> m.PublishName:
    address = c.Address(boot=BOOT, counter=counter, length_bytes=5, hash=counter)
    return m.PublishName(path=path, address=address, volume=VOLUME)


async def publish(link: AsyncLink, *names: m.PublishName) -> list[entries.Row]:
    request = m.PublishRequest(transactions=[m.Transaction(names=names, parents=True)])
    reply = await link.call(methods.PUBLISH, request, WAIT_S)
    assert reply.results[0].error.code == 0, reply.results[0].error
    return entries.decode(reply.results[0].entries)


async def lookup(link: AsyncLink, paths: Sequence[str]) -> list[entries.Row]:
    return entries.decode((await link.call(methods.LOOKUP, m.LookupRequest(paths=paths), WAIT_S)).entries)


async def fetch(http: str, path: str) -> tuple[int, str]:
    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{http}{path}", timeout=WAIT_S) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as reply:
            return reply.code, reply.read().decode()

    return await asyncio.to_thread(get)


async def test_it_serves_and_ends_in_order(tmp_path: Path) -> None:
    async with running(tmp_path) as (process, link):
        await link.call(methods.REGISTER, registration(), WAIT_S)
        [entry] = await publish(link, name("a/b", 1))
        assert await lookup(link, ["a/b"]) == [entry]
        await lookup(link, ["a/b", "never", "nor/this"])
        told = await link.call(methods.CLUSTER_MAP, m.ClusterMapRequest(), WAIT_S)
        assert (told.lookups_found, told.lookups_not_found) == (2, 2)
        assert (told.files, told.directories) == (1, 1), "the root is not counted"
        space = await link.call(methods.STATFS, m.StatfsRequest(), WAIT_S)
        assert (space.files, space.directories) == (1, 1)
        assert await fetch(process.http, "/healthz") == (200, "ok\n")
        metrics = (await fetch(process.http, "/metrics"))[1]
        assert "kvstore_master_files 1.0" in metrics
        assert 'kvstore_master_keys_total{verb="publish"} 1.0' in metrics
        assert 'kvstore_master_lookups_total{result="found"} 2.0' in metrics
        assert 'kvstore_master_lookups_total{result="not_found"} 2.0' in metrics
        assert await process.stop() == 0
    async with running(tmp_path) as (_, link):
        assert await lookup(link, ["a/b"]) == [entry], "known volumes count as live after a restart"


async def test_a_directory_or_a_port_in_use(tmp_path: Path) -> None:
    async with running(tmp_path / "a") as (process, _):
        code, said = await refused(tmp_path / "a")
        assert (code, said.count("\n")) == (5, 1)
        assert "does another master run there" in said
        code, said = await refused(tmp_path / "b", process.grpc)
        assert code == 5
        assert f"cannot listen on {process.grpc}" in said


async def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, said = await refused(tmp_path / "file")
    assert (code, said.count("\n")) == (7, 1)


ONE = m.Transaction(names=[m.PublishName(path="x")])
BAD: list[tuple[methods.Method[Any, Any], Message, type[KvError]]] = [
    (methods.LOOKUP, m.LookupRequest(paths=["x"] * (MAX_BATCH + 1)), InvalidRequest),
    (methods.PUBLISH, m.PublishRequest(transactions=[ONE] * (MAX_BATCH + 1)), InvalidRequest),
    (methods.PUBLISH, m.PublishRequest(transactions=[m.Transaction(mode=9)]), InvalidRequest),  # type: ignore[arg-type]
    (methods.MKDIR, m.MkdirRequest(paths=["x"] * (MAX_BATCH + 1)), InvalidRequest),
    (methods.REMOVE, m.RemoveRequest(names=[m.RemoveName(kind=9)]), InvalidRequest),  # type: ignore[arg-type]
    (methods.RENAME, m.RenameRequest(names=[m.RenameName()] * (MAX_BATCH + 1)), InvalidRequest),
    (methods.SET_ATTR, m.SetAttrRequest(path="no"), NotFound),
    (methods.SET_ATTR, m.SetAttrRequest(base=99, mode=1), Stale),
    (methods.STATFS, m.StatfsRequest(path="no"), NotFound),
    (methods.REGISTER, m.RegisterRequest(), InvalidRequest),
    (methods.REGISTER, registration(cluster="other"), Denied),
    (methods.REGISTER, registration(endpoint="elsewhere:1"), AlreadyExists),
    (methods.HEARTBEAT, m.HeartbeatRequest(volumes=[c.Volume(id=1, tier="tape")]), InvalidRequest),
    (methods.REPORT, m.ReportRequest(held_ids=b"123"), InvalidRequest),
    (methods.REPORT, m.ReportRequest(held_ids=bytes(16)), InvalidRequest),
    (methods.REPORT, m.ReportRequest(held_ids=bytes(16), held_volume=[0]), InvalidRequest),
    (methods.REPORT, m.ReportRequest(nowhere_ids=bytes(16 * (MAX_BATCH + 1))), InvalidRequest),
    (methods.REPORT, m.ReportRequest(full=m.FullPiece(first=b"1")), InvalidRequest),
    (methods.REPORT, m.ReportRequest(full=m.FullPiece(first=b"\1" * 16, last=bytes(16))), InvalidRequest),
]


async def test_bad_input_on_every_call_gets_its_typed_error(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, link):
        await link.call(methods.REGISTER, registration(), WAIT_S)
        await publish(link, name("file", 1))
        for method, request, error in BAD:
            with pytest.raises(KvError) as caught:
                await link.call(method, request, WAIT_S)
            assert type(caught.value) is error, (method.path, caught.value)
        for path, kind in (("file", NotDirectory), ("no", NotFound), ("..", InvalidRequest)):
            with pytest.raises(kind):
                [page async for page in link.stream(methods.LIST, m.ListRequest(path=path), WAIT_S)]
        assert await lookup(link, ["file"]), "and it still serves"


async def test_wild_numbers_harm_nobody(tmp_path: Path) -> None:
    """Everything that a field can hold: the answer may be an error, but a typed one."""
    top = 2**64 - 1
    wild: list[tuple[methods.Method[Any, Any], Message]] = [
        (methods.LOOKUP, m.LookupRequest(base=top, paths=["", "x"])),
        (methods.PUBLISH, m.PublishRequest(transactions=[m.Transaction(names=[
            m.PublishName(path="w", mode=2**32 - 1, uid=2**32 - 1, mtime_ns=-(2**63))])])),
        (methods.PUBLISH, m.PublishRequest(transactions=[m.Transaction(names=[
            m.PublishName(path="w", volume=top, address=c.Address(boot=top, counter=top, length_bytes=1, hash=1))])])),
        (methods.MKDIR, m.MkdirRequest(base=top, paths=["x"], mode=2**32 - 1)),
        (methods.EVENTS, m.EventsRequest(after=top, limit=2**32 - 1)),
        (methods.REGISTER, registration(node="w", boot=top, endpoint="w:1", sequence=0,
            volumes=[c.Volume(id=top, tier="hdd")], fences=[m.Fence(boot=top, counter=top)])),
        (methods.HEARTBEAT, m.HeartbeatRequest(node="w", boot=top, blocks=top, volumes=[c.Volume(id=top, tier="hdd")],
            counters=m.Counters(hits=top))),
        (methods.REPORT, m.ReportRequest(node="w", boot=top, number=top, full=m.FullPiece(volume=top))),
        (methods.REPORT, m.ReportRequest(node="w", boot=top, number=1, full=m.FullPiece(volume=top))),
        (methods.CLUSTER_MAP, m.ClusterMapRequest()),
        (methods.STATFS, m.StatfsRequest()),
    ]  # fmt: skip
    async with running(tmp_path) as (_, link):
        for method, request in wild:
            error = await outcome(link, method, request)
            assert error is None or type(error) is not KvError, (method.path, error)


async def outcome(link: AsyncLink, method: methods.Method[Any, Any], request: Message) -> KvError | None:
    try:
        await link.call(method, request, WAIT_S)
    except KvError as error:
        return error
    return None


async def test_a_failed_write_ends_the_process_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    """Rule 20: whoever waits is told Unavailable; after an I/O error no later flush may acknowledge over the hole."""
    acknowledged: list[str] = []

    async def until_refused(link: AsyncLink) -> None:
        for first in range(1, 100_000, 50):
            names = [name(f"d/{i}", i) for i in range(first, first + 50)]
            await publish(link, *names)
            acknowledged.extend(n.path for n in names)

    async with running(tmp_path) as (process, link):
        await link.call(methods.REGISTER, registration(), WAIT_S)
        # From here on no file of that process grows beyond 300 kB: its writes fail with EFBIG.
        resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
        with pytest.raises(Unavailable):
            await until_refused(link)
        _, said = await asyncio.wait_for(process.process.communicate(), WAIT_S)
        assert process.process.returncode == 5, said.decode()
        assert "cannot write its database and stops" in said.decode()
    assert acknowledged
    async with running(tmp_path) as (_, link):
        for at in range(0, len(acknowledged), 1000):
            rows = await lookup(link, acknowledged[at : at + 1000])
            assert all(isinstance(row, Entry) for row in rows)


class Writer:
    """Publishes names of its own until the master is gone; remembers what was acknowledged."""

    def __init__(self, index: int, first_counter: int) -> None:
        self.index = index
        self.counter = first_counter
        self.acknowledged: dict[str, Address] = {}
        self.in_flight: set[int] = set()
        self.inodes: list[int] = []

    async def run(self, link: AsyncLink, on_acknowledged: Callable[[], None]) -> None:
        while True:
            self.counter += 1
            path = f"w{self.index}/{self.counter % 50}"  # comes again: replaced and minted anew
            try:
                [entry] = await publish(link, name(path, self.counter))
            except Unavailable:
                self.in_flight.add(self.counter)
                return
            assert isinstance(entry, Entry)
            assert entry.address is not None
            self.acknowledged[path] = entry.address
            self.inodes.append(entry.inode)
            on_acknowledged()


async def test_kill_9_under_load_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    dice = random.Random(5)
    writers = [Writer(i, i << 32) for i in range(8)]
    for _ in range(4):
        async with running(tmp_path) as (process, link):
            await link.call(methods.REGISTER, registration(), WAIT_S)
            await check(link, writers)
            left, enough = dice.randrange(50, 600), asyncio.Event()

            def count(enough: asyncio.Event = enough) -> None:
                nonlocal left
                left -= 1
                if left <= 0:
                    enough.set()

            tasks = [asyncio.create_task(w.run(link, count)) for w in writers]
            await asyncio.wait_for(enough.wait(), WAIT_S)
            await process.kill()
            await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)
    async with running(tmp_path) as (_, link):
        await check(link, writers)
    inodes = [inode for w in writers for inode in w.inodes]
    assert len(set(inodes)) == len(inodes), "an inode number was given out twice"


async def check(link: AsyncLink, writers: Sequence[Writer]) -> None:
    """Each name is what was acknowledged last, or what was in flight when the master died."""
    for writer in writers:
        paths = list(writer.acknowledged)
        for path, row in zip(paths, await lookup(link, paths), strict=True):
            assert isinstance(row, Entry), (path, row)
            assert row.address is not None
            counter = row.address.block.counter
            last = writer.acknowledged[path].block.counter
            assert counter == last or (counter > last and counter in writer.in_flight), path
