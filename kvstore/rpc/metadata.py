"""What every call says about its caller: gRPC metadata, both directions of the translation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvstore.core.errors import InvalidRequest, Unsupported
from kvstore.core.types import U64_MAX

PROTOCOL_VERSION = 1


class Caller(NamedTuple):
    """Who calls. Everything may be unknown ("" or 0), but the version."""

    session: int = 0
    node: str = ""
    """Node on which the caller runs, when it has a local worker."""
    cluster: str = ""
    request: str = ""
    """Request id for logs."""

    def to_metadata(self) -> tuple[tuple[str, str], ...]:
        pairs = [("kvstore-protocol", str(PROTOCOL_VERSION)), ("kvstore-session", f"{self.session:016x}")]
        optional = (("kvstore-node", self.node), ("kvstore-cluster", self.cluster), ("kvstore-request", self.request))
        return (*pairs, *((k, v) for k, v in optional if v))

    @classmethod
    def from_metadata(cls, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Raises Unsupported for another protocol version. A call without our metadata is a nameless caller."""
        known = {k: v for k, v in metadata if isinstance(v, str)}
        version = known.get("kvstore-protocol", str(PROTOCOL_VERSION))
        if version != str(PROTOCOL_VERSION):
            raise Unsupported(f"protocol version {version} is not spoken here (this side speaks {PROTOCOL_VERSION})")
        try:
            session = int(known.get("kvstore-session", "0"), 16)
        except ValueError:
            raise InvalidRequest("metadata kvstore-session is not a hex number") from None
        if not 0 <= session <= U64_MAX:
            raise InvalidRequest("metadata kvstore-session has more than 64 bits")
        get = known.get
        return cls(session, get("kvstore-node", ""), get("kvstore-cluster", ""), get("kvstore-request", ""))
