"""``kvstore config show``: the configuration that a process started here would use."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvstore.cli.app import ConfigOption, new_app
from kvstore.cli.output import Column, JsonOption, print_rows
from kvstore.config import load

app = new_app()


@app.callback()
def config() -> None:
    """Show the configuration and where each value comes from."""


@app.command()
def show(
    config: ConfigOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every key and its value: defaults, then the file, then the environment."""
    rows = [{"key": key, "value": value, "origin": where} for key, value, where in load(config).rows()]
    columns = [Column("key", "KEY"), Column("value", "VALUE", _toml), Column("origin", "ORIGIN")]
    print_rows(rows, columns if origin else columns[:2], as_json)


def _toml(value: object) -> str:
    """As it would stand in the file: for text, numbers, booleans and lists TOML writes what JSON does."""
    return json.dumps(value, ensure_ascii=False)
