"""A progress bar for the transfer of a large file; nothing for a small one, and nothing where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kvstore.client.files import Progress as Report
from kvstore.client.files import no_progress

LARGE_BYTES: Final = 32 << 20
"""Below, a transfer is over before a bar could be read."""


@contextmanager
def transfer(label: str, size_bytes: int) -> Iterator[Report]:
    """A function to be told of bytes as they move. The bar stands on standard error, so that output can be piped."""
    console = Console(file=sys.stderr, markup=False, emoji=False)
    if size_bytes < LARGE_BYTES or not console.is_terminal:
        yield no_progress
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=size_bytes)
        yield lambda count: bar.advance(task, count)
