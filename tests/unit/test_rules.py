"""What ``tests/RULES.md`` (rules of the protocol) and ARCHITECTURE.md (failures) name as their tests is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import pytest

TESTS: Final = Path(__file__).parents[1]
TABLE: Final = TESTS / "RULES.md"
FAILURES: Final = TESTS.parent / "ARCHITECTURE.md"
LATER: Final = (31,)
"""Rules of what is not built yet."""


class Row(NamedTuple):
    rule: str
    broken: str
    caught_by: list[str]


def rows() -> list[Row]:
    found = re.findall(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \|$", TABLE.read_text(), re.MULTILINE)[1:]  # below the title
    return [Row(rule, broken, re.findall(r"`([^`]+)`", tests)) for rule, broken, tests in found]


@pytest.mark.parametrize("rule", [rule for rule in range(1, 32) if rule not in LATER])
def test_every_rule_is_broken_and_caught(rule: int) -> None:
    assert any(row.rule == str(rule) for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.rule} {row.broken.strip()}")
def test_the_tests_are_there(row: Row) -> None:
    assert row.caught_by
    for test in row.caught_by:
        assert is_there(test), test


def test_the_tests_of_the_failures_are_there() -> None:
    named = re.findall(r"`(\w+/[\w/]+\.py::\w+)`", FAILURES.read_text())
    assert len(named) > 20
    assert [test for test in named if not is_there(test)] == []


def is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    return bool(re.search(rf"^(async )?def {re.escape(name)}\(", (TESTS / file).read_text(), re.MULTILINE))
