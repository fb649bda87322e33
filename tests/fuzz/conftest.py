"""Thousands of examples warn of thousands of things: only errors are kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    log = logging.getLogger("kvstore")
    before = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(before)
