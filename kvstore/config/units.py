"""Text with a unit, as people write it in configuration, into numbers: sizes, durations, addresses, file modes.

Every parser raises `InvalidRequest` with a line that says what is wrong and what a right value looks like.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from kvstore.core.errors import InvalidRequest

_BINARY: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_DECIMAL: Final = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZES: Final[Mapping[str, int]] = {"B": 1, **_BINARY, **_DECIMAL}
# Thousandths, so that "250ms" + "0.5s" are exact before the one division at the end.
_DURATIONS_MS: Final[Mapping[str, int]] = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_NUMBER: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)")
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_IPV6: Final = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?")


class HostPort(NamedTuple):
    """Where a server listens, or is reached. An IPv6 host is kept without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_size(text: str) -> int:
    """Bytes of ``200GiB``, ``1.5 MiB``, ``10GB`` or ``0``; a unit is required otherwise."""
    return int(_scaled(text, _SIZES, "size", "200GiB or 64MiB"))


def parse_duration_s(text: str) -> float:
    """Seconds of ``10s``, ``250ms``, ``1.5m``, ``24h``, ``7d`` or ``0``; a unit is required otherwise."""
    return _scaled(text, _DURATIONS_MS, "duration", "10s, 250ms or 24h") / 1000


def _scaled(text: str, units: Mapping[str, int], noun: str, example: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r} is not a {noun}; write a number with a unit, for example {example}")
    number, unit = match.groups()
    if unit not in units and float(number) != 0:
        raise InvalidRequest(f"{text!r}: {_unit_problem(unit, units)}; write for example {example}")
    factor = units.get(unit, 1)
    return int(number) * factor if number.isdigit() else float(number) * factor


def _unit_problem(unit: str, units: Mapping[str, int]) -> str:
    near = [known for known in units if known.lower() == unit.lower()]
    if near:
        return f"the unit {unit!r} is written {near[0]!r}"
    return f"unknown unit {unit!r}" if unit else "the unit is missing"


def format_size(size_bytes: int) -> str:
    """The size for people, three significant digits: ``1.50 GiB``; whole bytes below 1 KiB."""
    for unit, factor in reversed(_BINARY.items()):
        if abs(size_bytes) >= factor:
            value = size_bytes / factor
            return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {unit}"
    return f"{size_bytes} B"


def parse_address(text: str) -> HostPort:
    """``HOST:PORT``; an IPv6 host in brackets; port 0 means that the kernel chooses."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not (_IPV6 if bracketed else _HOST).fullmatch(host):
        raise InvalidRequest(f"{text!r} is not an address; write HOST:PORT, for example 127.0.0.1:7070 or [::1]:7070")
    if not (re.fullmatch("[0-9]{1,5}", port) and int(port) <= 65535):
        raise InvalidRequest(f"{text!r}: the port must be a number from 0 to 65535")
    return HostPort(host, int(port))


def parse_host(text: str) -> str:
    """A bare host name or IP address, as others reach it; no port."""
    if not (_HOST.fullmatch(text) or _IPV6.fullmatch(text)):
        raise InvalidRequest(f"{text!r} is not a host; write a name or an IP address without a port")
    return text


def parse_url(text: str) -> str:
    """``kvstore://HOST:PORT[,HOST:PORT][/ROOT]``, returned unchanged."""
    scheme, _, rest = text.partition("://")
    if scheme != "kvstore" or not rest:
        raise InvalidRequest(f"{text!r} is not a URL of a store; write kvstore://HOST:PORT, several joined by commas")
    for address in rest.partition("/")[0].split(","):
        if parse_address(address).port == 0:
            raise InvalidRequest(f"{text!r}: port 0 cannot be called; write the master's port")
    return text


def parse_mode(text: str) -> int:
    """Permission bits of octal text such as ``0666``."""
    if not re.fullmatch(r"(0o?)?[0-7]{3}", text):
        raise InvalidRequest(f"{text!r} is not a file mode; write three octal digits, for example 0666")
    return int(text.removeprefix("0o"), 8)
