"""Commit means kept: what a real master has acknowledged survives kill -9 at any moment, power cuts, full drives.

A kill -9 loses nothing even without any sync: it shows that changes are whole, and that a start copes with it.
That the sync comes before the acknowledgement is shown by the order of the system calls, and by a simulated drive that
has lost everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.core.errors import NoSpace, Unavailable
from kvstore.master.main import DATABASE_DIRECTORY
from kvstore.master.storage import mark
from kvstore.master.storage.db import Cf, RocksDb
from kvstore.master.storage.records import NAME
from kvstore.pb import common_pb2 as c
from kvstore.pb import master_pb2 as m
from kvstore.rpc import methods
from kvstore.rpc.link import AsyncLink
from tests.integration.test_master_process import running, spawn
from tests.support import damage
from tests.support.name_load import (
    BOOT,
    NODE,
    VOLUME,
    WAIT_S,
    Writer,
    lookup_all,
    publish_one,
    publish_until,
    register,
)
from tests.support.small_fs import Filler, small_ext4
from tests.support.syscalls import Call, Trace, traced

KILLS = int(os.environ.get("KVSTORE_TEST_KILLS", "12"))
"""More of them: make test with KVSTORE_TEST_KILLS=500."""
WRITERS = 8


@pytest.fixture(autouse=True, scope="module")
def _nobody_dies_of_a_busy_machine() -> Iterator[None]:
    """The worker here sends no heartbeats, and the files of a dead one are hidden."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_MASTER__DEAD_TICKS", "3600")
        yield


async def test_kill_9_again_and_again_at_any_moment_of_a_load(tmp_path: Path) -> None:
    """Every second time after some acknowledgements, else after a time: then a start, too, is killed on its way."""
    dice = random.Random(4)
    writers = [Writer(i) for i in range(WRITERS)]
    for kill in range(KILLS):
        async with running(tmp_path) as (process, link):
            await register(link)
            await asyncio.gather(*(writer.check(link) for writer in writers))
            enough = Countdown(dice.randrange(1, 400))
            tasks = [asyncio.create_task(writer.run(link, enough.down)) for writer in writers]
            if kill % 2:
                reached = asyncio.create_task(enough.event.wait())
                await asyncio.wait([reached, *tasks], timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
                assert reached.done(), [task for task in tasks if task.done()]
            else:
                await asyncio.sleep(dice.uniform(0, 0.3))
            await process.kill()
            await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)
        await killed_while_it_starts(tmp_path, dice.uniform(0.2, 0.8))
    async with running(tmp_path) as (_, link):
        await register(link)
        await asyncio.gather(*(writer.check(link) for writer in writers))
    verbs = {verb: sum(writer.by_verb.get(verb, 0) for writer in writers) for verb in writers[0].by_verb}
    assert set(verbs) == {"publish", "remove", "rename", "mkdir", "policy"}
    assert sum(verbs.values()) > 50 * KILLS


class Countdown:
    def __init__(self, count: int) -> None:
        self.left, self.event = count, asyncio.Event()

    def down(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self.event.set()


async def killed_while_it_starts(data: Path, after_s: float) -> None:
    process = await spawn(data)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), after_s)
    assert process.returncode is None, "it ended by itself"
    process.kill()
    await asyncio.wait_for(process.communicate(), WAIT_S)


# The sync comes before the acknowledgement.


class Kept(NamedTuple):
    """A load of publishes, traced. `names`: path → counter, each in the log and in its acknowledgement as `pattern`."""

    trace: Trace
    names: dict[str, int]
    database: Path
    """As it lay there at the end, with the process killed."""


def pattern(counter: int) -> bytes:
    """How a block's id is spelled in the rows of the database and in the columns of a reply; in no request."""
    return struct.pack(">QQ", BOOT, counter)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return asyncio.run(traced_load(tmp_path_factory.mktemp("kept")))


async def traced_load(root: Path) -> Kept:
    names: dict[str, int] = {}

    async def publish(link: AsyncLink, writer: int) -> None:
        for i in range(25):
            path, counter = f"w{writer}/{i}", 0x5EED000000 + (writer << 16) + i
            await publish_one(link, path, counter)
            names[path] = counter

    async with running(root) as (process, link):
        await register(link)
        async with traced(process.process.pid, root / "trace") as trace:
            await asyncio.gather(*(publish(link, writer) for writer in range(WRITERS)))
        await process.kill()
    return Kept(trace, names, root / DATABASE_DIRECTORY)


def log_of(kept: Kept) -> str:
    """Path of the only log that was written."""
    [path] = {call.path for call in kept.trace.calls if call.writes and call.path.endswith(".log")}
    return path


def reply_of(kept: Kept, counter: int) -> Call:
    return next(call for call in kept.trace.calls if call.sends and pattern(counter) in call.data)


def test_no_reply_leaves_before_the_log_that_holds_it_is_synced(kept: Kept) -> None:
    calls, log = kept.trace.calls, log_of(kept)
    shared = set()
    for path, counter in kept.names.items():
        write = next(call for call in calls if call.writes and call.path == log and pattern(counter) in call.data)
        reply = reply_of(kept, counter)
        assert write.ended is not None
        between = [
            call.began
            for call in calls
            if call.syncs and call.path == log and call.result == 0 and call.began > write.ended
            and call.ended is not None and call.ended < reply.began
        ]  # fmt: skip
        assert between, f"the reply to {path} left without a sync of its write"
        shared.add(between[0])
    assert len(shared) < len(kept.names), "writers that wait together share a sync"


