"""Log lines of a process: one stream, text for people or JSON for machines.

`setup` is for mains. A library module only says ``log = logging.getLogger(__name__)``: LMCache embeds us, and its
logging is its own.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

OWN_LOGGER: Final = "kvstore"
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup(
    component: str,
    level: Literal["debug", "info", "warning", "error"] = "info",
    format: Literal["text", "json"] = "text",
    stream: TextIO | None = None,
) -> None:
    """Send all log records of this process to one stream, standard error by default.

    ``component`` (master, worker, mount, node) stands in every line. Our own loggers speak from ``level`` on, others
    from warning on. A second call replaces what the first one installed, and leaves foreign handlers alone.
    """
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
    handler = _Handler(stream or sys.stderr)
    handler.addFilter(Throttle())
    handler.setFormatter(JsonFormatter(component) if format == "json" else TextFormatter(component))
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(OWN_LOGGER).setLevel(level.upper())
    logging.captureWarnings(True)


class _Handler(logging.StreamHandler[TextIO]):
    """Marks the handler that `setup` installed."""


BURST: Final = 20
WINDOW_S: Final = 10.0


class Throttle(logging.Filter):
    """Lets `BURST` records of one place in the code pass in `WINDOW_S`; the first one after that says how many did not.
    A full disk is the same line for each of a thousand writers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int], tuple[float, int]] = {}
        """Module and line → start of the window, records in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        place = record.pathname, record.lineno
        start_s, count = self._places.get(place, (record.created, 0))
        if not 0 <= record.created - start_s < WINDOW_S:
            if count > BURST:
                record.msg = f"{record.msg} (and {count - BURST} like it before, not shown)"
            start_s, count = record.created, 0
        self._places[place] = start_s, count + 1
        return count < BURST


class TextFormatter(logging.Formatter):
    """``2026-11-29T13:52:12.123Z INFO worker[812] kvstore.worker.reports.report: sent full=True``."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self.component = component

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {name}={value}" for name, value in extra_fields(record).items())
        head = f"{timestamp(record)} {record.levelname} {self.component}[{record.process}] {record.name}: "
        line = head + one_line(record.getMessage() + extra)
        trace = traceback_of(self, record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, component, pid, logger, message, what ``extra=`` added, exception."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self.component = component

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            **extra_fields(record),
            "time": timestamp(record),
            "level": record.levelname.lower(),
            "component": self.component,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace := traceback_of(self, record):
            fields["exception"] = trace
        return json.dumps(fields, default=str)


def extra_fields(record: logging.LogRecord) -> dict[str, object]:
    """What the caller passed as ``extra=``."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def timestamp(record: logging.LogRecord) -> str:
    """UTC with milliseconds."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def one_line(text: str) -> str:
    """File names come from users: a line break in one must not forge a log line, nor an escape paint the screen."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def traceback_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)
