"""fio's own verification: every block that it wrote is read again and its checksum compared, by descriptor and then by
name on another mount.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from kvstore.core.hashing import BlockHasher
from kvstore.core.limits import GIB, MIB
from kvstore.core.types import Address
from tests.fuse.calls import error_of
from tests.support.child import Hung, in_child
from tests.support.modes import MODES, Pair, mounted_pair

TIMEOUT_S: Final = 120
COMMON: Final = (
    "--ioengine=psync", "--fallocate=none", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0",
    "--group_reporting", "--thread", "--output-format=json",
)  # fmt: skip


@pytest.fixture(scope="module", params=MODES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    settings = '[client]\nmetadata_ttl = "0s"\n'
    with mounted_pair(tmp_path_factory.mktemp("fio"), request.param, capacity="4GiB", settings_b=settings) as pair:
        yield pair


class Load(NamedTuple):
    """`jobs` at a time, each with a file of `size` bytes, or all in one file, in pieces of `block`."""

    order: str
    direct: bool
    jobs: int
    size: int
    block: int
    one_file: bool = False

    @property
    def options(self) -> list[str]:
        options = [f"--bs={self.block}", f"--size={self.size}", f"--numjobs={self.jobs}", f"--direct={self.direct:d}"]
        if self.one_file:
            return [*options, "--filename=shared", f"--offset_increment={self.size}"]
        return [*options, "--filename_format=$jobnum"]

    @property
    def label(self) -> str:
        one_file = "-one-file" if self.one_file else ""
        return f"{self.order}-{'direct' if self.direct else 'buffered'}-{self.jobs}x{self.block}{one_file}"


LOADS: Final = [
    *(
        Load(order, direct, jobs, total // jobs, block)
        for direct, jobs, (order, block, total) in itertools.product(
            (False, True), (1, 8), (("write", MIB, 48 * MIB), ("randwrite", 16 * 1024, 12 * MIB))
        )
    ),
    Load("randwrite", direct=False, jobs=4, size=100 * 20 * 1024, block=20 * 1024, one_file=True),
]


def fio(directory: Path, order: str, *options: str) -> list[dict[str, Any]]:
    """Run it to its end; the results of its jobs. Raises AssertionError with its words when anything is wrong."""
    command = ["fio", "--name=job", f"--directory={directory}", f"--rw={order}", *COMMON, *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory.parent,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise Hung(f"{' '.join(command)} hangs") from None
    assert process.returncode == 0, output
    jobs: list[dict[str, Any]] = json.loads(output[output.index("{") :])["jobs"]
    return jobs


def verify(directory: Path, *options: str) -> int:
    """Read all and compare. Returns the bytes that were read."""
    return sum(job["read"]["io_bytes"] for job in fio(directory, "read", *options))


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.label)
def test_what_fio_wrote_is_there(pair: Pair, load: Load) -> None:
    """Once by the descriptors that wrote it, then by new ones here and on the other mount."""
    in_child(os.mkdir, pair.a / load.label)
    size = load.size * load.jobs
    (job,) = fio(pair.a / load.label, load.order, *load.options)
    assert (job["write"]["io_bytes"], job["read"]["io_bytes"]) == (size, size)
    for mount in (pair.a, pair.b):
        assert verify(mount / load.label, *load.options) == size


@pytest.mark.slow
def test_a_file_as_long_as_a_block_may_be(pair: Pair) -> None:
    """1 GiB: one block, whole on both mounts."""
    options = (f"--size={GIB}", "--bs=1M", "--do_verify=0")
    fio(pair.a.path, "write", "--filename=big.tmp", *options)
    in_child(os.rename, pair.a / "big.tmp", pair.a / "big")
    blocks = [path for path in pair.cluster.workers[0].block_files if Address.parse(path.name).length_bytes == GIB]
    assert [hash_of(path) for path in blocks] == [Address.parse(path.name).hash for path in blocks]
    assert len(blocks) == 1
    for mount in (pair.a, pair.b):
        assert verify(mount.path, "--filename=big", *options) == GIB
    in_child(os.unlink, pair.a / "big")


def hash_of(path: Path) -> int:
    hasher = BlockHasher()
    with path.open("rb") as file:
        while data := file.read(16 * MIB):
            hasher.update(data)
    return hasher.digest()


@pytest.mark.parametrize("name", ["ordinary", "temporary.tmp"])
def test_a_longer_file_is_refused(pair: Pair, name: str) -> None:
    """At the write, or, where the kernel writes by itself, at the latest at the close. Nothing of it is published."""

    def work() -> None:
        path = pair.a / name
        fd = os.open(path, os.O_CREAT | os.O_WRONLY)
        assert error_of(lambda: os.ftruncate(fd, GIB + 1)) == "EFBIG"
        errors = [error_of(lambda: os.pwrite(fd, b"x", GIB)), error_of(lambda: os.close(fd))]
        assert errors == ["EFBIG", "ok"] or (pair.mode == "passthrough" and errors == ["ok", "EFBIG"])
        assert path.read_bytes() == b""
        path.unlink()

    in_child(work)
