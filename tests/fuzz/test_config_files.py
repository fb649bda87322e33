"""Any file, environment and flags: a configuration, or one line that says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.config import Loaded, load, schema
from kvstore.config.check import CHECKS
from kvstore.core.errors import InvalidRequest
from tests.fuzz.hostile import fuzz, mangled

GOOD: Final = b"""
[master]
listen = "127.0.0.1:7070"
tick = "1s"
dead_ticks = 5
[worker]
node_id = "a"
[[worker.volumes]]
tier = "ssd"
path = "/data"
capacity = "1GiB"
high_watermark = 0.9
low_watermark = 0.8
[mount]
temp_patterns = ["*.tmp"]
"""
TEXTS: Final = st.one_of(
    st.sampled_from(
        ["", "0", "-1", "1e999", "nan", "inf", "9" * 5000, "h:0", "::", "/", "../x", "x" * 5000, "[" * 2000]
    ),
    st.sampled_from(["{", "[{}]", '[{tier="ssd"}]', "[1]", "true", "1s", "1GiB", "0777", "kvstore://h:1", "ssd", "\0"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
VALUES: Final = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**70), 2**70), st.floats(), TEXTS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["tier", "path", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS: Final = sorted(schema.keys())


@fuzz(300)
@given(mangled(st.just(GOOD)))
@example(b"[worker]\nvolumes = " + b"[" * 100_000)
@example(b"a." * 2000 + b"b = 1")
@example(b"\xff\xfe")
@example(b"[master]\ndead_ticks = " + b"9" * 5000)
@example(b"x" * (1 << 21))
def test_any_file_is_a_configuration_or_refused_in_one_line(data: bytes) -> None:
    refused_in_one_line(data, {}, {})


@fuzz(300)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=2))
def test_any_values_in_a_file(values: dict[str, Any]) -> None:
    tables: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, []).append(f"{name} = {_toml(value)}")
    text = "\n".join("\n".join([f"[{section}]", *lines]) for section, lines in tables.items())
    refused_in_one_line(text.encode(), {}, {})


@fuzz(300)
@given(
    st.dictionaries(st.sampled_from(KEYS), TEXTS, max_size=2), st.dictionaries(st.sampled_from(KEYS), TEXTS, max_size=2)
)
def test_any_text_in_the_environment_and_in_flags(environ: dict[str, str], flags: dict[str, str]) -> None:
    names = {f"KVSTORE_{key.replace('.', '__').upper()}": text for key, text in environ.items()}
    refused_in_one_line(b"", names, flags)


@pytest.fixture(autouse=True, scope="module")
def _file(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FILE
    FILE = tmp_path_factory.mktemp("config") / "kvstore.toml"


FILE = Path()


def refused_in_one_line(data: bytes, environ: dict[str, str], flags: dict[str, str]) -> None:
    FILE.write_bytes(data)
    refusal = ""
    try:
        use(load(str(FILE), flags, environ))
    except InvalidRequest as error:
        refusal = error.message
    assert "\n" not in refusal


def use(loaded: Loaded) -> None:
    """What was let through is what the processes make numbers of."""
    for leaf in schema.leaves(loaded.config):
        if leaf.kind is not None:
            CHECKS[leaf.kind](str(leaf.value))
    for section in (loaded.config.master, loaded.config.worker, loaded.config.client, loaded.config.mount):
        for name in vars(type(section)):
            if isinstance(vars(type(section))[name], property):
                getattr(section, name)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return str(value)
    return json.dumps(value)
