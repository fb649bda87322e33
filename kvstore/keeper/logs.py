"""Log lines on standard error in the formats of `kvstore.obs.logging`; the keeper imports nothing of kvstore."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final

COMPONENT: Final = "keeper"


def setup(level: str, format: str) -> None:
    """`level`: debug, info, warning, error; `format`: text, json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


class TextFormatter(logging.Formatter):
    """``2026-11-29T13:52:12.123Z INFO keeper[812] kvstore.keeper.crew: …``."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname} {COMPONENT}[{record.process}] {record.name}: "
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info and record.exc_info[0] else ""
        return head + _one_line(record.getMessage()) + trace


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "component": COMPONENT,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0]:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _one_line(text: str) -> str:
    """Names come from users: a line break in one must not forge a log line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
