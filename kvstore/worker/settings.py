"""What a worker is told by its configuration, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Watermarks(NamedTuple):
    """Shares of a volume's capacity: above `high` its coldest blocks go until it is down to `low`."""

    high: float
    low: float


class VolumeSettings(NamedTuple):
    tier: str
    path: str
    capacity_bytes: int
    free_floor_bytes: int
    watermarks: Watermarks = Watermarks(0.95, 0.90)


class Settings(NamedTuple):
    node: str
    master: Sequence[str]
    """Endpoints of one master, tried in order."""
    listen: str
    advertise: str
    """Host under which others reach `listen`; "" = its own."""
    socket: str
    socket_mode: int
    session_grace_s: float
    full_report_s: float
    volumes: Sequence[VolumeSettings]
    http: str = ""
    """``host:port`` of metrics, told to the master."""
    accept_rollback: bool = False
    move_bytes_per_s: float = 512e6
    moves_at_a_time: int = 2
    pin_share: float = 0.5
    """Of each volume's capacity, that pinned blocks may take at most."""
    scrub_bytes_per_s: float = 0.0
    """At which blocks are read again to find damage; 0: not at all."""
    scrub_interval_s: float = 86_400.0
    """At least, between two such rounds."""