def test_a_drive_that_lost_all_but_what_was_synced_has_all_that_was_acknowledged(kept: Kept, tmp_path: Path) -> None:
    """Power cuts at every twentieth acknowledgement: the log ends where the last finished sync of it began. What
    follows is lost, or other bytes, and so is the mark."""
    log = Path(log_of(kept))
    written = sum(len(call.data) for call in kept.trace.calls if call.writes and call.path == str(log))
    before = log.stat().st_size - written
    acknowledged = sorted(kept.names, key=lambda path: reply_of(kept, kept.names[path]).began)
    for last in range(9, len(acknowledged), 20):
        length = before + synced_bytes(kept, reply_of(kept, kept.names[acknowledged[last]]).began)
        for what in ("lost", "zeros", "other"):
            copy = damage.copy(kept.database, tmp_path / f"{last}-{what}")
            (copy / mark.NAME).unlink()
            lost = log.stat().st_size - length
            os.truncate(copy / log.name, length)
            damage.grow(copy / log.name, {"lost": b"", "zeros": bytes(lost), "other": b"\xee" * lost}[what])
            found = names_in(copy)
            assert {path: kept.names[path] for path in acknowledged[: last + 1]}.items() <= found.items()
            shutil.rmtree(copy)


def synced_bytes(kept: Kept, moment: int) -> int:
    """How much of what was written to the log since the tracing began was synced at a moment of it."""
    log = log_of(kept)
    syncs = [
        call.began
        for call in kept.trace.calls
        if call.syncs and call.path == log and call.result == 0 and call.ended is not None and call.ended < moment
    ]
    writes = [call for call in kept.trace.calls if call.writes and call.path == log]
    return sum(call.result for call in writes if call.ended is not None and call.ended < max(syncs, default=0))


def names_in(database: Path) -> dict[str, int]:
    """Path → counter of the block, of all files."""
    db = RocksDb(database)
    try:
        rows = [(key, NAME.load(value)) for key, value in db.scan(Cf.NAMES, b"", None, 100_000)]
    finally:
        db.close()
    paths = {row.inode: key[8:].decode() for key, row in rows if row.address is None}
    return {
        f"{paths[int.from_bytes(key[:8])]}/{key[8:].decode()}": row.address.block.counter
        for key, row in rows
        if row.address is not None
    }


# The drive fills up, for which another program is to blame.


async def test_the_reserve_stops_what_grows_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_MASTER__FREE_RESERVE", "24MiB")
    acknowledged: dict[str, int] = {}
    with small_ext4(tmp_path, 128) as drive:
        async with running(drive / "data") as (process, link):
            await register(link)
            await publish_one(link, "before", 1 << 20)
            filler = Filler(drive)
            fill_but(drive, filler, 14 << 20)
            refused_with = await publish_until(link, "d", acknowledged, NoSpace)
            assert "are kept in reserve" in refused_with.message
            beat = m.HeartbeatRequest(node=NODE, boot=BOOT, volumes=[c.Volume(id=VOLUME, tier="ssd")])
            await link.call(methods.HEARTBEAT, beat, WAIT_S)
            reply = await link.call(methods.REMOVE, m.RemoveRequest(names=[m.RemoveName(path="before")]), WAIT_S)
            assert reply.errors[0].code == 0
            filler.remove()
            await accepted(link, "after")
            assert await process.stop() == 0


def fill_but(drive: Path, filler: Filler, left: int) -> None:
    """Leave so many bytes free, and at no moment less."""
    with filler.path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(drive).free - left)


async def accepted(link: AsyncLink, path: str) -> None:
    """As soon as the master has seen that there is room again."""
    for _ in range(int(WAIT_S / 0.1)):
        try:
            return await publish_one(link, path, 1 << 30)
        except NoSpace:
            await asyncio.sleep(0.1)
    pytest.fail("there is room again, and the master does not see it")


async def test_a_full_drive_ends_the_process_and_nothing_acknowledged_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 20, with the reserve switched off: all who wait are told, and it ends with one line."""
    monkeypatch.setenv("KVSTORE_MASTER__FREE_RESERVE", "0")
    acknowledged: list[dict[str, int]] = [{} for _ in range(WRITERS)]
    with small_ext4(tmp_path, 48) as drive:
        filler = Filler(drive)
        async with running(drive / "data") as (process, link):
            await register(link)
            filler.fill()
            ends = [
                publish_until(link, f"w{i}", names, Unavailable, i << 40) for i, names in enumerate(acknowledged, 1)
            ]
            errors = await asyncio.gather(*ends)
            assert any("cannot write its database and stops" in error.message for error in errors)
            _, said = await asyncio.wait_for(process.process.communicate(), WAIT_S)
            assert process.process.returncode == 5, said
            assert b"Traceback" not in said
            assert said.decode().splitlines()[-1].startswith("kvstore: the master cannot write its database and stops")
        filler.remove()
        async with running(drive / "data") as (_, link):
            await register(link)
            for names in acknowledged:
                rows = await lookup_all(link, list(names))
                assert [row.address.block.counter for row in rows if row.address] == list(names.values())
