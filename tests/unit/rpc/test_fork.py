"""What a forked child inherits of links must not hang it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.cluster import clean_environment

SCRIPT = """
import asyncio, faulthandler, gc, os, sys

from kvstore.core.errors import KvError
from kvstore.pb import master_pb2 as m
from kvstore.rpc import methods
from kvstore.rpc.link import AsyncLink
from kvstore.rpc.metadata import Caller

async def main():
    link = AsyncLink("127.0.0.1:1", Caller())
    try:
        await link.call(methods.LOOKUP, m.LookupRequest(), 5.0)
    except KvError:
        pass
    if os.fork() == 0:
        faulthandler.dump_traceback_later(20, exit=True)
        del link
        gc.collect()
        if sys.argv[1] == "exits":
            sys.exit(0)
        os._exit(0)
    child = os.wait()[1]
    try:
        await link.call(methods.LOOKUP, m.LookupRequest(), 5.0)
    except KvError as error:
        print("child", child, "parent", type(error).__name__)

asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["drops it", "exits"])
def test_a_child_that_drops_the_last_link_of_its_parent_goes_on(end: str) -> None:
    """Of a process of its own: a test runner with its threads is no place to fork."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, end],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment() | {"PYTHONPATH": os.getcwd()},
    )
    assert done.stdout == "child 0 parent Unavailable\n", done.stderr
