"""Workers in the test's own process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kvstore.core import sockproto as sp
from kvstore.core.hashing import hash_block
from kvstore.core.types import Address
from kvstore.runtime import SystemRuntime
from kvstore.worker.blocks.block import Block
from kvstore.worker.settings import Settings, VolumeSettings, Watermarks
from kvstore.worker.volumes.disk import Disk
from kvstore.worker.volumes.opening import open_volumes
from kvstore.worker.worker import Worker
from kvstore.worker.writes.seal import Claim
from kvstore.worker.writes.staging import Staged

KIB, MIB = 1 << 10, 1 << 20
NOBODY = "127.0.0.1:1"
"""A master that is never there."""


def settings(
    root: Path, node: str = "a", *, master: str = NOBODY, capacity: int = 64 * MIB, tier: str = "ssd"
) -> Settings:
    volume = VolumeSettings(tier, str(root / f"volume-{node}"), capacity, 0, Watermarks(1.0, 1.0))
    return Settings(node, [master], "127.0.0.1:0", "", str(root / f"{node}.sock"), 0o666, 0.2, 600.0, [volume])


@asynccontextmanager
async def running(settings: Settings, disk: Disk | None = None, *, joined: bool = False) -> AsyncIterator[Worker]:
    """A whole worker; with `joined` its master is awaited."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    runtime, disk = SystemRuntime(), disk or Disk()
    worker = Worker(settings, runtime, await open_volumes(settings, runtime, disk), disk)
    try:
        await worker.start()
        await worker.store.scanned.wait()
        if joined:
            await worker.joined.wait()
        yield worker
    finally:
        await worker.stop()
        runtime.close()


async def stage(worker: Worker, data: bytes, session: int = 1) -> Staged:
    """A staging file with these bytes, closed by its writer."""
    staged, fd = await worker.staging.create(session, len(data))
    os.pwrite(fd, data, 0)
    os.close(fd)
    return staged


async def put(worker: Worker, data: bytes, session: int = 1, *, owned: bool = True) -> Block:
    """A sealed block; `owned` as if the master had said so."""
    block = await worker.sealer.seal(await stage(worker, data, session), None)
    if owned:
        worker.store.own(block)
    return block


async def get(worker: Worker, address: Address) -> bytes:
    opened = await worker.opener.open(address, (), 5.0)
    try:
        return os.pread(opened.fd, address.length_bytes + 1, 0)
    finally:
        os.close(opened.fd)


def claim_of(fd: int, data: bytes) -> Claim:
    state = os.fstat(fd)
    return Claim(hash_block(data), state.st_size, state.st_mtime_ns)


def files(worker: Worker, part: str) -> list[Path]:
    """What lies in blocks, staging or quarantine of its first volume."""
    return [p for p in (Path(worker.store.volumes[0].path) / part).rglob("*") if p.is_file()]


async def check_books(worker: Worker) -> None:
    """Every byte on disk is in the books, and no book is over its capacity."""
    for volume in worker.store.volumes:
        await worker.staging.look(volume)
        books = volume.books
        # Blocks first: a file that is renamed meanwhile is then counted at most once.
        on_disk = sum(size_of(p) for part in ("blocks", "staging", "quarantine") for p in files(worker, part))
        assert 0 <= books.used <= books.capacity, books.describe()
        assert on_disk <= books.used, (on_disk, books.describe())
        assert min(books.blocks, books.staging, books.held, books.quarantine) >= 0, books.describe()


def size_of(path: Path) -> int:
    """0 when it has gone meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait for what has no event, one turn of the loop after the other."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)


def connect(path: str) -> socket.socket:
    """A blocking client of the Unix socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    sock.connect(path)
    return sock


def hello(session: int = 1, cluster: str = "", request_id: int = 1) -> bytes:
    return sp.encode_request(request_id, sp.Hello(sp.PROTOCOL_VERSION, session, cluster))
