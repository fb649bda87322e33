"""What commands print: tables for people, JSON for machines. One writer, so that every command has both.

``with_json`` comes from `JsonOption`. Rows go out as JSON lines, as they come; a single thing as one JSON object. JSON
keeps raw numbers (bytes, seconds); only the tables round and add units.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.config.units import format_size

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: one object, or one per line.")]

# Piped output is for grep and awk: a table as wide as its cells, never cut at the 80 columns that rich assumes.
_PIPE_WIDTH: Final = 100_000


class Column(NamedTuple):
    """One column of a table: the row's key, the title above it, how people read the value."""

    key: str
    title: str
    show: Callable[[Any], str] = str
    justify: Literal["left", "right"] = "left"


def size_column(key: str, title: str) -> Column:
    """Bytes, shown as ``1.50 GiB``."""
    return Column(key, title, format_size, "right")


def number_column(key: str, title: str) -> Column:
    """A count, shown as ``1,234,567``."""
    return Column(key, title, "{:,}".format, "right")


def print_rows(rows: Iterable[Mapping[str, object]], columns: Sequence[Column], with_json: bool) -> None:
    """JSON lines with all fields of each row, or one table of ``columns``. A missing or None cell is empty."""
    if with_json:
        for row in rows:
            print_json(row)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.title, justify=column.justify, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_cell(column, row.get(column.key))) for column in columns))
    console().print(table)


def print_object(fields: Mapping[str, object], columns: Sequence[Column], with_json: bool) -> None:
    """One JSON object, or a line per field of ``columns``: its title, then its value."""
    if with_json:
        print_json(fields)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    for column in columns:
        table.add_row(Text(column.title), Text(_cell(column, fields.get(column.key))))
    console().print(table)


def print_json(fields: Mapping[str, object]) -> None:
    """One object on one line."""
    sys.stdout.write(json.dumps(fields, ensure_ascii=False) + "\n")


def console() -> Console:
    """The console on standard output as it is now; markup in file names is not interpreted."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)


def printable(text: str) -> str:
    """File names come from users: line breaks and terminal escapes are shown, not obeyed."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _cell(column: Column, value: object) -> str:
    return "" if value is None else printable(column.show(value))
