"""The mount beside a plain directory: LMCache's puts and gets, first and repeated reads, small calls.

    python bench/mount.py --mount DIR --plain DIR [--size-mib 14] [--files 8] [--rounds 3] [--threads 1]

Both directories in turn, round by round, with fresh names each time (on ext4 a rename over an existing file flushes its
data, which would flatter the mount). Put them on the same disk. Prints the median MB/s of each and their ratio.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 1 << 20
HEADER_BYTES = 28


def put(directory: Path, name: str, data: memoryview) -> None:
    """As LMCache's fs connector: temporary name, header, one write of the rest, rename."""
    temporary = directory / f"{name}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.fstat(fd)
    os.write(fd, data[:HEADER_BYTES])
    rest = data[HEADER_BYTES:]
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.close(fd)
    os.rename(temporary, directory / f"{name}.data")


def get(directory: Path, name: str, buffer: memoryview) -> None:
    """open, fstat, a read of 4 KiB, the rest."""
    fd = os.open(directory / f"{name}.data", os.O_RDONLY)
    os.fstat(fd)
    at = os.readv(fd, [buffer[:4096]])
    while at < len(buffer):
        count = os.readv(fd, [buffer[at:]])
        if count == 0:
            raise SystemExit(f"{directory / name}: ended after {at} bytes")
        at += count
    os.close(fd)


def timed(pool: ThreadPoolExecutor, work: Callable[[int], object], count: int) -> float:
    start = time.perf_counter()
    list(pool.map(work, range(count)))
    return time.perf_counter() - start


def one_round(root: Path, data: memoryview, buffers: list[memoryview], files: int) -> dict[str, float]:
    directory = root / f"bench-{time.time_ns()}"
    directory.mkdir()
    moved = files * len(data) / 1e6
    with ThreadPoolExecutor(len(buffers)) as pool:
        free = list(buffers)

        def read(i: int) -> None:
            buffer = free.pop()
            get(directory, f"k{i}", buffer)
            free.append(buffer)

        result = {"put": moved / timed(pool, lambda i: put(directory, f"k{i}", data), files)}
        result["get"] = moved / timed(pool, read, files)
        result["get again"] = moved / timed(pool, read, files)
        if free[-1] != data:
            raise SystemExit(f"{directory}: wrong bytes came back")
        result["exists, hit/s"] = 500 / timed(pool, lambda i: os.path.exists(directory / f"k{i % files}.data"), 500)
        result["exists, miss/s"] = 500 / timed(pool, lambda i: os.path.exists(directory / f"none{i}"), 500)
    shutil.rmtree(directory)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mount", type=Path, required=True)
    parser.add_argument("--plain", type=Path, required=True)
    parser.add_argument("--size-mib", type=int, default=14)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    data = memoryview(os.urandom(options.size_mib * MIB))
    buffers = [memoryview(bytearray(len(data))) for _ in range(options.threads)]
    plain, mount = [], []
    for _ in range(options.rounds):
        plain.append(one_round(options.plain, data, buffers, options.files))
        mount.append(one_round(options.mount, data, buffers, options.files))
    print(f"{'':16} {'plain':>10} {'mount':>10} {'ratio':>7}")
    for what in plain[0]:
        a, b = (statistics.median(r[what] for r in rounds) for rounds in (plain, mount))
        print(f"{what:16} {a:10.0f} {b:10.0f} {b / a:7.2f}")


if __name__ == "__main__":
    main()
