"""The layers: defaults < TOML file < environment < flags, merged by dotted key, each value with its origin."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from kvstore.config import schema
from kvstore.config.check import check
from kvstore.config.text import from_text
from kvstore.config.tree import Config, Kind
from kvstore.core.errors import Denied, InvalidRequest, NotFound

DEFAULT_PATH: Final = "/etc/kvstore/kvstore.toml"
MAX_FILE_BYTES: Final = 1 << 20
PREFIX: Final = "KVSTORE_"
SCHEME: Final = "kvstore://"
MASTER_FOLLOWERS: Final = ("client.master", "mount.master")
MASTER_FALLBACKS: Final = ("worker.master", "mount.master", "client.master")

Layer = dict[str, object]
"""Dotted key → value as it was written."""


class Loaded(NamedTuple):
    """A checked configuration. ``origins`` has a key for each value that is not a default."""

    config: Config
    origins: Mapping[str, str]

    def rows(self) -> list[tuple[str, object, str]]:
        """(key, value, origin) of every value, in the order of the tree."""
        return [(leaf.key, leaf.value, self.origins.get(leaf.key, "default")) for leaf in schema.leaves(self.config)]


def load(
    path: str | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Read all layers and check the result.

    ``path`` is the file given by ``--config``; else ``KVSTORE_CONFIG`` names it, else `DEFAULT_PATH` is read if it is
    there. ``flags`` are dotted keys; None means "not given", text is parsed like an environment variable. Raises
    `InvalidRequest` for a wrong key or value, `NotFound` or `Denied` for a file that was named and cannot be read.
    """
    environ = os.environ if environ is None else environ
    merged: Layer = {}
    origins: dict[str, str] = {}
    name = path or environ.get("KVSTORE_CONFIG") or (DEFAULT_PATH if os.path.exists(DEFAULT_PATH) else None)
    if name:
        _overlay(merged, origins, _from_file(name), f"file {name}")
    for variable, key, value in _from_environment(environ):
        _overlay(merged, origins, {key: value}, f"environment {variable}")
    for key, value in _from_flags(flags or {}).items():
        _overlay(merged, origins, {key: value}, f"flag {key}")
    _complete_urls(merged)
    _follow_master(merged, origins)
    config = _convert(merged, origins)
    check(config, origins)
    return Loaded(config, origins)


def _complete_urls(merged: Layer) -> None:
    """``host:port`` is enough for a store: the scheme is put before it."""
    for key, value in merged.items():
        hint = schema.keys().get(key)
        if schema.kind_of(hint) is Kind.URL and isinstance(value, str) and value and "://" not in value:
            merged[key] = f"{SCHEME}{value}"


def _follow_master(merged: Layer, origins: dict[str, str]) -> None:
    """``client.master`` and ``mount.master``, where they are not set, name the master of the first of
    `MASTER_FALLBACKS` that is: a machine talks to one. A root in its URL is that process's own.
    """
    source = next((key for key in MASTER_FALLBACKS if isinstance(merged.get(key), str)), None)
    if source is None:
        return
    scheme, separator, rest = str(merged[source]).partition("://")
    for key in MASTER_FOLLOWERS:
        if key not in merged:
            merged[key] = f"{scheme}{separator}{rest.partition('/')[0]}"
            origins[key] = f"{source}, {origins[source]}"


def _overlay(merged: Layer, origins: dict[str, str], layer: Layer, origin: str) -> None:
    """Put a layer on top; a list of tables replaces the whole list below it."""
    for key, value in layer.items():
        merged[key] = value
        for old in [known for known in origins if known.startswith(f"{key}[")]:
            del origins[old]
        origins.update(dict.fromkeys(_written(key, value), origin))


def _written(key: str, value: object) -> list[str]:
    """The keys of the values that one written value sets."""
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return [key, *(f"{key}[{index}].{name}" for index, row in enumerate(value) for name in row)]
    return [key]


