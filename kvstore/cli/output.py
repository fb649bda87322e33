"""What commands print: tables for people, JSON for machines. One writer, so that every command has both.

``with_json`` comes from `JsonOption`. Rows go out as JSON lines, as they come; a single thing as one JSON object. JSON
keeps raw numbers (bytes, seconds); only the tables round and add units.

Tables are laid out here, not by `rich.table`: that cuts cells at the width of the terminal, and a name that is cut
cannot be copied. A line that is too long wraps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvstore.config.units import format_size

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: one object, or one per line.")]


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
    """JSON lines with all fields of each row, or one table of ``columns``."""
    if with_json:
        for row in rows:
            print_json(row)
        return
    _print(table(rows, columns))


def table(rows: Iterable[Mapping[str, object]], columns: Sequence[Column]) -> Text:
    """Titles and a line per row. A missing or None cell is empty."""
    cells = [[_cell(column, row.get(column.key)) for column in columns] for row in rows]
    head, *lines = _aligned([[column.title for column in columns], *cells], [column.justify for column in columns])
    return Text("\n").join([Text(head, style="bold"), *map(Text, lines)])


def print_object(fields: Mapping[str, object], columns: Sequence[Column], with_json: bool) -> None:
    """One JSON object, or a line per field of ``columns``: its title, then its value."""
    if with_json:
        print_json(fields)
        return
    width = max(cell_len(column.title) for column in columns)
    for column in columns:
        value = _cell(column, fields.get(column.key))
        title = _padded(column.title, width, "left") if value else column.title
        _print(Text.assemble((title, "bold"), f"  {value}" if value else ""))


def print_note(text: str) -> None:
    """A line for people below a table."""
    _print(Text(text, style="dim"))


def print_json(fields: Mapping[str, object]) -> None:
    """One object on one line."""
    sys.stdout.write(json.dumps(fields, ensure_ascii=False) + "\n")


def console() -> Console:
    """The console on standard output as it is now; markup in file names is not interpreted."""
    return Console(file=sys.stdout, markup=False, highlight=False, emoji=False)


def printable(text: str) -> str:
    """File names come from users: line breaks and terminal escapes are shown, not obeyed."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _cell(column: Column, value: object) -> str:
    return "" if value is None else printable(column.show(value))


def _aligned(table: Sequence[Sequence[str]], justify: Sequence[Literal["left", "right"]]) -> Iterator[str]:
    """Lines with their cells below each other, two blanks apart, none at the end (it would wrap, too)."""
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = zip(row, widths, justify, strict=True)
        yield "  ".join(_padded(*cell) for cell in cells).rstrip(" ")


def _padded(text: str, width: int, justify: Literal["left", "right"]) -> str:
    blanks = " " * (width - cell_len(text))
    return blanks + text if justify == "right" else text + blanks


def _print(text: Text) -> None:
    console().print(text, soft_wrap=True)
