"""The faults are real: each does what it says, and is over when it is over."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.core.types import Address, BlockId
from kvstore.pagecache import Residency
from tests.chaos import disks
from tests.chaos.net import HERE, Network
from tests.chaos.proxy import Proxy

SIZE_BYTES = 3 << 20


# Disks.


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """With two blocks that are resident and have names of the right form."""
    for counter in range(2):
        name = Address(BlockId(7, counter), SIZE_BYTES, 1).file_name
        path = tmp_path / "volume" / "blocks" / "00" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(SIZE_BYTES))
    return tmp_path / "volume"


@pytest.mark.parametrize("how", disks.DAMAGES)
def test_damaged_blocks_are_other_files_out_of_memory(volume: Path, how: str) -> None:
    before = {path: path.read_bytes() for path in disks.blocks(volume)}
    with min(before).open("rb") as held:
        assert disks.damage(volume, how, random.Random(0)) == 2
        held.seek(0)
        assert held.read() == before[min(before)], "who has it open goes on with it"
    for path, content in before.items():
        with path.open("rb") as file:
            assert not Residency().is_resident(file.fileno(), 0, max(1, os.fstat(file.fileno()).st_size))
        assert path.read_bytes() != content
    assert list(volume.parent.iterdir()) == [volume], "nothing beside it is left"


def test_swapped_blocks_have_each_others_bytes(volume: Path) -> None:
    before = {path.name: path.read_bytes() for path in disks.blocks(volume)}
    assert disks.swap(volume, random.Random(0)) == 2
    after = {path.name: path.read_bytes() for path in disks.blocks(volume)}
    assert list(after.values()) == list(reversed(before.values()))


def test_without_blocks_nothing_is_done(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    with pytest.raises(disks.NotDone):
        disks.damage(tmp_path, "flip", random.Random(0))
    with pytest.raises(disks.NotDone):
        disks.swap(tmp_path, random.Random(0))


# Network.

ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("listening", flush=True)
    while True:
        with server.accept()[0] as one:
            while data := one.recv(65536):
                one.sendall(data)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    """With an echo at port 7000 of node "one"; one of its bytes comes back."""
    with Network(["one", "two"]) as made:
        command = made.command("one", [sys.executable, "-c", ECHO, made.address("one")])
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            try:
                assert server.stdout.readline() == b"listening\n"
                yield made
            finally:
                server.kill()


def echoes(network: Network, node: str = HERE, timeout_s: float = 0.5) -> bool:
    """Whether a byte from the node comes back."""
    code = (
        "import socket, sys\n"
        f"one = socket.create_connection(({network.address('one')!r}, 7000), {timeout_s})\n"
        "one.sendall(b'x'); assert one.recv(1) == b'x'"
    )
    done = subprocess.run(
        network.command(node, [sys.executable, "-c", code]), capture_output=True, timeout=20, check=False
    )
    return done.returncode == 0


def test_partitions_are_of_those_named_and_end(network: Network) -> None:
    assert echoes(network)
    with network.parted("one", [HERE]):
        assert not echoes(network)
        assert echoes(network, "two")
    with network.deaf("one", ["two"]):
        assert not echoes(network, "two")
        assert echoes(network)
    assert echoes(network, "two")


def test_all_packets_lost_are_as_a_partition(network: Network) -> None:
    with network.loss("one", 1.0):
        assert not echoes(network)
    assert echoes(network)


def test_a_rate_slows_bytes_down(network: Network) -> None:
    def seconds() -> float:
        data = bytes(1 << 20)
        with socket.create_connection((network.address("one"), 7000), 20) as one:
            start_s = time.monotonic()
            sender = threading.Thread(target=one.sendall, args=(data,))
            sender.start()
            left = len(data)
            while left:
                left -= len(one.recv(1 << 16))
            sender.join()
            return time.monotonic() - start_s

    with network.rate("one", 4):
        assert seconds() > 1.0, "1 MiB at 4 Mbit/s is 2 s"
    assert seconds() < 1.0


def test_networks_of_killed_runs_are_removed() -> None:
    code = (
        "import os, signal\nfrom tests.chaos.net import Network\n"
        "made = Network(['x']).__enter__()\nprint(made._mark, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    mark = done.stdout.strip()
    assert mark
    assert list(Path("/run/netns").glob(f"{mark}-*")) != []
    with Network(["y"]):
        assert list(Path("/run/netns").glob(f"{mark}-*")) == []
        assert not Path(f"/sys/class/net/{mark}b").exists()


# The proxy.


def test_a_proxy_delays_and_loses_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()

        def echo() -> None:
            with closing(server.accept()[0]) as one:
                while data := one.recv(1 << 16):
                    one.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        with Proxy("127.0.0.1", (host, port)) as proxy, socket.create_connection(("127.0.0.1", proxy.port), 10) as one:
            sent = os.urandom(1 << 20)
            with proxy.delay(0.3):
                start_s = time.monotonic()
                threading.Thread(target=one.sendall, args=(sent,), daemon=True).start()
                got = one.recv(1)
                assert time.monotonic() - start_s >= 0.6
            while len(got) < len(sent):
                got += one.recv(1 << 16)
            assert got == sent