def _from_file(path: str) -> Layer:
    layer: Layer = {}
    known = schema.keys()
    for section, table in _read_toml(path).items():
        struct = schema.fields(Config).get(section)
        if struct is None:
            raise _unknown(section, schema.nearest(section, schema.fields(Config)), path)
        if not isinstance(table, dict):
            raise InvalidRequest(f"{path}: {section} must be a table; write [{section}]")
        for name, value in table.items():
            key = f"{section}.{name}"
            if key not in known:
                raise _unknown(key, schema.nearest_key(key), path)
            layer[key] = value
            _refuse_unknown_in_rows(key, value, path)
    return layer


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path}: larger than {MAX_FILE_BYTES} bytes; this is no configuration file")
        return tomllib.loads(data.decode())
    except ValueError as error:  # of the encoding, of TOML, of a number with thousands of digits
        raise InvalidRequest(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise InvalidRequest(f"{path}: tables or arrays are nested too deep") from None
    except (PermissionError, IsADirectoryError) as error:
        raise Denied(f"{path}: {error.strerror}; name a readable file with --config or KVSTORE_CONFIG") from None
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}; name a file with --config or KVSTORE_CONFIG") from None


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, str, object]]:
    """(variable, key, value). Names without ``__`` are not ours: Kubernetes injects such for every service."""
    found: list[tuple[str, str, object]] = []
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and "__" in variable:
            key = variable.removeprefix(PREFIX).lower().replace("__", ".")
            hint = schema.keys().get(key)
            if hint is None or variable != _variable(key):
                near = schema.nearest_key(key)
                raise _unknown(variable, _variable(near) if near else None, "environment")
            value = from_text(environ[variable], hint, variable)
            _refuse_unknown_in_rows(key, value, f"environment {variable}")
            found.append((variable, key, value))
    return found


def _variable(key: str) -> str:
    return PREFIX + key.replace(".", "__").upper()


def _from_flags(flags: Mapping[str, object]) -> Layer:
    layer: Layer = {}
    for key, value in flags.items():
        hint = schema.keys().get(key)
        if hint is None:
            raise _unknown(key, schema.nearest_key(key), "flags")
        if value is not None:
            layer[key] = from_text(value, hint, key) if isinstance(value, str) else value
            _refuse_unknown_in_rows(key, layer[key], "flags")
    return layer


def _refuse_unknown_in_rows(key: str, value: object, origin: str) -> None:
    """Look into a list of tables; what is not even a list is left to the conversion, which says so."""
    struct = schema.rows_of(schema.keys()[key])
    if struct is None or not isinstance(value, list):
        return
    for index, row in enumerate(value):
        for name in row if isinstance(row, dict) else ():
            if name not in schema.fields(struct):
                near = schema.nearest(name, schema.fields(struct))
                raise _unknown(f"{key}[{index}].{name}", near and f"{key}[{index}].{near}", origin)


def _unknown(key: str, near: str | None, origin: str) -> InvalidRequest:
    return InvalidRequest(f"unknown configuration key {key!r} ({origin}); {_advice(key, near)}")


def _advice(key: str, near: str | None) -> str:
    if near:
        return f"did you mean {near!r}?"
    section = key.removeprefix(PREFIX).lower().replace("__", ".").partition(".")[0]
    table = schema.fields(Config).get(section)
    return f"[{section}] has {', '.join(schema.fields(table))}" if table else "`kvstore config show` lists all keys"


def _convert(merged: Layer, origins: Mapping[str, str]) -> Config:
    tree: dict[str, dict[str, object]] = {}
    for key, value in merged.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise _explained(str(error), origins) from None


def _explained(text: str, origins: Mapping[str, str]) -> InvalidRequest:
    """msgspec's message with our key first, the allowed values, and where the value came from."""
    message, _, where = text.partition(" - at `$.")
    key = where.rstrip("`")
    origin = origins.get(key) or origins.get(re.sub(r"\[.*", "", key), "default")
    problem = message.replace("`", "").replace("Object missing", "missing").replace("Invalid enum", "invalid")
    allowed = schema.choices(key)
    advice = f"; write one of {', '.join(allowed)}" if allowed else ""
    return InvalidRequest(f"{key}: {problem[:1].lower()}{problem[1:]}{advice} ({origin})")
