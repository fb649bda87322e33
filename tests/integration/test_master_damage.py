"""A real master over a damaged database, or in a directory that is no place for one: what it says, and that readers go
on."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf.message import Message

from kvstore.core.errors import ReadOnly
from kvstore.master.main import DATABASE_DIRECTORY
from kvstore.master.storage.db import Cf, RocksDb
from kvstore.pb import common_pb2 as c
from kvstore.pb import master_pb2 as m
from kvstore.rpc import methods
from tests.integration.test_master_process import fetch, refused, running
from tests.support import damage
from tests.support.name_load import BOOT, NODE, VOLUME, WAIT_S, lookup_all, publish_one, publish_until, register
from tests.support.small_fs import run, small_ext4


@pytest.fixture(autouse=True, scope="module")
def _nobody_dies_of_a_busy_machine() -> Iterator[None]:
    """The worker here sends no heartbeats, and the files of a dead one are hidden."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_MASTER__DEAD_TICKS", "3600")
        yield


FILES = 400


async def stopped_store(data: Path) -> list[str]:
    """Paths of the files of a store whose master has been stopped, with all of it in tables."""
    paths = [f"d/{i}" for i in range(FILES)]
    async with running(data) as (process, link):
        await register(link)
        await asyncio.gather(*(publish_one(link, path, i + 1) for i, path in enumerate(paths)))
        assert await process.stop() == 0
    RocksDb(data / DATABASE_DIRECTORY).close()
    return paths


def table_of_the_journal(database: Path) -> Path:
    """Reading files needs none of its rows."""
    db = RocksDb(database)
    [*_, (last, _)] = db.scan(Cf.JOURNAL, b"", None, 100_000)
    tables = [file["name"] for file in db._db.live_files() if file["end_key"] == last and file["num_entries"] >= FILES]
    db.close()
    return database / str(tables[0]).lstrip("/")


async def test_a_damaged_table_stops_mutations_and_no_reader(tmp_path: Path) -> None:
    paths = await stopped_store(tmp_path)
    table = table_of_the_journal(tmp_path / DATABASE_DIRECTORY)
    damage.flip(table, table.stat().st_size // 2)
    async with running(tmp_path) as (process, link):
        line = (await publish_until(link, "new", {}, ReadOnly)).message
        assert "column journal" in line
        assert table.name in line
        assert "kvstore master --rebuild" in line
        mutations: list[tuple[methods.Method[Any, Any], Message]] = [
            (methods.MKDIR, m.MkdirRequest(paths=["x"])),
            (methods.REMOVE, m.RemoveRequest(names=[m.RemoveName(path=paths[0])])),
            (methods.RENAME, m.RenameRequest(names=[m.RenameName(from_path=paths[0], to_path="x")])),
            (methods.SET_POLICY, m.SetPolicyRequest(path="d", ttl_s=5)),
        ]
        for method, request in mutations:
            with pytest.raises(ReadOnly, match=table.name):
                await link.call(method, request, WAIT_S)
        beat = m.HeartbeatRequest(node=NODE, boot=BOOT, volumes=[c.Volume(id=VOLUME, tier="ssd")])
        await link.call(methods.HEARTBEAT, beat, WAIT_S)
        assert len(await lookup_all(link, paths)) == FILES
        assert (await fetch(process.http, "/healthz"))[0] == 200
        assert "kvstore_master_damaged 1.0" in (await fetch(process.http, "/metrics"))[1]
        assert (await fetch(process.http, "/readyz"))[0] == 200, "readers go on"
        await register(link)
        assert table.name in (await link.call(methods.CLUSTER_MAP, m.ClusterMapRequest(), WAIT_S)).notice
        process.process.terminate()
        _, said = await asyncio.wait_for(process.process.communicate(), WAIT_S)
        assert process.process.returncode == 0
        assert said.count(b"changes nothing any more") == 1


@pytest.mark.parametrize("pattern", ["*.sst", "MANIFEST-*", "CURRENT", "*.log"])
async def test_a_missing_file_is_one_line_and_an_exit_code(tmp_path: Path, pattern: str) -> None:
    async with running(tmp_path) as (process, link):
        await register(link)
        await publish_one(link, "x", 1)
        await process.kill()
    if pattern == "*.sst":
        RocksDb(tmp_path / DATABASE_DIRECTORY).close()
    file = max((tmp_path / DATABASE_DIRECTORY).glob(pattern), key=lambda path: path.stat().st_size)
    file.unlink()
    code, said = await refused(tmp_path)
    assert (code, said.count("\n")) == (9, 1), said
    assert file.name.partition("-")[0] in said
    assert "restore the directory from a backup" in said


async def test_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_MASTER__FREE_RESERVE", "1MiB")
    with small_ext4(tmp_path) as drive:
        run("mount", "-o", "remount,ro", str(drive))
        code, said = await refused(drive / "data")
        assert (code, said.count("\n")) == (7, 1), said
        assert "Read-only file system" in said
        run("mount", "-o", "remount,rw", str(drive))
        await stopped_store(drive / "data")
        run("mount", "-o", "remount,ro", str(drive))
        code, said = await refused(drive / "data")
        assert (code, said.count("\n")) == (7, 1), said
        assert "Read-only file system" in said


NOT_ALMIGHTY: Final = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
"""Root for whom the permissions of files hold as well."""


@pytest.mark.parametrize("mode", [0o000, 0o555, 0o700])
async def test_a_directory_of_somebody_else(tmp_path: Path, mode: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("to give a directory away needs root")
    await stopped_store(tmp_path / "data")
    for path in (*tmp_path.rglob("*"), tmp_path / "data"):
        os.chown(path, 65534, 65534)
    for directory in (tmp_path / "data", tmp_path / "data" / DATABASE_DIRECTORY):
        directory.chmod(mode)
    arguments = ["master", "--listen", "127.0.0.1:0", "--http", "", "--data", str(tmp_path / "data")]
    process = await asyncio.create_subprocess_exec(
        *NOT_ALMIGHTY, sys.executable, "-m", "kvstore", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert (process.returncode, said.count(b"\n")) == (7, 1), said
    assert b"Permission denied; user 0 must be able to read and write" in said
