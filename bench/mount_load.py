"""What `bench.mount` does to each directory, in a process of its own: one that hangs is left behind, and its CPU time
is the client's.

    python -m bench.mount_load '{"kind": "files", "directory": …}'

Writes one JSON object to stdout: phase → `Sample`. Everything happens in a fresh directory below the given one, under
fresh names (on ext4 a rename over an existing file flushes its data, which would flatter a mount).
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from bench import cpu

T = TypeVar("T")
STEPS: Final = ("create", "write", "close", "rename")
STAMP: Final = struct.Struct("<Q")
SMALL: Final = b"x" * 4096
TTL_S: Final = 1.0
"""`client.metadata_ttl`: how long what was asked is believed."""
CACHED_PASSES: Final = 3


class Sample(NamedTuple):
    """One phase.

    amount   bytes or calls
    cpu_s    role → CPU seconds that passed meanwhile
    steps_s  of a write: system call → mean seconds
    """

    seconds: float
    amount: int
    cpu_s: dict[str, float]
    steps_s: dict[str, float]

    @property
    def rate(self) -> float:
        """Per second."""
        return self.amount / self.seconds


Samples = dict[str, Sample]


class Load(NamedTuple):
    """`kind`: "files" (whole files of `size_bytes`) or "small" (calls on files of 4 KiB). `count`: files or names.
    `scratch`: a plain directory on the same disk.
    """

    kind: str
    directory: str
    count: int
    pids: dict[str, list[int]]
    size_bytes: int = 0
    at_a_time: int = 1
    scratch: str = ""


class Buffers(NamedTuple):
    """Of one thread: what it writes, and what it reads into."""

    source: bytearray
    target: bytearray


class Files:
    """Whole files: written as LMCache does (temporary name, rename), read twice. Each has its number at both ends."""

    def __init__(self, root: Path, load: Load) -> None:
        self._root, self._load = root, load
        self._buffers: queue.SimpleQueue[Buffers] = queue.SimpleQueue()
        for _ in range(load.at_a_time):
            data = os.urandom(load.size_bytes)
            self._buffers.put(Buffers(bytearray(data), bytearray(data)))

    def run(self) -> Samples:
        amount = self._load.count * self._load.size_bytes
        self._warm_memory(3 * amount)
        with ThreadPoolExecutor(self._load.at_a_time) as pool:
            steps, written = measured(self._load, amount, lambda: self._each(pool, self._write))
            means = {step: sum(times) / len(times) for step, times in zip(STEPS, zip(*steps, strict=True), strict=True)}
            samples = {"write": written._replace(steps_s=means)}
            for phase in ("read, first", "read, again"):
                _, samples[phase] = measured(self._load, amount, lambda: self._each(pool, self._read))
        return samples

    def _warm_memory(self, size_bytes: int) -> None:
        """Fill the page cache and empty it again: the pages freed last are taken first. In a virtual machine one that
        the host must supply costs ten times the copy into it (14 MiB in 50 ms instead of 4): whoever is measured first
        would pay for all. Anonymous memory does not do it, only a file on the disk itself.
        """
        data = bytes(self._load.size_bytes)
        with tempfile.TemporaryFile(dir=self._load.scratch) as file:
            for _ in range(0, size_bytes, len(data)):
                file.write(data)

    def _each(self, pool: ThreadPoolExecutor, work: Callable[[int], T]) -> list[T]:
        numbers = range(self._load.count)
        return list(pool.map(work, numbers) if self._load.at_a_time > 1 else map(work, numbers))

    def _write(self, number: int) -> tuple[float, ...]:
        """Seconds of each step."""
        buffers, name = self._buffers.get(), self._root / f"k{number}"
        for at in (0, self._load.size_bytes - STAMP.size):
            STAMP.pack_into(buffers.source, at, number)
        times = [time.perf_counter()]
        fd = os.open(f"{name}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        times.append(time.perf_counter())
        rest = memoryview(buffers.source)
        while rest:
            rest = rest[os.write(fd, rest) :]
        times.append(time.perf_counter())
        os.close(fd)
        times.append(time.perf_counter())
        os.rename(f"{name}.tmp", f"{name}.data")
        times.append(time.perf_counter())
        self._buffers.put(buffers)
        return tuple(after - before for before, after in itertools.pairwise(times))

    def _read(self, number: int) -> None:
        buffers, name = self._buffers.get(), f"{self._root}/k{number}.data"
        fd = os.open(name, os.O_RDONLY)
        os.fstat(fd)
        rest = memoryview(buffers.target)
        while rest:
            count = os.readv(fd, [rest])
            if count == 0:
                raise SystemExit(f"{name}: ended {len(rest)} bytes too early")
            rest = rest[count:]
        os.close(fd)
        ends = [STAMP.unpack_from(buffers.target, at)[0] for at in (0, self._load.size_bytes - STAMP.size)]
        if ends != [number, number]:
            raise SystemExit(f"{name}: wrong bytes came back: {ends}")
        self._buffers.put(buffers)


class SmallCalls:
    """Look-ups of names that are there and that are not, and the life of small files."""

    def __init__(self, root: Path, load: Load) -> None:
        self._root, self._load = root, load

    def run(self) -> Samples:
        names = [f"{self._root}/k{i}" for i in range(self._load.count)]
        for name in names:
            Path(name).write_bytes(SMALL)
        time.sleep(TTL_S * 1.2)
        samples = {
            "stat, not cached": self._calls(os.stat, names),
            "stat, cached": self._calls(os.stat, names * CACHED_PASSES),
            "no such name": self._calls(os.path.exists, [f"{name}-not" for name in names]),
            "no such name, again": self._calls(os.path.exists, [f"{name}-not" for name in names]),
            "no such temporary name": self._calls(os.path.exists, [f"{name}.tmp" for name in names]),
            "cycle, 1 at a time": self._calls(self._cycle, [f"{name}-one" for name in names]),
        }
        with ThreadPoolExecutor(4) as pool:
            cycles = [f"{name}-four" for name in names]
            _, samples["cycle, 4 at a time"] = measured(
                self._load, len(cycles), lambda: list(pool.map(self._cycle, cycles))
            )
        return samples

    def _calls(self, call: Callable[[str], object], names: Iterable[str]) -> Sample:
        arguments = list(names)
        return measured(self._load, len(arguments), lambda: [call(name) for name in arguments])[1]

    def _cycle(self, name: str) -> None:
        """create, write, close, rename, unlink."""
        fd = os.open(f"{name}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, SMALL)
        os.close(fd)
        os.rename(f"{name}.tmp", name)
        os.unlink(name)


def measured(load: Load, amount: int, work: Callable[[], T]) -> tuple[T, Sample]:
    before, started = cpu.read(load.pids), time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    return result, Sample(seconds, amount, cpu.since(before, load.pids), {})


def run(load: Load) -> Samples:
    root = Path(load.directory) / f"bench-{time.time_ns()}"
    root.mkdir()
    samples = (Files if load.kind == "files" else SmallCalls)(root, load).run()
    shutil.rmtree(root)
    return samples


def main() -> None:
    fields: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(run(Load(**fields))))


if __name__ == "__main__":
    main()
