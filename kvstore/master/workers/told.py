"""What workers tell the master of themselves, as plain values, and whether it makes sense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore.core.errors import InvalidRequest
from kvstore.core.told import TierCounters, VolumeState, WorkerCounters
from kvstore.core.types import TIERS, U63_MAX, Seen
from kvstore.master.namespace.policies import MAX_POLICIES
from kvstore.master.namespace.quotas import Held

MAX_VOLUMES_PER_NODE = 256
MAX_FENCES = 1024
"""Boots that one worker may still have unpublished blocks of."""
MAX_SEEN = MAX_VOLUMES_PER_NODE
MAX_TEXT = 255
"""Characters of a node id or an endpoint."""


class Registration(NamedTuple):
    node: str
    boot: int
    endpoint: str
    http: str
    bulk: str
    cluster: str
    """"" = belongs to none yet."""
    sequence: int
    """The highest durable one that it has seen."""
    volumes: Sequence[VolumeState]
    version: str
    fences: Mapping[int, int]
    seen: Sequence[Seen] = ()
    """Where in which history each of its volumes was last; none from a worker that never met an incarnation."""
    minted: int = 0
    """The next counter of its boot."""


class Beat(NamedTuple):
    node: str
    boot: int
    volumes: Sequence[VolumeState]
    counters: WorkerCounters
    blocks: int
    leaving: bool = False
    """It stops now: dead at once, not after dead_ticks."""
    tiers: Sequence[TierCounters] = ()
    policies: Mapping[int, Held] = {}
    """Its owned blocks, by the policy that each counts for."""
    policies_version: int = 0
    """Of the table of policies that it has."""


def check_registration(new: Registration) -> None:
    """Raises InvalidRequest."""
    for what, text in (("node id", new.node), ("endpoint", new.endpoint)):
        if not text or len(text) > MAX_TEXT or not text.isprintable():
            raise InvalidRequest(f"{text[:MAX_TEXT]!r} is not a {what}: 1 to {MAX_TEXT} printable characters")
    for what, text in (("HTTP address", new.http), ("bulk address", new.bulk), ("version", new.version)):
        if len(text) > MAX_TEXT or not text.isprintable():
            raise InvalidRequest(f"{text[:MAX_TEXT]!r} is no {what}: at most {MAX_TEXT} printable characters")
    if not new.boot:
        raise InvalidRequest("a boot of 0 is not random")
    check_volumes(new.volumes)
    if len(new.seen) > MAX_SEEN:
        raise InvalidRequest(f"{len(new.seen)} points of histories are too many; at most {MAX_SEEN}")
    if len(new.fences) > MAX_FENCES:
        raise InvalidRequest(f"{len(new.fences)} fences are too many; at most {MAX_FENCES}")


def check_beat(beat: Beat) -> None:
    """Raises InvalidRequest."""
    check_volumes(beat.volumes)
    if len(beat.policies) > 2 * MAX_POLICIES:  # those too that were taken away a moment ago
        raise InvalidRequest(f"bytes of {len(beat.policies)} policies are too many; at most {2 * MAX_POLICIES}")


def check_volumes(volumes: Sequence[VolumeState]) -> None:
    """Raises InvalidRequest."""
    if len(volumes) > MAX_VOLUMES_PER_NODE:
        raise InvalidRequest(f"{len(volumes)} volumes are too many; at most {MAX_VOLUMES_PER_NODE}")
    if len({v.id for v in volumes}) != len(volumes):
        raise InvalidRequest("a volume is listed twice")
    for volume in volumes:
        if not volume.id or volume.tier not in TIERS:
            raise InvalidRequest(f"volume {volume.id:016x} of tier {volume.tier!r}: tiers are {', '.join(TIERS)}")
        if max(volume.capacity_bytes, volume.used_bytes, volume.free_bytes) > U63_MAX:
            raise InvalidRequest(f"volume {volume.id:016x}: sizes are out of range")
