"""Hooks for all tests: what nobody expects in the log fails the test."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Generator, Iterator
from typing import Final

import pytest

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
"""`tests.support.child` forks while gRPC has threads here. Its fork handlers wait for them, at times for ever; the
children only make system calls. gRPC reads it when it is imported, which the next conftest may do; what the tests start
runs without it (`cluster.clean_environment`).
"""


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: children would ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup(1): likewise
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Names of files that are no UTF-8 stand in what is logged: xdist cannot send them, and the worker process ends."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report


class ErrorLog(logging.Handler):
    """Collects records from ERROR on."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.name}: {record.getMessage()}"
        if record.exc_info and record.exc_info[1]:
            line += f" ({record.exc_info[1]!r})"
        self.lines.append(line)


ANY: Final = (".*",)
# One poller thread of gRPC serves every loop of the process; it may wake for a call of a test whose loop is closed.
GRPC_OTHER_LOOP: Final = r"PollerCompletionQueue\._handle_events(.|\n)*Event loop is closed"


@pytest.fixture(autouse=True)
def _no_unexpected_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """A handler that logs an error and answers all the same would pass otherwise.

    ``@pytest.mark.allow_errors("pattern", …)`` lets matching lines pass, all lines when it names no pattern. It holds
    for the set-up, the test and the tear-down of its fixtures; asyncio's "exception was never retrieved" counts too.
    """
    marker = request.node.get_closest_marker("allow_errors")
    allowed = (marker.args or ANY) if marker else ()
    handler = ErrorLog()
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)
    expected = (*allowed, GRPC_OTHER_LOOP)
    unexpected = [line for line in handler.lines if not any(re.search(pattern, line) for pattern in expected)]
    if unexpected:
        pytest.fail("unexpected errors in the log:\n" + "\n".join(unexpected), pytrace=False)
