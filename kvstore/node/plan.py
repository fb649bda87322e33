"""What runs on a node: configuration → command lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.config import Config, MountPoint
from kvstore.node.child import ChildSpec


def worker(config_file: str | None, socket: str, name: str = "worker") -> ChildSpec:
    return ChildSpec(name, ("worker", *_config(config_file)), socket=socket)


def mount(
    point: MountPoint, master: str, worker_socket: str, config_file: str | None = None, extra: Sequence[str] = ()
) -> ChildSpec:
    argv = ("mount", point.dir, "--master", master, "--worker-socket", worker_socket, "--path", point.path)
    return ChildSpec(f"mount {point.dir}", (*argv, *_config(config_file), *extra), mount=point.dir)


def master(config_file: str | None) -> ChildSpec:
    return ChildSpec("master", ("master", *_config(config_file)))


def mounts(config: Config, config_file: str | None) -> list[ChildSpec]:
    """The mounts of ``[[node.mounts]]``; all share the node's worker."""
    worker_ = config.worker
    return [mount(point, worker_.master, worker_.socket, config_file) for point in config.node.mounts]


def _config(config_file: str | None) -> tuple[str, ...]:
    return ("--config", config_file) if config_file else ()
