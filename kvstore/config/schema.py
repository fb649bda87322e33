"""What the tree of structs says about itself: which keys there are, of which type, and which name was meant."""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Struct

from kvstore.config.tree import Config, Kind


class Leaf(NamedTuple):
    """One value of a tree: its dotted key (``worker.volumes[0].tier``), the kind of its text, and the value."""

    key: str
    kind: Kind | None
    value: object


@functools.cache
def fields(struct: type[Struct]) -> Mapping[str, Any]:
    """Name → type, with what `Annotated` added."""
    return typing.get_type_hints(struct, include_extras=True)


def bare(hint: Any) -> Any:
    """The type without what `Annotated` added and without its ``| None``."""
    if is_optional(hint):
        hint = next(arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def is_optional(hint: Any) -> bool:
    """Whether the key may be unset: ``T | None``."""
    return types.NoneType in typing.get_args(hint)


def kind_of(hint: Any) -> Kind | None:
    return next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Kind)), None)


def table_of(hint: Any) -> type[Struct] | None:
    """The struct that a table of this type fills; None for a value."""
    return hint if isinstance(hint, type) and issubclass(hint, Struct) else None


def rows_of(hint: Any) -> type[Struct] | None:
    """The struct that each table of a list of tables fills; None for any other type."""
    return table_of(typing.get_args(hint)[0]) if typing.get_origin(hint) is list else None


def leaves(struct: Struct, prefix: str = "") -> Iterator[Leaf]:
    """All values below a struct in the order of their declaration; an empty list of tables is one value."""
    for name, hint in fields(type(struct)).items():
        value, key = getattr(struct, name), f"{prefix}{name}"
        if isinstance(value, Struct):
            yield from leaves(value, f"{key}.")
        elif rows_of(hint) and value:
            for index, row in enumerate(value):
                yield from leaves(row, f"{key}[{index}].")
        else:
            yield Leaf(key, kind_of(hint), value)


@functools.cache
def keys() -> Mapping[str, Any]:
    """Dotted key → type of everything that an environment variable or a flag can set."""
    sections = fields(Config).items()
    return {f"{section}.{name}": hint for section, table in sections for name, hint in fields(table).items()}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def nearest_key(key: str) -> str | None:
    """The dotted key that was probably meant: a name alike in its section, or the same name elsewhere."""
    section, _, name = key.partition(".")
    near_section = nearest(section, fields(Config))
    if near_section and (near := nearest(name, fields(fields(Config)[near_section]))):
        return f"{near_section}.{near}"
    return next((known for known in _everywhere() if known.rpartition(".")[2] == name), None)


def _everywhere() -> Iterator[str]:
    """All dotted keys, those inside a list of tables too."""
    for key, hint in keys().items():
        yield key
        if (row := rows_of(hint)) is not None:
            yield from (f"{key}[0].{name}" for name in fields(row))


def choices(key: str) -> tuple[str, ...]:
    """The values that a key of literals allows; empty for any other key. Knows ``worker.volumes[0].tier`` too."""
    outer, bracket, inner = key.partition("[")
    hint = keys().get(outer)
    if bracket and (row := rows_of(hint)) is not None:
        hint = fields(row).get(inner.rpartition(".")[2])
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
