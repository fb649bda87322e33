"""Paths and names. One spelling: a relative path is ``a/b/c``, the base itself is ``""``."""

from __future__ import annotations

from kvstore.core.errors import InvalidRequest, NameTooLong
from kvstore.core.limits import MAX_NAME_BYTES, MAX_PATH_BYTES, MAX_PATH_PARTS


def check_name(name: str) -> str:
    """One component. Raises InvalidRequest or NameTooLong."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise InvalidRequest(f"{name!r} is not a name: it must not be empty, '.', '..', or hold '/' or NUL")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name!a} is not a name: it is not valid UTF-8") from None
    if size > MAX_NAME_BYTES:
        raise NameTooLong(f"a name of {size} bytes is too long; at most {MAX_NAME_BYTES}")
    return name


def split(path: str) -> tuple[str, ...]:
    """``/a/b//c/`` and ``a/b/c`` → ``("a", "b", "c")``; ``""`` and ``/`` → ``()``.

    Raises InvalidRequest for ``.``, ``..`` and NUL, NameTooLong beyond the limits.
    """
    if len(path) > MAX_PATH_BYTES:  # characters: a cheap bound before the exact one
        raise NameTooLong(f"a path of {len(path)} characters is too long; at most {MAX_PATH_BYTES} bytes")
    parts = tuple(check_name(p) for p in path.split("/") if p)
    if len(path.encode()) > MAX_PATH_BYTES or len(parts) > MAX_PATH_PARTS:
        raise NameTooLong(f"a path has at most {MAX_PATH_BYTES} bytes and {MAX_PATH_PARTS} parts")
    return parts


def normalize(path: str) -> str:
    return "/".join(split(path))


def join(base: str, path: str) -> str:
    return "/".join((*split(base), *split(path)))
