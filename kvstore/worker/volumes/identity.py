"""What a volume knows of itself, kept in its file ``identity`` (rules 4, 16).

On disk: a version byte (1), then a msgpack array of the fields below; fields are appended with defaults, never
reordered.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.core.errors import InvalidRequest, Unsupported

VERSION: Final = 1
MAX_BOOTS: Final = 64
"""Earlier boots whose blocks may still be unpublished; each is over once all its blocks have a verdict."""


class Identity(msgspec.Struct, array_like=True, frozen=True):
    """`volume` never changes; the rest is written anew at each change."""

    volume: int
    """64 random bits, drawn when the directory became a volume."""
    cluster: str = ""
    """The only cluster whose master is obeyed; "" until the first one was met."""
    sequence: int = 0
    """The highest durable sequence that master has shown: a lower one later means that it lost state."""
    rolled_back: bool = False
    """A master with a lower sequence was met: nothing is collected until an operator accepts it."""
    boots: tuple[int, ...] = ()
    """Boots of this worker that are not over, the newest last: only these go into its fences."""
    incarnation: int = 0
    """Of the start of the master that has shown `sequence`; 0: not known, it was a master of before they had one."""


def encode(identity: Identity) -> bytes:
    return bytes((VERSION,)) + msgspec.msgpack.encode(identity)


def decode(data: bytes, path: str) -> Identity:
    """Raises Unsupported for a newer version, InvalidRequest for anything that is no identity."""
    if data[:1] > bytes((VERSION,)):
        raise Unsupported(
            f"{path}: written by a newer kvstore (version {data[0]}, this one reads {VERSION}); upgrade it"
        )
    try:
        if data[:1] != bytes((VERSION,)):
            raise msgspec.DecodeError
        return msgspec.msgpack.decode(data[1:], type=Identity)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest(
            f"{path}: damaged; move the directory away (its blocks are a cache) and the worker makes a new volume"
        ) from None
