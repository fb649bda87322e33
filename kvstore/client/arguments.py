"""What callers may pass, checked before anything is sent: each function raises InvalidRequest and says what it takes.

They take anything, for that is what a caller without a type checker gives.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from kvstore.client.files import Buffer, view_of
from kvstore.client.messages import RemoveKind
from kvstore.core.errors import InvalidRequest
from kvstore.core.types import U64_MAX


def _is_not(what: str, wanted: str, given: object) -> InvalidRequest:
    return InvalidRequest(f"{what} must be {wanted}, not {type(given).__name__}")


def text(given: object, what: str) -> str:
    if not isinstance(given, str):
        raise _is_not(what, "a str", given)
    return given


def integer(given: object, what: str, most: int = 2**32 - 1) -> int:
    """From 0 to `most`."""
    if not isinstance(given, int):
        raise _is_not(what, "an int", given)
    if not 0 <= given <= most:
        raise InvalidRequest(f"{what} must be from 0 to {most}, not {given}")
    return given


def session(given: object) -> int:
    """64 bits, and not 0: that one is the worker's own."""
    number = integer(given, "session", U64_MAX)
    if not number:
        raise InvalidRequest("a session is 64 random bits, and not 0")
    return number


def paths(given: object) -> list[str]:
    """Several paths. A str is a sequence of one-letter paths only by accident."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise _is_not("paths", "a sequence of str", given)
    return list(given)


def items(given: object) -> list[tuple[str, Buffer]]:
    """The pairs of path and data of a put of many."""
    wanted = "a mapping of path to data, or pairs of them"
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise _is_not("items", wanted, given)
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidRequest(f"items must be {wanted}; one of them is {type(pair).__name__}")
    return pairs


def buffers(given: object, count: int) -> list[memoryview]:
    """Buffers to read into, one a path."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray | memoryview):
        raise _is_not("buffers", "a sequence of writable buffers", given)
    if len(given) != count:
        raise InvalidRequest(f"{count} paths for {len(given)} buffers; give one buffer a path")
    return [view_of(buffer) for buffer in given]


def local_path(given: object, what: str) -> str:
    """A path in the local file system. An int would be taken for an open file."""
    if not isinstance(given, str | os.PathLike):
        raise _is_not(what, "a local path (str or PathLike)", given)
    path = os.fspath(given)
    if "\0" in text(path, what):
        raise InvalidRequest(f"{what} must not hold NUL")
    return path


def kind(given: object) -> RemoveKind:
    try:
        return RemoveKind(given)  # type: ignore[arg-type] # it says itself what it does not take
    except ValueError:
        raise InvalidRequest(f"kind must be a RemoveKind, not {given!r}") from None
