"""Clients used before a fork: the child's `Client` works on in a session of its own, `AsyncClient` refuses to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, clean_environment

SCRIPT = """
import asyncio, json, multiprocessing, os, sys
from kvstore import AsyncClient, Client, Unavailable

url, socket = sys.argv[1:]

def in_child(answers, client, session):
    try:
        got = client.get("v")
        client.put("of-child", b"child" * 50_000)
        answers.put([got.decode(), client.session != session, client.get("of-child") == b"child" * 50_000])
    except BaseException as error:
        answers.put([repr(error), False, False])

def blocking(local):
    with Client(url, worker_socket=socket if local else "") as client:
        client.put("v", b"of the parent")
        client.get_many(["v", "v"])
        context = multiprocessing.get_context("fork")
        answers, results = context.Queue(), []
        for _ in range(4):
            child = context.Process(target=in_child, args=(answers, client, client.session))
            child.start()
            results.append(answers.get(timeout=20))
            child.join(20)
            results[-1].append(child.exitcode)
        results.append(client.get("v").decode())
        return results

async def in_loop():
    async with AsyncClient(url, worker_socket=socket) as client:
        await client.put("v", b"of the parent")
        readable, writable = os.pipe()
        if os.fork() == 0:
            try:
                client._parts.check_usable()
                os.write(writable, b"no error")
            except Unavailable as error:
                os.write(writable, str(error).encode())
            os._exit(0)
        os.close(writable)
        text = os.read(readable, 1000).decode()
        os.wait()
        return text

print(json.dumps([blocking(True), blocking(False), asyncio.run(in_loop())]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Forked from a process of its own: a test runner with its threads is no place to fork."""
    root: Path = tmp_path_factory.mktemp("cluster")
    with Cluster(root, workers=1) as cluster:
        command = [sys.executable, "-c", SCRIPT, cluster.url, cluster.workers[0].socket]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env=clean_environment() | {"PYTHONPATH": os.getcwd()},
        )
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("at", [0, 1], ids=["local worker", "no local worker"])
def test_the_child_of_a_fork_works_on_with_a_session_of_its_own(answers: list[object], at: int) -> None:
    assert answers[at] == [["of the parent", True, True, 0]] * 4 + ["of the parent"]


def test_an_async_client_says_that_it_was_forked(answers: list[object]) -> None:
    assert "before a fork" in str(answers[2])
