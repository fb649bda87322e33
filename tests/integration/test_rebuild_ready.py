"""What a master that takes names back says of itself: to probes, in its log, to clients."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from kvstore.core.errors import Unavailable
from kvstore.pb import common_pb2 as c
from kvstore.pb import master_pb2 as m
from kvstore.rpc import methods
from kvstore.rpc.link import AsyncLink
from kvstore.rpc.metadata import Caller
from tests.integration.test_master_process import BOOT, WAIT_S, fetch, lookup, registration, spawn


async def next_line(process: asyncio.subprocess.Process, pattern: str) -> re.Match[str]:
    """The first line of its log from here on that has the pattern, and the lines before it none that says ready."""
    assert process.stderr is not None
    async with asyncio.timeout(WAIT_S):
        async for line in process.stderr:
            if found := re.search(pattern, line.decode()):
                return found
            assert b"ready: " not in line
    raise AssertionError(f"the master ended, and never said {pattern!r}")


async def test_it_is_ready_when_clients_are_not_refused_any_more(tmp_path: Path) -> None:
    process = await spawn(tmp_path, "127.0.0.1:0", "--rebuild", "--rebuild-workers", "1")
    said = await next_line(process, r"listening for workers: gRPC at (\S+), HTTP at (\S+);")
    link, http = AsyncLink(said[1], Caller(session=1)), said[2]
    try:
        await next_line(process, "0 workers here.*1 workers are awaited")
        assert (await fetch(http, "/healthz"))[0] == 200
        status, why = await fetch(http, "/readyz")
        assert (status, "takes names back" in why, "0 workers here" in why) == (503, True, True)
        rows = await lookup(link, ["a", "b"])
        assert all(isinstance(row, Unavailable) and "takes names back" in row.message for row in rows), rows

        await link.call(methods.REGISTER, registration(), WAIT_S)
        address = c.Address(boot=BOOT, counter=1, length_bytes=5, hash=1)
        name = m.NotedBlock(address=address, volume=1, name=m.BlockName(path="a"), noted=m.Seen(incarnation=5))
        request = m.RecoverRequest(node="n", boot=BOOT, blocks=[name], last=True)
        assert (await link.call(methods.RECOVER, request, WAIT_S)).wanted
        await next_line(process, r"ready: gRPC at \S+, HTTP at \S+, cluster [0-9a-f]{32}")
        assert (await fetch(http, "/readyz"))[0] == 200
        [row] = await lookup(link, ["a"])
        assert not isinstance(row, Exception), row
    finally:
        await link.close()
        process.kill()
        await asyncio.wait_for(process.communicate(), WAIT_S)
