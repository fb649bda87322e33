"""A network of its own for each node of the store: namespaces on one bridge, broken with iptables and tc.

with Network(["master", "node-0"]) as network:
    network.command("node-0", ["program"])  # how to run a program there
    with network.loss("node-0", 0.3): …
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

HERE: Final = "here"
"""The name of this process's own end of the bridge: clients without a node of their own are here."""
_NAMESPACES: Final = Path("/run/netns")
_PREFIX: Final = "kvc"
"""Of all names, followed by our pid: who finds such a thing knows whose it is."""
_COMMAND_TIMEOUT_S: Final = 10.0


class NoNetwork(RuntimeError):
    """Namespaces cannot be had here; says why."""


class Network:
    """`nodes` get addresses on a network of 254 (RFC 2544's range for tests, so that it is nobody's)."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = list(nodes)
        self._mark = f"{_PREFIX}{os.getpid():x}"
        self._bridge = f"{self._mark}b"
        self._subnet = f"198.{18 + (os.getpid() >> 8 & 1)}.{os.getpid() & 255}"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            remove_leftovers()
            self._build()
        except (NoNetwork, OSError) as error:
            self._stack.close()
            raise NoNetwork(
                f"no network namespaces: {error}; it takes root (CAP_NET_ADMIN, CAP_SYS_ADMIN), iproute2, iptables"
            ) from None
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def address(self, node: str) -> str:
        return f"{self._subnet}.{1 if node == HERE else self._nodes.index(node) + 10}"

    def command(self, node: str, program: Sequence[str]) -> list[str]:
        """`program` in the node's network; everything else (mounts, pids) stays as it is."""
        return list(program) if node == HERE else ["nsenter", f"--net={_NAMESPACES / self._name(node)}", *program]

    @contextmanager
    def loss(self, node: str, share: float) -> Iterator[None]:
        """This share of the packets that reach the node is lost."""
        with self._rule(node, "INPUT", "-m", "statistic", "--mode", "random", "--probability", f"{share:.3f}"):
            yield

    @contextmanager
    def deaf(self, node: str, to: Sequence[str]) -> Iterator[None]:
        """The node does not hear these; they hear it."""
        with ExitStack() as stack:
            for other in to:
                stack.enter_context(self._rule(node, "INPUT", "-s", self.address(other)))
            yield

    @contextmanager
    def parted(self, node: str, to: Sequence[str]) -> Iterator[None]:
        """The node and these do not hear each other."""
        with self.deaf(node, to), ExitStack() as stack:
            for other in to:
                stack.enter_context(self._rule(node, "OUTPUT", "-d", self.address(other)))
            yield

    @contextmanager
    def rate(self, node: str, mbit: int) -> Iterator[None]:
        """What the node sends leaves it at this rate."""
        queue = (
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            f"{mbit}mbit",
            "burst",
            "64kb",
            "latency",
            "100ms",
        )
        _run(*self.command(node, ["tc", *queue]))
        try:
            yield
        finally:
            _run(*self.command(node, ["tc", "qdisc", "del", "dev", "eth0", "root"]))

    @contextmanager
    def _rule(self, node: str, chain: str, *match: str) -> Iterator[None]:
        """Packets that match are dropped, and nobody is told."""
        _run(*self.command(node, ["iptables", "-w", "-A", chain, *match, "-j", "DROP"]))
        try:
            yield
        finally:
            _run(*self.command(node, ["iptables", "-w", "-D", chain, *match, "-j", "DROP"]))

    def _name(self, node: str) -> str:
        return f"{self._mark}-{node}"

    def _build(self) -> None:
        self._stack.callback(_remove, self._mark)
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "address", "add", f"{self.address(HERE)}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for number, node in enumerate(self._nodes):
            self._add(node, f"{self._mark}v{number}")

    def _add(self, node: str, outer: str) -> None:
        name = self._name(node)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", outer, "master", self._bridge, "up")
        _run("ip", "-n", name, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")


def remove_leftovers() -> None:
    """Networks of runs that were killed with -9."""
    names = {path.name.partition("-")[0] for path in _NAMESPACES.glob(f"{_PREFIX}*-*")}
    for name in names:
        try:
            pid = int(name.removeprefix(_PREFIX), 16)
        except ValueError:
            continue
        if not Path(f"/proc/{pid}").exists():
            _remove(name)


def _remove(mark: str) -> None:
    """All of one run. Links first, since those in a namespace go some time after it."""
    for path in Path("/sys/class/net").glob(f"{mark}*"):
        _run("ip", "link", "delete", path.name)
    for path in _NAMESPACES.glob(f"{mark}-*"):
        _run("ip", "netns", "delete", path.name)


def _run(*command: str) -> None:
    """Raises NoNetwork with what the command said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise NoNetwork(f"{command[0]} is missing") from None
    if done.returncode:
        raise NoNetwork(f"{' '.join(command)}: {done.stderr.strip()}")
