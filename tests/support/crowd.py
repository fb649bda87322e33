"""Many clients of one store, each with a connection of its own, in a process of their own.

    python -m tests.support.crowd kvstore://127.0.0.1:7070 100

Each looks a name up twice a second or so, in a large crowd less often: its own process must not be what is slow. A line
on stdin asks: it is answered with a line of JSON once every client has been served by a call that began after it
(`Answer`).
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from typing import Final, NamedTuple

from kvstore.client.aio import AsyncClient
from kvstore.core.errors import KvError

MAX_CALLS_PER_S: Final = 200.0
"""Of a process."""
MAX_CONNECTS_PER_S: Final = 50.0
"""When it begins: it is coming back that all do at once."""
PATH: Final = "warm"


class Answer(NamedTuple):
    took_s: float
    """Until the last client was served."""
    longest_call_s: float
    """Since the last question."""
    errors: dict[str, int]
    """Kind → how many since the last question."""


class Crowd:
    """The process, as the test sees it."""

    def __init__(self, url: str, clients: int) -> None:
        command = [sys.executable, "-m", "tests.support.crowd", url, str(clients)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float) -> Answer:
        """To the last `ask`. A crowd that is not served in time is killed."""
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        assert line, f"not every client was served within {timeout_s:g} s"
        return Answer(**json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Clients:
    def __init__(self, count: int) -> None:
        self.served_s = [0.0] * count
        """When the last call began that was served."""
        self.longest_s = 0.0
        self.errors: dict[str, int] = {}

    async def run(self, index: int, url: str) -> None:
        await asyncio.sleep(random.uniform(0, len(self.served_s) / MAX_CONNECTS_PER_S))
        async with AsyncClient(url, metadata_ttl_s=0) as client:
            while True:
                begin = time.monotonic()
                try:
                    await client.stat(PATH)
                    self.served_s[index] = begin
                except KvError as error:
                    self.errors[error.reason] = self.errors.get(error.reason, 0) + 1
                self.longest_s = max(self.longest_s, time.monotonic() - begin)
                await asyncio.sleep(random.uniform(0.5, 1.5) * max(0.5, len(self.served_s) / MAX_CALLS_PER_S))

    async def all_served(self) -> Answer:
        asked = time.monotonic()
        while min(self.served_s) < asked:  # noqa: ASYNC110 - nobody tells when the last one is
            await asyncio.sleep(0.01)
        answer = Answer(time.monotonic() - asked, self.longest_s, self.errors)
        self.longest_s, self.errors = 0.0, {}
        return answer


async def main(url: str, count: int) -> None:
    clients = _Clients(count)
    tasks = [asyncio.create_task(clients.run(i, url)) for i in range(count)]
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps((await clients.all_served())._asdict()), flush=True)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
