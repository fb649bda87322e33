"""Values from the environment and from flags are text: turn them into what the key's type wants."""

from __future__ import annotations

import tomllib
import typing
from typing import Any, Final

from kvstore.config.schema import bare, is_optional, rows_of
from kvstore.core.errors import InvalidRequest

_BOOLS: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


def from_text(text: str, hint: Any, name: str) -> object:
    """The value that ``text`` stands for in a key of type ``hint``; ``name`` is for the message of `InvalidRequest`.

    Empty text unsets a key that may be unset.
    """
    if is_optional(hint) and not text:
        return None
    wanted = bare(hint)
    if wanted is bool:
        return _bool(text, name)
    if wanted is int:
        return _int(text, name)
    if wanted is float:
        return _float(text, name)
    if typing.get_origin(wanted) is list:
        return _list(text, wanted, name)
    return text


def _bool(text: str, name: str) -> bool:
    try:
        return _BOOLS[text.strip().lower()]
    except KeyError:
        raise InvalidRequest(f"{name}: {text!r} is neither true nor false") from None


def _int(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(f"{name}: {text!r} is not a whole number") from None


def _float(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"{name}: {text!r} is not a number") from None


def _list(text: str, hint: Any, name: str) -> list[Any]:
    """A TOML array; names alone may also be joined by commas."""
    if not text.lstrip().startswith("[") and rows_of(hint) is None:
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name}: not a TOML array such as {_example(hint)}: {error}") from None
    if not isinstance(value, list):
        raise InvalidRequest(f"{name}: not a TOML array such as {_example(hint)}")
    return value


def _example(hint: Any) -> str:
    return '[{tier="ssd", path="/data", capacity="200GiB"}]' if rows_of(hint) else '["a", "b"]'
