"""The system calls of a process that write and sync files or send to sockets, in their order, as strace saw them."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.cluster import wait_until

WAIT_S: Final = 30.0
_WRITES: Final = ("write", "pwrite64", "writev")
_SENDS: Final = ("sendmsg", "sendto")
_SYNCS: Final = ("fdatasync", "fsync")
_LINE: Final = re.compile(r"(\d+) +(?:(\w+)\((.*)|<\.\.\. (\w+) resumed>(.*))$", re.DOTALL)
_TEXT: Final = re.compile(r"(?:\\x[0-9a-f]{2})+")
_RESULT: Final = re.compile(r"= (-?\d+)[^=]*$")


class Call(NamedTuple):
    """`began`, `ended`: positions in the order of all beginnings and ends; `ended` is None while it runs."""

    name: str
    path: str
    """Of the file; of a socket, what strace calls it."""
    data: bytes
    """What was written or sent."""
    result: int
    began: int
    ended: int | None

    @property
    def sends(self) -> bool:
        return self.name in _SENDS or (self.name in _WRITES and not self.path.startswith("/"))

    @property
    def writes(self) -> bool:
        return self.name in _WRITES and self.path.startswith("/")

    @property
    def syncs(self) -> bool:
        return self.name in _SYNCS


class Trace:
    """Filled when the tracing has ended."""

    def __init__(self) -> None:
        self.calls: list[Call] = []


@asynccontextmanager
async def traced(pid: int, output: Path) -> AsyncIterator[Trace]:
    """All threads of a process, from now on until the end of the block."""
    calls = ",".join((*_WRITES, *_SENDS, *_SYNCS))
    options = ["-f", "-y", "-qq", "-xx", "-s", "1000000", "-e", f"trace={calls}", "-e", "signal=none"]
    tracer = await asyncio.create_subprocess_exec("strace", *options, "-o", str(output), "-p", str(pid))
    trace = Trace()
    try:
        await asyncio.to_thread(wait_until, lambda: _is_traced(pid), "strace is attached", WAIT_S)
        yield trace
    finally:
        if tracer.returncode is None:
            tracer.send_signal(signal.SIGINT)
        await asyncio.wait_for(tracer.wait(), WAIT_S)
    trace.calls = parsed(output.read_text().splitlines())


def _is_traced(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all(re.search(r"^TracerPid:\s*[1-9]", (t / "status").read_text(), re.MULTILINE) for t in threads)


def parsed(lines: list[str]) -> list[Call]:
    """Lines of ``strace -f -y -xx``, in which a call that others came into the middle of has two."""
    calls: list[Call] = []
    open_calls: dict[str, Call] = {}
    for position, line in enumerate(lines):
        match = _LINE.match(line)
        if match is None:
            continue
        thread, name, rest, resumed, tail = match.groups()
        if resumed:
            call = open_calls.pop(thread, None)
            if call is not None and call.name == resumed:
                calls.append(call._replace(result=_result(tail), ended=position))
            continue
        call = _call(name, rest, position)
        if rest.endswith("<unfinished ...>"):
            open_calls[thread] = call
        else:
            calls.append(call._replace(result=_result(rest), ended=position))
    return sorted([*calls, *open_calls.values()], key=lambda call: call.began)


def _call(name: str, rest: str, position: int) -> Call:
    path, _, arguments = rest.partition("<")[2].partition(">")
    data = b"".join(_bytes(text) for text in _TEXT.findall(arguments))
    return Call(name, _bytes(path).decode() if path.startswith("\\x") else path, data, -1, position, None)


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _result(rest: str) -> int:
    match = _RESULT.search(rest)
    return int(match[1]) if match else -1
