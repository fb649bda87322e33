"""What a value of each kind may be, and what values may not be together. Raises `InvalidRequest` naming the key."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kvstore.config.schema import leaves
from kvstore.config.tree import Config, Kind
from kvstore.config.units import parse_address, parse_duration_s, parse_host, parse_mode, parse_size, parse_url
from kvstore.core.errors import InvalidRequest

MAX_SOCKET_PATH_BYTES: Final = 107
"""``sun_path`` has 108 bytes with the closing zero."""


def check(config: Config, origins: Mapping[str, str]) -> None:
    """Check every value of the tree, then the values against each other."""
    for key, kind, value in leaves(config):
        if kind is None:
            continue
        try:
            CHECKS[kind](str(value))
        except InvalidRequest as error:
            raise InvalidRequest(f"{key}: {error.message} ({origins.get(key, 'default')})") from None
    _check_together(config)


def _check_together(config: Config) -> None:
    _distinct_ports("master", config.master.listen, config.master.http)
    _distinct_ports("worker", config.worker.listen, config.worker.http)
    _distinct_paths("worker.volumes", "path", (volume.path for volume in config.worker.volumes))
    _distinct_paths("node.mounts", "dir", (mount.dir for mount in config.node.mounts))
    for index, volume in enumerate(config.worker.volumes):
        if volume.low_watermark > volume.high_watermark:
            raise InvalidRequest(
                f"worker.volumes[{index}].low_watermark: {volume.low_watermark:g} is above high_watermark "
                f"({volume.high_watermark:g})"
            )
    for index, pattern in enumerate(config.mount.temp_patterns):
        if not pattern or pattern.startswith("/"):
            raise InvalidRequest(f"mount.temp_patterns[{index}]: {pattern!r} must be a relative pattern like *.tmp")


def _distinct_ports(section: str, listen: str, http: str) -> None:
    if http and listen == http and parse_address(listen).port != 0:
        raise InvalidRequest(f"{section}.http: {http} is taken by {section}.listen; give each its own port")


def _distinct_paths(key: str, name: str, paths: Iterable[str]) -> None:
    seen: dict[str, int] = {}
    for index, path in enumerate(map(os.path.normpath, paths)):
        if path in seen:
            raise InvalidRequest(f"{key}[{index}].{name}: {path} stands in {key}[{seen[path]}] too; remove one")
        seen[path] = index


def require_volumes(config: Config) -> None:
    """A worker cannot run without a volume: raise `InvalidRequest` that says how to add one."""
    if not config.worker.volumes:
        raise InvalidRequest("worker.volumes: none; add [[worker.volumes]] with tier, path and capacity")


def require_mount_dir(config: Config) -> None:
    """A mount needs a directory: raise `InvalidRequest` when there is none."""
    if not config.mount.dir:
        raise InvalidRequest("mount.dir: none; name the directory to mount on")


def require_grace(config: Config) -> None:
    """What a mount was writing must outlive its hand-over (rule 11): raise `InvalidRequest` when it would not."""
    if 3 * config.mount.deadline_s > config.worker.session_grace_s:
        raise InvalidRequest(
            f"mount.deadline: {config.mount.deadline} is more than a third of worker.session_grace "
            f"({config.worker.session_grace}), after which a worker drops what the mount was writing; shorten it, or "
            "raise worker.session_grace here and on the workers"
        )


def _positive(parse: Callable[[str], float]) -> Callable[[str], None]:
    def check_positive(text: str) -> None:
        if parse(text) <= 0:
            raise InvalidRequest(f"{text!r} must be more than 0")

    return check_positive


def _optional(parse: Callable[[str], object]) -> Callable[[str], None]:
    def check_optional(text: str) -> None:
        if text:
            parse(text)

    return check_optional


def _check_path(text: str) -> None:
    # Relative paths are for tests and `kvstore up`: they start at the working directory, like any command's arguments.
    if "\0" in text:
        raise InvalidRequest(f"{text!r} must not contain a zero byte")


def _check_required_path(text: str) -> None:
    if not text:
        raise InvalidRequest("must not be empty; name a directory")
    _check_path(text)


def _check_socket(text: str) -> None:
    _check_path(text)
    if (size_bytes := len(os.fsencode(text))) > MAX_SOCKET_PATH_BYTES:
        raise InvalidRequest(f"{text!r} has {size_bytes} bytes; a socket's path takes {MAX_SOCKET_PATH_BYTES} at most")


def _check_store_path(text: str) -> None:
    if not text.startswith("/"):
        raise InvalidRequest(f"{text!r} must be an absolute path in the store, like /models/a")


def _check_name(text: str) -> None:
    if len(text) > 253 or not text.isprintable() or any(c in "/," or c.isspace() for c in text):
        raise InvalidRequest(f"{text!r} must be at most 253 printable characters without space, slash or comma")


CHECKS: Final[Mapping[Kind, Callable[[str], object]]] = {
    Kind.SIZE: parse_size,
    Kind.POSITIVE_SIZE: _positive(parse_size),
    Kind.DURATION: parse_duration_s,
    Kind.POSITIVE_DURATION: _positive(parse_duration_s),
    Kind.ADDRESS: parse_address,
    Kind.OPTIONAL_ADDRESS: _optional(parse_address),
    Kind.OPTIONAL_HOST: _optional(parse_host),
    Kind.URL: parse_url,
    Kind.MODE: parse_mode,
    Kind.OPTIONAL_MODE: _optional(parse_mode),
    Kind.NAME: _check_name,
    Kind.PATH: _check_path,
    Kind.REQUIRED_PATH: _check_required_path,
    Kind.SOCKET: _check_socket,
    Kind.STORE_PATH: _check_store_path,
}
